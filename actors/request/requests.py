"""GenerateRequest: one image, video or audio clip to generate; parsed and validated in the driver before submission.

Checks names and numbers; whether a model exists and supports a field is checked with the catalog. Torch-free, ray-free.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, field_validator, model_validator

from modelpool.actors.request.bounds import MAX_TEXT_CHARACTERS
from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.control_video_fields import checked_video
from modelpool.actors.request.decoder_fields import Decoder
from modelpool.actors.request.field_errors import missing_field
from modelpool.actors.request.field_table import CHOSEN_BATCHES, OPTION_FIELDS, REQUEST_FIELDS
from modelpool.actors.request.image_fields import (
    DEFAULT_MASKED_STRENGTH,
    DEFAULT_STRENGTH,
    IMAGE_FORMS,
    Hires,
    ImageSource,
    Region,
    checked_image,
    checked_parts,
    checked_references,
    checked_strength,
    skipped_steps,
)
from modelpool.actors.request.image_prompt_fields import ImagePrompt
from modelpool.actors.request.labels import LABEL_FIELDS
from modelpool.actors.request.lora_fields import LoraChoice as LoraChoice
from modelpool.actors.request.lora_fields import parse_loras
from modelpool.actors.request.low_noise_fields import LowNoiseRun
from modelpool.actors.request.number_fields import STEPS
from modelpool.actors.request.pass_fields import Pass, checked_passes
from modelpool.actors.request.qos import check_user, parse_seconds
from modelpool.actors.request.run_option_fields import is_run_option, parse_run_options
from modelpool.actors.request.strict import Strict
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.pool.inference.sampling.sampler_names import resolve_sampling as resolve_sampling
from modelpool.pool.values.core.errors import UnknownName, UnusableField, unknown_name, unusable_field
from modelpool.pool.values.core.run_options import NO_OPTIONS, RUN_OPTIONS, RunOptions

#: names of diffusers that a request accepts for its own
SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "negative_prompt": "negative",
        "guidance_scale": "cfg",
        "num_inference_steps": "steps",
        "num_images_per_prompt": "n",
    }
)
#: width and height in one: "512x768"
SIZE = "size"
#: all names that are accepted besides the fields
OTHER_FIELDS = (*SPELLINGS, SIZE)
_SIZE = re.compile(r"\s*(\d{1,5})\s*[xX\u00d7]\s*(\d{1,5})\s*")
#: what a request may set beside `workflow`
WORKFLOW_FIELDS = frozenset(
    (
        *("workflow", "seed", "n", "priority", "user", "deadline", "preview", "format", "quality"),
        *LABEL_FIELDS,
    )
)
#: fields that a request with passes cannot have: its own second pass, and inputs that are joined with the output
WITHOUT_PASSES = ("hires", "mask", "decoder", "low_noise", "video", "video_mask", "face_video", "last_image")
_NOTHING = object()
#: seeds are below this, and continue at 0
_SEEDS = 2**64


def _field(name: str) -> Any:
    """Return the pydantic field of a row of the table."""
    row = REQUEST_FIELDS[name]
    return Field(... if row.is_required else row.default, description=row.meaning)


class GenerateRequest(Strict):
    """One image, video or audio clip to generate. The fields are described in docs/reference/requests.md. Those that
    only some models support may be in the mapping `options` instead, as in `options={"motion": 127}`. Four fields may
    have their names of diffusers: negative_prompt, guidance_scale, num_inference_steps and num_images_per_prompt.
    `size="512x768"` is width and height.

    Raises UserError (a ValueError) naming the field, the value found and the value expected.
    """

    model: Annotated[str, Field(min_length=1)] = _field("model")
    prompt: str = _field("prompt")
    negative: str = _field("negative")
    loras: tuple[LoraChoice, ...] = _field("loras")
    steps: int = _field("steps")
    cfg: float = _field("cfg")
    sampler: str = _field("sampler")
    schedule: str | None = _field("schedule")
    sigmas: tuple[float, ...] = _field("sigmas")
    eta: float | None = _field("eta")
    s_noise: float = _field("s_noise")
    s_churn: float = _field("s_churn")
    shift: float | None = _field("shift")
    beta_alpha: float | None = _field("beta_alpha")
    beta_beta: float | None = _field("beta_beta")
    width: int | None = _field("width")
    height: int | None = _field("height")
    seed: int | None = _field("seed")
    priority: int = _field("priority")
    user: str | None = _field("user")
    deadline: float | None = _field("deadline")
    n: int = _field("n")
    id: str | None = _field("id")
    metadata: Any = _field("metadata")
    line: int | None = _field("line")
    preview: str | None = _field("preview")
    #: an `ImageSource` of `actors.request.image_fields` after validation
    image: Any = _field("image")
    mask: Any = _field("mask")
    strength: float | None = _field("strength")
    paste: bool = _field("paste")
    hires: Hires | None = _field("hires")
    upscale: Upscale | None = _field("upscale")
    controls: tuple[Control, ...] = _field("controls")
    image_prompts: tuple[ImagePrompt, ...] = _field("image_prompts")
    regions: tuple[Region, ...] = _field("regions")
    frames: int | None = _field("frames")
    frame_rate: float | None = _field("frame_rate")
    motion: int | None = _field("motion")
    image_noise: float | None = _field("image_noise")
    elevation: float | None = _field("elevation")
    azimuth: float | None = _field("azimuth")
    camera_distance: float | None = _field("camera_distance")
    image_elevation: float | None = _field("image_elevation")
    seconds: float | None = _field("seconds")
    lyrics: str | None = _field("lyrics")
    lyrics_language: str | None = _field("lyrics_language")
    bpm: int | None = _field("bpm")
    key_scale: str | None = _field("key_scale")
    time_signature: str | None = _field("time_signature")
    format: str | None = _field("format")
    quality: int | None = _field("quality")
    batch: int | Literal["auto", "adaptive"] = _field("batch")
    vae_tile: int | None = _field("vae_tile")
    vae_frames: int | None = _field("vae_frames")
    gpus: int | Literal["auto"] = _field("gpus")
    clip_skip: int = _field("clip_skip")
    #: an `ImageSource`, or a tuple of several, after validation
    reference: Any = _field("reference")
    reference_as: Literal["whole", "numbered"] | None = _field("reference_as")
    #: an `ImageSource` after validation
    last_image: Any = _field("last_image")
    #: a `VideoSource` of `actors.request.control_video_fields` after validation
    video: Any = _field("video")
    video_mask: Any = _field("video_mask")
    face_video: Any = _field("face_video")
    image_cfg: float | None = _field("image_cfg")
    noise_level: int | None = _field("noise_level")
    decoder: Decoder | None = _field("decoder")
    low_noise: LowNoiseRun | None = _field("low_noise")
    options: RunOptions | None = _field("options")
    passes: tuple[Pass, ...] = _field("passes")
    #: a `Workflow` of `actors.request.workflow_fields` after validation
    workflow: Any = _field("workflow")

    @model_validator(mode="before")
    @classmethod
    def _own_names(cls, fields: Any) -> Any:
        """Replace the names of other programs. Each field may have one of its names."""
        if not isinstance(fields, Mapping) or not any(name in fields for name in OTHER_FIELDS):
            return fields
        own = {name: value for name, value in fields.items() if name not in OTHER_FIELDS}
        for alias, name in SPELLINGS.items():
            if fields.get(alias) is not None:
                if name in own:
                    raise unusable_field(alias, fields[alias], f"it or {name}, which is the same field, not both")
                own[name] = fields[alias]
        if fields.get(SIZE) is not None:
            if "width" in own or "height" in own:
                raise unusable_field(SIZE, fields[SIZE], "it, or width and height, not both")
            own["width"], own["height"] = _sides(fields[SIZE])
        return own

    @model_validator(mode="before")
    @classmethod
    def _with_options(cls, fields: Any) -> Any:
        """Accept fields that only some models support under `options`, too; the rest there are options of a run."""
        if not isinstance(fields, Mapping) or isinstance(fields.get("options"), RunOptions | None):
            return fields
        flat, options = {name: value for name, value in fields.items() if name != "options"}, fields["options"]
        if not isinstance(options, Mapping):
            raise unusable_field("options", options, 'fields by name, such as {"motion": 127}')
        options = {name: value for name, value in options.items() if value is not None or name not in OPTION_FIELDS}
        own = {name: value for name, value in options.items() if is_run_option(name)}
        for name in options.keys() - own.keys():
            if name not in OPTION_FIELDS:
                unknown = unknown_name("option", str(name), (*OPTION_FIELDS, *RUN_OPTIONS))
                of_runs, of_models = ", ".join(sorted(RUN_OPTIONS)), ", ".join(OPTION_FIELDS)
                raise UnknownName(f"{unknown} Options of a run: {of_runs}; fields that may be here, too: {of_models}")
            if name in flat:
                raise unusable_field("options", name, f"{name} once: it is set outside of options, too")
        others = {name: value for name, value in options.items() if name not in own}
        return {**flat, **others, **({"options": own} if own else {})}

    @model_validator(mode="before")
    @classmethod
    def _steps_of_sigmas(cls, fields: Any) -> Any:
        """Take the number of steps from `sigmas`. Raises UnusableField if another one is given."""
        if not isinstance(fields, Mapping) or not fields.get("sigmas"):
            return fields
        steps = len(REQUEST_FIELDS["sigmas"].checked(fields["sigmas"]))
        if STEPS.parse("steps", fields.get("steps", steps)) != steps:
            raise unusable_field("steps", fields["steps"], f"{steps}, the number of sigmas, or none")
        if fields.get("schedule") is not None:
            raise unusable_field("schedule", fields["schedule"], "no value together with sigmas")
        return {**fields, "steps": steps}

    @model_validator(mode="before")
    @classmethod
    def _of_workflow(cls, fields: Any) -> Any:
        """Take the fields that users see from the nodes of a workflow. Raises UnusableField for others beside it."""
        if not isinstance(fields, Mapping) or fields.get("workflow") is None:
            return fields
        from modelpool.actors.request.workflow_fields import checked_workflow  # its nodes have requests

        workflow = checked_workflow(fields["workflow"])
        shown = workflow.shown_fields
        for name, value in fields.items():
            if (
                name == "batch" and value in CHOSEN_BATCHES
            ):  # of all lines of a job file: a workflow has one image a pass
                continue
            differs = name not in WORKFLOW_FIELDS and value != shown.get(name, _NOTHING)
            if differs and value is not None:
                raise unusable_field(name, value, "none beside workflow, which has it in its nodes")
        return {**fields, **shown, "workflow": workflow}

    @field_validator("*", mode="before")
    @classmethod
    def _by_table(cls, value: Any, info: Any) -> Any:
        return REQUEST_FIELDS[info.field_name].checked(value)

    @field_validator("loras", mode="before")
    @classmethod
    def _loras(cls, value: Any) -> Any:
        return parse_loras(value)

    @field_validator("passes", mode="before")
    @classmethod
    def _passes(cls, value: Any) -> Any:
        return checked_passes(value)

    @field_validator("options", mode="before")
    @classmethod
    def _run_options(cls, value: Any) -> RunOptions | None:
        return parse_run_options(value)

    @property
    def run_options(self) -> RunOptions:
        """The options of its sampling runs."""
        return self.options or NO_OPTIONS

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        return None if value is None else check_user(value)

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline(cls, value: Any) -> float | None:
        return None if value is None else parse_seconds(value, what="a time from now,")

    @field_validator("image", "mask", "last_image", mode="before")
    @classmethod
    def _image(cls, value: Any, info: Any) -> Any:
        return checked_image(info.field_name, value, is_mask=info.field_name == "mask")

    @field_validator("video", "video_mask", "face_video", mode="before")
    @classmethod
    def _video(cls, value: Any, info: Any) -> Any:
        return checked_video(info.field_name, value, is_mask=info.field_name == "video_mask")

    @field_validator("reference", mode="before")
    @classmethod
    def _reference(cls, value: Any) -> Any:
        return checked_references(value)

    @property
    def references(self) -> tuple[ImageSource, ...]:
        """The images of `reference` as a tuple."""
        found = self.reference
        return found if isinstance(found, tuple) else () if found is None else (found,)

    @field_validator("controls", "image_prompts", "regions", mode="before")
    @classmethod
    def _parts(cls, value: Any, info: Any) -> Any:
        return checked_parts(info.field_name, value)

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float | None) -> float | None:
        return None if value is None else checked_strength("strength", value)

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yield the name of the field and the text of each of its texts."""
        if self.workflow is not None:
            yield from self.workflow.texts()
            return
        yield from (("prompt", self.prompt), ("negative", self.negative))
        yield from (("regions.prompt", region.prompt) for region in self.regions)
        for each in self.passes:
            yield from ((f"passes.{name}", text) for name in ("prompt", "negative") if (text := getattr(each, name)))

    @model_validator(mode="after")
    def _texts(self) -> GenerateRequest:
        characters = sum(len(text) for _, text in self.texts())
        if characters > MAX_TEXT_CHARACTERS:
            expected = f"up to {MAX_TEXT_CHARACTERS} in all together"
            raise unusable_field("prompt, negative, regions", f"{characters} characters", expected)
        return self

    @model_validator(mode="after")
    def _images(self) -> GenerateRequest:
        for name in ("mask", "strength", "last_image"):
            if self.image is None and getattr(self, name) is not None:
                raise UnusableField(f"{name} requires image")
        if self.image is None and any(control.image is None for control in self.controls):
            raise missing_field("controls.image", f"set it to {IMAGE_FORMS}, or set the field image of the request")
        for name in ("video_mask", "face_video"):
            if self.video is None and getattr(self, name) is not None:
                raise UnusableField(f"{name} requires video")
        if self.mask is not None and self.hires is not None:
            raise UnusableField(
                "hires cannot be combined with mask: generate the image with hires first, then inpaint it"
            )
        if self.passes and (found := [name for name in WITHOUT_PASSES if getattr(self, name) is not None]):
            raise UnusableField(f"passes cannot be combined with {', '.join(found)}")
        if self.passes and self.batch not in (1, *CHOSEN_BATCHES):
            raise unusable_field("batch", self.batch, "1 with passes, of which each is a forward pass by itself")
        return self

    def first_step(self, rounds_up: bool = False) -> int:
        """Return how many steps at the start of the schedule are skipped. Raises UnusableField if none is left.

        `rounds_up` (how the model rounds a fraction of a step) and the model's default steps are known only where the
        task graph is built."""
        if self.strength == 0:
            return self.steps
        if self.image is None:
            return 0
        default = DEFAULT_STRENGTH if self.mask is None else DEFAULT_MASKED_STRENGTH
        return skipped_steps("strength", self.strength or default, self.steps, rounds_up)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Only fields that are set: a request has some fifty."""
        return ((name, value) for name, value in super().__repr_args__() if name in self.model_fields_set)

    def expanded(self) -> tuple[GenerateRequest, ...]:
        """Return `n` requests for one output each, with consecutive seeds; without a seed, they have none either."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else (self.seed + place) % _SEEDS for place in range(self.n)]
        return tuple(self._changed({"n": 1, "seed": seed}, unset={"n"}) for seed in seeds)

    def without_steps(self) -> GenerateRequest:
        """Return the request of which no step is run: its start image is encoded and decoded, or an empty latent is
        decoded. ComfyUI's workflows ask for it (denoise 0); of users, it is more likely a mistake."""
        return self._changed({"strength": 0.0}, unset=())

    def without_labels(self) -> GenerateRequest:
        """Return the request without the fields that only its output carries, as if they had not been set."""
        if LABEL_FIELDS.isdisjoint(self.model_fields_set):
            return self
        return self._changed(dict.fromkeys(LABEL_FIELDS), unset=LABEL_FIELDS)

    def _changed(self, values: Mapping[str, Any], unset: Collection[str]) -> GenerateRequest:
        changed = self.model_copy(update=values)
        changed.model_fields_set.difference_update(unset)
        return changed

    @model_validator(mode="after")
    def _names(self) -> GenerateRequest:
        resolve_sampling(self.sampler, self.schedule)
        return self


def _sides(size: Any) -> tuple[Any, Any]:
    """Return width and height of "512x768" or [512, 768]. Raises UnusableField."""
    if isinstance(size, list | tuple) and len(size) == 2:
        return size[0], size[1]
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None:
        raise unusable_field(SIZE, size, "WIDTHxHEIGHT in pixels, such as 512x768")
    return int(match[1]), int(match[2])


#: accepted forms of a request
RequestLike: TypeAlias = GenerateRequest | Mapping[str, Any]


def request_of(value: object, field: str = "requests") -> GenerateRequest:
    """Return a request, given as one or as a mapping of its fields. Raises UserError; for another type it names
    `field`.
    """
    if isinstance(value, GenerateRequest):
        return value
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise unusable_field(field, name, "names of fields of a request")
        return GenerateRequest(**value)
    raise unusable_field(field, type(value).__name__, "a GenerateRequest, or a dict of its fields")
