"""What a driver may ask for. Checked here, at the edge, before anything is sent.

Knows names and numbers; not which models exist (the catalog says) nor where anything runs. Torch-free, ray-free.
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
from modelpool.actors.request.image_fields import (
    A_IMAGE,
    USUAL_MASKED_STRENGTH,
    USUAL_STRENGTH,
    Hires,
    ImageSource,
    Region,
    checked_image,
    checked_parts,
    checked_references,
    checked_strength,
    steps_left_out,
)
from modelpool.actors.request.low_noise_fields import LowNoiseRun, checked_noise, lora_parts
from modelpool.actors.request.number_fields import checked_cfg, checked_steps, whole_number
from modelpool.actors.request.qos import MOST_PRIORITY, check_user, parse_seconds
from modelpool.actors.request.strict import Strict
from modelpool.actors.request.video_output_fields import (
    VIDEO_NUMBERS,
    checked_format,
    checked_frame_rate,
    checked_frames,
    checked_seconds,
    checked_video_number,
)
from modelpool.pool.core.errors import unknown_name, unusable_field
from modelpool.pool.sampling.names import MAX_CFG, SCHEDULES, resolve_sampler

#: sizes are multiples of this: the VAE halves an image three times
SIZE_STEP = 8
MAX_SEED = 2**64 - 1
#: with which images were enlarged in training. Source: `max_noise_level` of stabilityai/stable-diffusion-x4-upscaler
MOST_NOISE_LEVEL = 350
#: CLIP-G has 32 layers, and two are read
MOST_SKIPPED = 30
_SIZE = f"a multiple of {SIZE_STEP} from {SIZE_STEP} to 16384"
#: what is expected of each field that is a whole number, but for steps
_WHOLE = {
    "noise_level": f"a whole number from 0 to {MOST_NOISE_LEVEL}",
    "clip_skip": f"a whole number from 0 to {MOST_SKIPPED}",
    "width": _SIZE,
    "height": _SIZE,
    "seed": "a whole number from 0 to 2**64 - 1",
    "priority": f"a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}",
}


class LoraChoice(Strict):
    """A LoRA by name, and how strongly. Accepts ("light", 0.8), "light:0.8", "light" and {"name":, "strength":}; with
    "high" or "low" after that, as in "light:0.8:low", it changes one alone of a model's two diffusion models."""

    name: Annotated[str, Field(min_length=1)]
    strength: float = 1.0
    noise: str = ""

    @model_validator(mode="before")
    @classmethod
    def _from_short_forms(cls, value: Any) -> Any:
        return lora_parts(value)

    @field_validator("noise", mode="before")
    @classmethod
    def _noise(cls, value: Any) -> str:
        return checked_noise(value)

    @model_serializer(mode="wrap")
    def _as_said(self, plain: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is not said of two models: seeds of job files are made of this."""
        return {name: value for name, value in plain(self).items() if value or name != "noise"}


class GenerateRequest(Strict):
    """One image, video or audio, as the model makes them. `width`, `height` left out are the model's own, or those of
    `image`; `seed` left out is drawn when submitted.

    image     an image to start from: a path, an image of Pillow or an array of numpy. It is scaled to cover the size,
              proportions kept, and cropped about its centre; its own size counts in steps of 8 pixels
    strength  how much of it is made anew: so large a part of the steps at the end of the schedule is made. Left out,
              0.6, or 1 with a mask
    mask      an image of the size of `image`: what is white there is made anew, what is black is kept
    paste     what is black is exactly as in `image` afterwards
    hires     make the image small, scale it up, and make a part of it again (`Hires`)
    controls  ControlNets, each with the image that it speaks of (`Control`)
    regions   texts for parts of the image (`Region`)
    reference    an image to work from, for models that are told one beside what they make: its proportions are kept,
                 and it is read in about as many pixels as what is made; sizes left out follow it. Several in a list,
                 for models that are told more (sizes follow the last)
    reference_as  how a text encoder that sees `reference` too is shown it: "whole", or "numbered" (smaller, and called
                 "Image 1"); left out, as the model was made for, and "numbered" where there are several
    decoder      the model that makes the image of what `model` made, where two make it (`Decoder`)
    low_noise    how the second diffusion model is run, of a model that is two (`LowNoiseRun`)
    image_cfg    how strongly `image` counts where a model is guided by text and image; left out, the model's own
    noise_level  how much noise, 0 to 350, is put on `image` where a model makes it larger; left out, the model's own

    frames      of a video. Left out, as many as its model was made for; models make multiples of a number, and one more
    frame_rate  frames a second of it; left out, the model's own
    last_image  an image that a video ends with, for models that are told one beside `image`
    video       a video to follow, frame by frame, for models that are told one: a path, paths or images in a list, or
                an array of numpy. Sizes and frames left out follow it; where it is shorter, the rest is made freely
    video_mask  a video or an image of the size of `video`: what is white there is made anew (following what `video`
                shows there), what is black is kept. Left out, all is white
    motion      how much moves in it, 0 to 255, for models that are told so; left out, the model's own
    image_noise  how much noise, 0 to 1, is put on the `image` that it begins with, for models that are told so: with
                more, the video leaves it further; left out, the model's own
    elevation   from how many degrees above the middle, -90 to 90, a video looks that goes around a thing; left out, 0
    seconds     of an audio clip; left out, as many as its model makes
    clip_skip   of the last layers of CLIP left out beyond those that the model's family leaves out, as diffusers counts
                them: what A1111 calls "Clip skip", less one
    format      what it is written as: images "png"; videos "mp4", "webm" or "gif"; audio clips "wav" or "flac". Left
    out,
                the first of these. A video of 1 frame is a video
    A video may begin with `image`, where its model is made for that; some make videos of nothing else, and read no
    prompt. Models that are shown an image and change or
    enlarge it are shown `image`; `strength` is not for them.

    `priority`, `user` and `deadline` do not change the image. Of those that wait, a higher `priority` goes first.
    `user` is whose share it counts for; left out, it is the driver's. `deadline` is a time from submission, such as 90
    (seconds) or "10m".
    Raises UserError (a ValueError) naming the field, what was found and what was expected.
    """

    model: Annotated[str, Field(min_length=1)]
    prompt: str
    negative: str = ""
    loras: tuple[LoraChoice, ...] = ()
    steps: int = 20
    cfg: float = 5.0
    sampler: str = "euler"
    #: None is the sampler's own
    schedule: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    priority: int = 0
    user: str | None = None
    deadline: float | None = None
    #: once checked, a `ImageSource` of `actors.request.image_fields`
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
    #: once checked, a `ImageSource`, or a tuple of several
    reference: Any = None
    reference_as: Literal["whole", "numbered"] | None = None
    #: once checked, a `ImageSource`
    last_image: Any = None
    #: once checked, a `VideoSource` of `actors.request.control_video_fields`
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
        if not 0 <= value <= MOST_SKIPPED:
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
        if abs(value) > MOST_PRIORITY:
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
            raise unusable_field("image_cfg", value, f"a number from 1 (as much as by itself) to {MAX_CFG:g}")
        return value

    @field_validator("noise_level")
    @classmethod
    def _noise_level(cls, value: int | None) -> int | None:
        if value is not None and not 0 <= value <= MOST_NOISE_LEVEL:
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
        """All images of `reference`."""
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
                raise unusable_field("image", "nothing", f"an image to start from, since {name} is given")
        if self.image is None and any(control.image is None for control in self.controls):
            raise unusable_field(
                "controls.image", "nothing", f"{A_IMAGE}, or one in the field image, which it reads too"
            )
        if self.video is None and self.video_mask is not None:
            raise unusable_field("video", "nothing", "a video to follow, since video_mask is given")
        if self.mask is not None and self.hires is not None:
            raise unusable_field("hires", "a second pass", "none with a mask: make the image first, then fill it")
        return self

    def first_step(self, rounds_up: bool = False) -> int:
        """How many steps at the head of the schedule are left out. Raises UnusableField where that is all of them.

        How the model of the request counts a part of a step (`rounds_up`), and how many steps are its own, is known
        where the request is cut."""
        if self.image is None:
            return 0
        usual = USUAL_STRENGTH if self.mask is None else USUAL_MASKED_STRENGTH
        return steps_left_out("strength", self.strength or usual, self.steps, rounds_up)

    @model_validator(mode="after")
    def _names(self) -> GenerateRequest:
        resolve_sampling(self.sampler, self.schedule)
        return self


def resolve_sampling(sampler: str, schedule: str | None) -> tuple[str, str]:
    """The keys of sampler and schedule that the two names mean; a schedule given wins over the one in `sampler`.

    Raises UnknownName.
    """
    key, own_schedule = resolve_sampler(sampler)
    if schedule is None:
        return key, own_schedule
    wanted = "_".join(schedule.lower().replace("-", " ").replace("_", " ").split())
    if wanted not in SCHEDULES:
        raise unknown_name("schedule", schedule, SCHEDULES)
    return key, wanted
