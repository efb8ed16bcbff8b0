"""The recipe of an output: everything that it depends on, with names resolved to hashes and defaults to numbers.

Values only. Images with equal recipes have equal pixels; videos have equal frames, audio clips equal samples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: file format of images whose request names none
IMAGE_FORMAT = "png"
#: marks fields that were added after the first version of recipes: digests leave them out if they are not used, so that
#: adding a field changes no existing digest
_LATER: Mapping[str, bool] = {"later": True}
#: fields of a recipe that are not part of its digest: how and where it was computed, and what was said about it
INFORMATIVE = ("versions", "computed_by", "warnings")


#: the end of a name on the hub, which has the commit
_COMMIT = re.compile(r"@[0-9a-f]{40}$")


def _without_commit(name: str) -> str:
    """Return the name of a file in the digest, which has the hash of the file: other commits may have the same file."""
    return _COMMIT.sub("", name)


def _is_used_or_first(kind: type[Any], name: str, value: Any) -> bool:
    return bool(value) or not kind.__dataclass_fields__[name].metadata.get("later")


@dataclass(frozen=True, slots=True)
class RecipeLora:
    """A LoRA as it was applied. `noise` is the expert, if it was applied to one of two; the other fields are those of
    `LoraRef` of `pool.values.core.refs`."""

    name: str
    sha256: str
    strength: float
    noise: str = ""
    text_strength: float | None = None
    start: float = 0.0
    end: float = 1.0
    blocks: tuple[tuple[str, float], ...] = ()
    keyframes: tuple[tuple[float, float], ...] = ()
    interpolation: str = ""
    only: tuple[str, ...] = ()

    @property
    def used(self) -> dict[str, Any]:
        """The fields without the later ones that are not used, so that adding one changes no existing digest."""
        first = ("name", "sha256", "strength")
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        return {name: value for name, value in fields.items() if name in first or value != defaults[name]}


@dataclass(frozen=True, slots=True)
class RecipeControl:
    """A ControlNet as it was applied. `mode` is set if it has several; `said` is `ControlRef.config_overrides` of
    `pool.values.core.refs`; `mask_sha256` is the hash of its inpaint mask, empty if it has none."""

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
class RecipeImagePrompt:
    """An image prompt as it was applied: the adapter, the vision encoder that read its images, and the images. `faces`
    are embeddings; their hash is empty if there are none."""

    name: str
    sha256: str
    encoder: str
    encoder_sha256: str
    strength: float
    start: float
    end: float
    image_sha256: tuple[str, ...] = ()
    image_files: tuple[str, ...] = ()
    faces_sha256: str = ""
    faces_file: str = ""
    blocks: tuple[tuple[str, float], ...] = ()
    mask_sha256: tuple[str, ...] = field(default=(), metadata=_LATER)
    mask_files: tuple[str, ...] = field(default=(), metadata=_LATER)


@dataclass(frozen=True, slots=True)
class RecipeRegion:
    """A prompt for a part of the image: in a box (left, top, width, height in pixels) or a mask."""

    prompt: str
    strength: float
    box: tuple[int, int, int, int] | None
    mask_sha256: str


@dataclass(frozen=True, slots=True)
class RecipeDecoder:
    """The decoder of a two-stage model, as it was used."""

    model: str
    sha256: str
    steps: int
    cfg: float


@dataclass(frozen=True, slots=True)
class RecipeUpscale:
    """The upscaler of the output, as it was used: factor of both sides, edge of tiles and their overlap; 0 for those of
    the pool."""

    model: str
    sha256: str
    scale: float
    tile: int = 0
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class RecipeLowNoise:
    """The low-noise expert as it was run: the noise level below which it took over, and its guidance scale."""

    boundary: float
    cfg: float


@dataclass(frozen=True, slots=True)
class RecipeNoise:
    """The noise that the sampler drew in its steps, where it differs from the sampler's default. The names are the
    fields of a request."""

    eta: float | None = None
    s_noise: float = 1.0
    s_churn: float = 0.0


@dataclass(frozen=True, slots=True)
class RecipeView:
    """The camera of a novel view of an object. The names are the fields of a request."""

    azimuth: float = 0.0
    elevation: float = 0.0
    camera_distance: float = 0.0
    image_elevation: float | None = None


@dataclass(frozen=True, slots=True)
class RecipeImages:
    """The input images of an output; the names are the fields of a request. Hashes are of the pixels as used; file
    names are informative and not part of the digest."""

    image_sha256: str = ""
    image_file: str = ""
    mask_sha256: str = ""
    mask_file: str = ""
    first_step: int = 0
    paste: bool = False
    hires: Mapping[str, Any] = field(default_factory=dict)
    controls: tuple[RecipeControl, ...] = field(default=(), metadata=_LATER)
    image_prompts: tuple[RecipeImagePrompt, ...] = field(default=(), metadata=_LATER)
    regions: tuple[RecipeRegion, ...] = field(default=(), metadata=_LATER)
    reference_sha256: str = field(default="", metadata=_LATER)
    reference_file: str = ""
    #: hashes, and file names, of the references after the first
    more_references: tuple[str, ...] = field(default=(), metadata=_LATER)
    more_reference_files: tuple[str, ...] = ()
    #: how a text encoder with vision read them; empty if none did
    reference_as: str = field(default="", metadata=_LATER)
    last_image_sha256: str = field(default="", metadata=_LATER)
    last_image_file: str = ""
    video_sha256: str = field(default="", metadata=_LATER)
    video_file: str = ""
    video_mask_sha256: str = field(default="", metadata=_LATER)
    video_mask_file: str = ""
    face_video_sha256: str = field(default="", metadata=_LATER)
    face_video_file: str = ""
    #: as used; 0 if the model is not guided by an image
    image_cfg: float = field(default=0.0, metadata=_LATER)
    noise_level: int = field(default=0, metadata=_LATER)

    def digest_content(self) -> dict[str, Any]:
        """Return the part that determines the output. Unused later fields are left out, so that adding a field changes
        no existing digest."""
        content = {k: v for k, v in dataclasses.asdict(self).items() if not k.endswith(("_file", "_files"))}
        unused: tuple[tuple[str, Any], ...] = ("mode", None), ("said", {}), ("mask_sha256", "")
        content["controls"] = [
            {k: v for k, v in c.items() if k != "image_file" and (k, v) not in unused} for c in content["controls"]
        ]
        for each in (*content["controls"], *content["image_prompts"]):
            each |= {name: _without_commit(each[name]) for name in ("name", "encoder") if name in each}
        content["image_prompts"] = tuple(
            {
                k: v
                for k, v in prompt.items()
                if not k.endswith(("_file", "_files")) and _is_used_or_first(RecipeImagePrompt, k, v)
            }
            for prompt in content["image_prompts"]
        )
        return {k: v for k, v in content.items() if _is_used_or_first(RecipeImages, k, v)}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything needed to generate the same image, video or audio clip again. The fields of `INFORMATIVE` are not part
    of the digest."""

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
    #: None for an image that is generated from text only
    pictures: RecipeImages | None = field(default=None, metadata=_LATER)
    #: of a video, or of the layers of an image
    frames: int = field(default=0, metadata=_LATER)
    frame_rate: float = field(default=0.0, metadata=_LATER)
    #: conditioning of a video, as used
    motion: int = field(default=0, metadata=_LATER)
    image_noise: float = field(default=0.0, metadata=_LATER)
    elevation: float = field(default=0.0, metadata=_LATER)
    #: of an audio clip, whose width and height are 0
    seconds: float = field(default=0.0, metadata=_LATER)
    #: file format; empty for images in `IMAGE_FORMAT`
    format: str = field(default="", metadata=_LATER)
    #: of an image file with lossy compression
    quality: int = field(default=0, metadata=_LATER)
    clip_skip: int = field(default=0, metadata=_LATER)
    #: name and SHA-256 of the textual inversions that the texts name
    embeddings: tuple[tuple[str, str], ...] = field(default=(), metadata=_LATER)
    #: None for a model with one stage
    decoder: RecipeDecoder | None = field(default=None, metadata=_LATER)
    #: None for the sampler's defaults
    noise: RecipeNoise | None = field(default=None, metadata=_LATER)
    view: RecipeView | None = field(default=None, metadata=_LATER)
    #: noise levels that the request listed
    sigmas: tuple[float, ...] = field(default=(), metadata=_LATER)
    #: None for a model without experts
    low_noise: RecipeLowNoise | None = field(default=None, metadata=_LATER)
    #: None for an output in the size of its latent
    upscale: RecipeUpscale | None = field(default=None, metadata=_LATER)
    #: all settings of the options of the run, by the name of the option
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata=_LATER)
    #: of music, for models that read them
    lyrics: str = field(default="", metadata=_LATER)
    lyrics_language: str = field(default="", metadata=_LATER)
    bpm: int = field(default=0, metadata=_LATER)
    key_scale: str = field(default="", metadata=_LATER)
    time_signature: str = field(default="", metadata=_LATER)
    #: of the noise levels, where it is not the model's own
    shift: float = field(default=0.0, metadata=_LATER)
    #: settings of the pool that change pixels, by name, where they differ from the defaults
    computed_by: Mapping[str, str] = field(default_factory=dict, metadata=_LATER)

    def as_json(self) -> dict[str, Any]:
        """Return a plain dictionary for `json.dumps`. Unused later fields are left out, so that no existing digest
        changes."""
        content = dataclasses.asdict(self)
        content["loras"] = tuple(each.used for each in self.loras)
        for control in (content["pictures"] or {}).get("controls", ()):
            for name in ("said", "mask_sha256"):
                if not control[name]:
                    del control[name]
        if self.pictures is not None and not self.pictures.image_prompts:
            del content["pictures"]["image_prompts"]
        elif self.pictures is not None:
            content["pictures"]["image_prompts"] = tuple(
                {k: v for k, v in prompt.items() if _is_used_or_first(RecipeImagePrompt, k, v)}
                for prompt in content["pictures"]["image_prompts"]
            )
        return {name: value for name, value in content.items() if _is_used_or_first(Recipe, name, value)}

    def to_json(self, indent: int | None = None) -> str:
        """Return it as the JSON text that output files have."""
        return json.dumps(self.as_json(), indent=indent)

    @property
    def ending(self) -> str:
        """The file extension of the output, without a dot."""
        return self.format or IMAGE_FORMAT

    @property
    def is_layers(self) -> bool:
        """Whether its frames are the layers of one image, in one file of the format of images."""
        return self.frames > 0 and self.ending == IMAGE_FORMAT

    @property
    def digest(self) -> str:
        """20 hexadecimal digits that identify the output."""
        return hashlib.sha256(json.dumps(self.determining(), sort_keys=True).encode()).hexdigest()[:20]

    def determining(self) -> dict[str, Any]:
        """Return the part that determines the output."""
        content = {k: v for k, v in self.as_json().items() if k not in INFORMATIVE}
        content["model"] = _without_commit(self.model)
        content["loras"] = tuple({**lora, "name": _without_commit(lora["name"])} for lora in content["loras"])
        for name in ("decoder", "upscale"):
            if part := content.get(name):
                part["model"] = _without_commit(part["model"])
        if self.pictures is not None:
            content["pictures"] = self.pictures.digest_content()
        return content
