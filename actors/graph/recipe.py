"""All that an image, a video or an audio clip depends on, resolved: the names made hashes, the defaults made numbers.

Values only. Two images with equal recipes have equal pixels; two videos have equal frames, two audio clips equal
samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.actors.request.low_noise_fields import LowNoiseRun
    from modelpool.actors.request.requests import GenerateRequest
    from modelpool.pool.core.stage_params import ControlRef, SampleWork


#: what images are written as
IMAGE_FORMAT = "png"
#: fields that recipes had not always
_LATER_IMAGES = (
    *("controls", "regions", "reference_sha256", "last_image_sha256", "image_cfg", "noise_level"),
    *("more_references", "reference_as", "video_sha256", "video_mask_sha256"),
)
_LATER = (
    "pictures",
    "frames",
    "frame_rate",
    "seconds",
    "motion",
    "image_noise",
    "elevation",
    "format",
    "clip_skip",
    "embeddings",
    "decoder",
    "low_noise",
)


@dataclass(frozen=True, slots=True)
class RecipeLora:
    """A LoRA as it was used. `noise` says on which of two diffusion models, where that was one."""

    name: str
    sha256: str
    strength: float
    noise: str = ""


@dataclass(frozen=True, slots=True)
class RecipeControl:
    """A ControlNet as it was used. `mode` is of those that have several; `said` is `pool.core.refs.ControlRef.said`;
    `mask_sha256` is of the hole in its image, empty where it has none."""

    name: str
    sha256: str
    image_sha256: str
    image_file: str
    strength: float
    start: float
    end: float
    mode: int | None = None
    said: Mapping[str, bool] = field(default_factory=dict)
    mask_sha256: str = ""


@dataclass(frozen=True, slots=True)
class RecipeRegion:
    """A text for a part of the image: in a box (left, top, width, height in pixels) or a mask."""

    prompt: str
    strength: float
    box: tuple[int, int, int, int] | None
    mask_sha256: str


@dataclass(frozen=True, slots=True)
class RecipeDecoder:
    """The second model of an image that two made, as it was used."""

    model: str
    sha256: str
    steps: int
    cfg: float

    @classmethod
    def of(cls, work: SampleWork | None) -> RecipeDecoder | None:
        """What did `work`; None where one model made all."""
        return None if work is None else cls(work.model.name, work.model.sha256, work.steps, work.cfg)


@dataclass(frozen=True, slots=True)
class RecipeLowNoise:
    """How the second of two diffusion models was run: from which share of noise on, and how strongly guided."""

    boundary: float
    cfg: float

    @classmethod
    def of(cls, said: LowNoiseRun | None) -> RecipeLowNoise | None:
        """What a request says of it that leaves nothing open; None for a model that is one."""
        if said is None or said.boundary is None or said.cfg is None:
            return None
        return cls(said.boundary, said.cfg)


@dataclass(frozen=True, slots=True)
class RecipeImages:
    """Images that an image was made from, and how; the names are those of a request. Hashes are of the pixels as
    they were used; names of files are told, and not part of the digest."""

    image_sha256: str = ""
    image_file: str = ""
    mask_sha256: str = ""
    mask_file: str = ""
    first_step: int = 0
    paste: bool = False
    hires: Mapping[str, Any] = field(default_factory=dict)
    controls: tuple[RecipeControl, ...] = ()
    regions: tuple[RecipeRegion, ...] = ()
    reference_sha256: str = ""
    reference_file: str = ""
    #: hashes of those after the first, and names of their files
    more_references: tuple[str, ...] = ()
    more_reference_files: tuple[str, ...] = ()
    #: how a text encoder was shown them; empty where none was
    reference_as: str = ""
    last_image_sha256: str = ""
    last_image_file: str = ""
    video_sha256: str = ""
    video_file: str = ""
    video_mask_sha256: str = ""
    video_mask_file: str = ""
    #: as it was used; 0 where no image counts so
    image_cfg: float = 0.0
    noise_level: int = 0

    @classmethod
    def of(cls, request: GenerateRequest, controls: Sequence[ControlRef] = ()) -> RecipeImages | None:
        """What `request`, whose images are given, says of them; None where it says nothing. `controls` are what its
        ControlNets are."""
        regions = tuple(region for region in request.regions if region.strength != 0)
        told_of = (request.image, request.reference, request.hires, request.video)
        if not any(each is not None for each in told_of) and not controls and not regions:
            return None
        image, mask = request.image, request.mask
        named = [control for control in request.controls if control.strength != 0]
        read = [(control.image or image, control.mask or mask) for control in named]
        references: list[Any] = list(request.references)
        reference = references[0] if references else None
        return cls(
            image_sha256="" if image is None else image.sha256,
            image_file="" if image is None else image.file,
            mask_sha256="" if mask is None else mask.sha256,
            mask_file="" if mask is None else mask.file,
            reference_sha256="" if reference is None else reference.sha256,
            reference_file="" if reference is None else reference.file,
            more_references=tuple(each.sha256 for each in references[1:]),
            more_reference_files=tuple(each.file for each in references[1:]),
            reference_as=request.reference_as or "",
            last_image_sha256="" if request.last_image is None else request.last_image.sha256,
            last_image_file="" if request.last_image is None else request.last_image.file,
            video_sha256="" if request.video is None else request.video.sha256,
            video_file="" if request.video is None else request.video.file,
            video_mask_sha256="" if request.video_mask is None else request.video_mask.sha256,
            video_mask_file="" if request.video_mask is None else request.video_mask.file,
            paste=mask is not None and request.paste,
            hires={} if request.hires is None else request.hires.model_dump(),
            controls=tuple(
                RecipeControl(
                    *(ref.name, ref.sha256, own.sha256, own.file),
                    *(ref.strength, ref.start, ref.end),
                    mode=ref.mode,
                    said=dict(ref.said),
                    mask_sha256="" if ref.hole is None else hole.sha256,
                )
                for (own, hole), ref in zip(read, controls, strict=True)
            ),
            regions=tuple(
                RecipeRegion(r.prompt, r.strength, r.box, "" if r.mask is None else r.mask.sha256) for r in regions
            ),
        )

    def of_the_digest(self) -> dict[str, Any]:
        """What of it makes the image. What is not used is left out, so that what is added here later changes no
        digest that is known."""
        content = {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith(("_file", "_files"))}
        unused: tuple[tuple[str, Any], ...] = ("mode", None), ("said", {}), ("mask_sha256", "")
        content["controls"] = [
            {k: v for k, v in c.items() if k != "image_file" and (k, v) not in unused} for c in content["controls"]
        ]
        return {k: v for k, v in content.items() if v or k not in _LATER_IMAGES}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to do again to get the same image, video or audio. `versions` and `warnings` are told, and not part of the
    digest."""

    model: str
    model_sha256: str
    prompt: str
    negative: str
    loras: tuple[RecipeLora, ...]
    steps: int
    cfg: float
    sampler: str
    schedule: str
    width: int
    height: int
    seed: int
    versions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    #: None for an image that is made of texts alone
    pictures: RecipeImages | None = None
    #: of a video
    frames: int = 0
    frame_rate: float = 0.0
    #: what its model was told of it, as it was used
    motion: int = 0
    image_noise: float = 0.0
    elevation: float = 0.0
    #: of an audio clip, whose width and height are 0
    seconds: float = 0.0
    #: what a video or an audio clip is written as; empty for images
    format: str = ""
    clip_skip: int = 0
    #: textual inversions that the texts name, and the SHA-256 of each
    embeddings: tuple[tuple[str, str], ...] = ()
    #: None where one model made all
    decoder: RecipeDecoder | None = None
    #: None for a model that is one
    low_noise: RecipeLowNoise | None = None

    def as_json(self) -> dict[str, Any]:
        """A plain dictionary, ready for `json.dumps`. What is not used of later fields is left out, so that no digest
        that is known changes."""
        content = dataclasses.asdict(self)
        content["loras"] = tuple({k: v for k, v in each.items() if v or k != "noise"} for each in content["loras"])
        for control in (content["pictures"] or {}).get("controls", ()):
            for name in ("said", "mask_sha256"):
                if not control[name]:
                    del control[name]
        return {name: value for name, value in content.items() if value or name not in _LATER}

    @property
    def ending(self) -> str:
        """Of the name of the file that it is written to, without a dot."""
        return self.format or IMAGE_FORMAT

    @property
    def digest(self) -> str:
        """20 hexadecimal digits that name what is made."""
        content = {k: v for k, v in self.as_json().items() if k not in ("versions", "warnings")}
        if self.pictures is not None:
            content["pictures"] = self.pictures.of_the_digest()
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:20]
