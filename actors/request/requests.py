"""GenerateRequest: one image, video or audio clip to generate; parsed and validated in the driver before submission.

Checks names and numbers; whether a model exists and supports a field is checked with the catalog. Torch-free, ray-free.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from modelpool.actors.request.control_fields import Control
from modelpool.actors.request.control_video_fields import checked_video
from modelpool.actors.request.decoder_fields import Decoder
from modelpool.actors.request.field_errors import missing_field
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
from modelpool.actors.request.low_noise_fields import LowNoiseRun, checked_expert, parse_lora
from modelpool.actors.request.number_fields import checked_cfg, checked_steps, whole_number
from modelpool.actors.request.qos import MAX_PRIORITY, check_user, parse_seconds
from modelpool.actors.request.strict import Strict
from modelpool.actors.request.video_output_fields import (
    VIDEO_NUMBERS,
    checked_format,
    checked_frame_rate,
    checked_frames,
    checked_seconds,
    checked_video_number,
)
from modelpool.pool.core.errors import UnusableField, unknown_name, unusable_field
from modelpool.pool.sampling.names import MAX_CFG, SCHEDULES, resolve_sampler

#: sizes are multiples of this: the VAE halves an image three times
SIZE_STEP = 8
MAX_SEED = 2**64 - 1
#: noise levels used in the training of the upscaler. Source: `max_noise_level` of
#: stabilityai/stable-diffusion-x4-upscaler
MAX_NOISE_LEVEL = 350
#: CLIP-G has 32 layers, and two of them are read
MAX_CLIP_SKIP = 30
_SIZE = f"a multiple of {SIZE_STEP} from {SIZE_STEP} to 16384"
#: expected values of the whole-number fields other than steps
_WHOLE = {
    "noise_level": f"a whole number from 0 to {MAX_NOISE_LEVEL}",
    "clip_skip": f"a whole number from 0 to {MAX_CLIP_SKIP}",
    "width": _SIZE,
    "height": _SIZE,
    "seed": "a whole number from 0 to 2**64 - 1",
    "priority": f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}",
}


class LoraChoice(Strict):
    """A LoRA and its strength. Accepts ("light", 0.8), "light:0.8", "light" and {"name":, "strength":}. For models with
    two experts, append "high" or "low", as in "light:0.8:low", to apply it to one expert only."""

    name: Annotated[str, Field(min_length=1)]
    strength: float = 1.0
    noise: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        return parse_lora(value)

    @field_validator("noise", mode="before")
    @classmethod
    def _noise(cls, value: Any) -> str:
        return checked_expert(value)

    @model_serializer(mode="wrap")
    def _without_unset(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an expert that is not set: the seeds of job files are derived from this serialization."""
        return {name: value for name, value in plain(self).items() if value or name != "noise"}


class GenerateRequest(Strict):
    """One image, video or audio clip to generate. `width` and `height` default to the size of `image`, else to the
    model's; a missing `seed` is drawn at submission.

    image     image to start from: a path, a Pillow image or a numpy array. It is scaled to cover the output size,
              keeping proportions, and cropped at the centre; its own size is rounded to steps of 8 pixels
    strength  denoising strength: the fraction of the schedule that is run, at its end. Default: 0.6, or 1 with a mask
    mask      mask image of the size of `image`; white areas are regenerated, black areas are kept
    paste     restore the black areas of the mask exactly from `image`
    hires     generate a small image, scale it up, and regenerate it partly (`Hires`)
    controls  ControlNets and their control images (`Control`)
    regions   prompts for parts of the image (`Region`)
    reference    reference image, for models that accept one: it keeps its proportions and is read at about as many
                 pixels as the output; a missing output size follows it. A list for models that accept several (the
                 output size follows the last)
    reference_as  how a text encoder with vision reads `reference`: "whole", or "numbered" (smaller, and called
                 "Picture 1"); default: as the model was trained, and "numbered" for several images
    decoder      decoder of a two-stage model (`Decoder`)
    low_noise    options of the low-noise expert, for models with two experts (`LowNoiseRun`)
    image_cfg    guidance scale of `image`, for models guided by text and image; default: the model's
    noise_level  noise added to `image` by an upscaling model, 0 to 350; default: the model's

    frames      frames of a video; models accept a multiple of a number plus one. Default: the model's
    frame_rate  frames per second; default: the model's
    last_image  last frame of a video, for models that accept one in addition to `image`
    video       control video, for models that accept one: a path, a list of paths or images, or a numpy array. Missing
                sizes and frames follow it; if it is shorter than the output, the rest is generated freely
    video_mask  video or image of the size of `video`; white areas are regenerated (following `video` there), black
                areas are kept. Default: all white
    motion      amount of motion in a video, 0 to 255, for models that accept it; default: the model's
    image_noise  noise added to the first frame, 0 to 1, for models that accept it: with more noise, the video follows
                the image less; default: the model's
    elevation   camera elevation in degrees, -90 to 90, for models that orbit an object; default 0
    seconds     length of an audio clip; default: the longest that the model generates
    clip_skip   last layers of CLIP that are skipped in addition to those that the model's family skips, as diffusers
                counts them: "Clip skip" of A1111, minus one
    format      file format: images "png"; videos "mp4", "webm" or "gif"; audio "wav" or "flac". Default: the first of
                these. A video of 1 frame is a video
    `image` is the first frame of a video, if the model supports that; some models require it and read no prompt. Models
    that edit or enlarge an image read it from `image` and do not accept `strength`.

    `priority`, `user` and `deadline` do not change the output. Of waiting tasks, a higher `priority` runs first. `user`
    is the user for fair-share scheduling; default: the driver's. `deadline` is a time from submission, such as 90
    (seconds) or "10m".
    Raises UserError (a ValueError) naming the field, the value found and the value expected.
    """

    model: Annotated[str, Field(min_length=1)]
    prompt: str
    negative: str = ""
    loras: tuple[LoraChoice, ...] = ()
    steps: int = 20
    cfg: float = 5.0
    sampler: str = "euler"
    #: None: the sampler's default
    schedule: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    priority: int = 0
    user: str | None = None
    deadline: float | None = None
    #: an `ImageSource` of `actors.request.image_fields` after validation
    image: Any = None
    mask: Any = None
    strength: float | None = None
    paste: bool = True
    hires: Hires | None = None
    controls: tuple[Control, ...] = ()
    regions: tuple[Region, ...] = ()
    frames: int | None = None
    frame_rate: float | None = None
    motion: int | None = None
    image_noise: float | None = None
    elevation: float | None = None
    seconds: float | None = None
    format: str | None = None
    clip_skip: int = 0
    #: an `ImageSource`, or a tuple of several, after validation
    reference: Any = None
    reference_as: Literal["whole", "numbered"] | None = None
    #: an `ImageSource` after validation
    last_image: Any = None
    #: a `VideoSource` of `actors.request.control_video_fields` after validation
    video: Any = None
    video_mask: Any = None
    image_cfg: float | None = None
    noise_level: int | None = None
    decoder: Decoder | None = None
    low_noise: LowNoiseRun | None = None

    @field_validator(*_WHOLE, mode="before")
    @classmethod
    def _whole(cls, value: Any, info: Any) -> int | None:
        return None if value is None else whole_number(info.field_name, value, _WHOLE[info.field_name])

    @field_validator("steps", mode="before")
    @classmethod
    def _steps(cls, value: Any) -> int:
        return checked_steps("steps", value)

    @field_validator("clip_skip")
    @classmethod
    def _clip_skip(cls, value: int) -> int:
        if not 0 <= value <= MAX_CLIP_SKIP:
            raise unusable_field("clip_skip", value, _WHOLE["clip_skip"])
        return value

    @field_validator("cfg", mode="before")
    @classmethod
    def _cfg(cls, value: Any) -> float:
        return checked_cfg("cfg", value)

    @field_validator("width", "height")
    @classmethod
    def _size(cls, value: int | None, info: Any) -> int | None:
        if value is not None and (value < SIZE_STEP or value > 16384 or value % SIZE_STEP):
            raise unusable_field(info.field_name, value, _SIZE)
        return value

    @field_validator("seed")
    @classmethod
    def _seed(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MAX_SEED:
            raise unusable_field("seed", value, _WHOLE["seed"])
        return value

    @field_validator("priority")
    @classmethod
    def _priority(cls, value: int) -> int:
        if abs(value) > MAX_PRIORITY:
            raise unusable_field("priority", value, _WHOLE["priority"])
        return value

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        return None if value is None else check_user(value)

    @field_validator("deadline", mode="before")
    @classmethod
    def _deadline(cls, value: Any) -> float | None:
        return None if value is None else parse_seconds(value, what="a time from now,")

    @field_validator("frames", mode="before")
    @classmethod
    def _frames(cls, value: Any) -> int | None:
        return checked_frames(value)

    @field_validator("frame_rate")
    @classmethod
    def _frame_rate(cls, value: float | None) -> float | None:
        return checked_frame_rate(value)

    @field_validator("seconds")
    @classmethod
    def _seconds(cls, value: float | None) -> float | None:
        return checked_seconds(value)

    @field_validator(*VIDEO_NUMBERS, mode="before")
    @classmethod
    def _video_number(cls, value: Any, info: Any) -> float | None:
        return checked_video_number(info.field_name, value)

    @field_validator("format", mode="before")
    @classmethod
    def _format(cls, value: Any) -> str | None:
        return checked_format(value)

    @field_validator("image_cfg")
    @classmethod
    def _image_cfg(cls, value: float | None) -> float | None:
        if value is not None and not 1 <= value <= MAX_CFG:
            expected = f"a number from 1 (no guidance by the image) to {MAX_CFG:g}"
            raise unusable_field("image_cfg", value, expected)
        return value

    @field_validator("noise_level")
    @classmethod
    def _noise_level(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MAX_NOISE_LEVEL:
            raise unusable_field("noise_level", value, _WHOLE["noise_level"])
        return value

    @field_validator("image", "mask", "last_image", mode="before")
    @classmethod
    def _image(cls, value: Any, info: Any) -> Any:
        return checked_image(info.field_name, value, is_mask=info.field_name == "mask")

    @field_validator("video", "video_mask", mode="before")
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

    @field_validator("controls", "regions", mode="before")
    @classmethod
    def _parts(cls, value: Any, info: Any) -> Any:
        return checked_parts(info.field_name, value)

    @field_validator("strength")
    @classmethod
    def _strength(cls, value: float | None) -> float | None:
        return None if value is None else checked_strength("strength", value)

    @model_validator(mode="after")
    def _images(self) -> GenerateRequest:
        for name in ("mask", "strength", "last_image"):
            if self.image is None and getattr(self, name) is not None:
                raise UnusableField(f"{name} requires image")
        if self.image is None and any(control.image is None for control in self.controls):
            raise missing_field("controls.image", f"set it to {IMAGE_FORMS}, or set the field image of the request")
        if self.video is None and self.video_mask is not None:
            raise UnusableField("video_mask requires video")
        if self.mask is not None and self.hires is not None:
            raise UnusableField(
                "hires cannot be combined with mask: generate the image with hires first, then inpaint it"
            )
        return self

    def first_step(self, rounds_up: bool = False) -> int:
        """Return how many steps at the start of the schedule are skipped. Raises UnusableField if none is left.

        `rounds_up` (how the model rounds a fraction of a step) and the model's default steps are known only where the
        task graph is built."""
        if self.image is None:
            return 0
        default = DEFAULT_STRENGTH if self.mask is None else DEFAULT_MASKED_STRENGTH
        return skipped_steps("strength", self.strength or default, self.steps, rounds_up)

    @model_validator(mode="after")
    def _names(self) -> GenerateRequest:
        resolve_sampling(self.sampler, self.schedule)
        return self


def resolve_sampling(sampler: str, schedule: str | None) -> tuple[str, str]:
    """Return the keys of sampler and schedule for two names; `schedule` wins over the schedule in `sampler`.

    Raises UnknownName.
    """
    key, default_schedule = resolve_sampler(sampler)
    if schedule is None:
        return key, default_schedule
    wanted = "_".join(schedule.lower().replace("-", " ").replace("_", " ").split())
    if wanted not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    return key, wanted
