"""How large and how long a thing is that is to be made: what an order says of it, and otherwise the model's own.

Pure functions over values; every complaint names a field of a request, and numbers that would do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from modelpool.actors.request.image_fields import MOST_SIDE
from modelpool.actors.request.requests import SIZE_STEP
from modelpool.actors.request.video_output_fields import AUDIO_FORMATS, VIDEO_FORMATS
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import AudioFacts, MadeFor, SamplingFacts, VideoFacts

#: what is made
Kind = Literal["image", "video", "audio"]
_FORMATS: dict[Kind, tuple[str, ...]] = {"image": ("png",), "video": VIDEO_FORMATS, "audio": AUDIO_FORMATS}


class Sized(Protocol):
    """What an order says of sizes; None is the model's own."""

    @property
    def width(self) -> int | None: ...
    @property
    def height(self) -> int | None: ...
    @property
    def scale(self) -> float: ...


class Lasting(Protocol):
    """What an order says of time; None is the model's own."""

    @property
    def frames(self) -> int | None: ...
    @property
    def frame_rate(self) -> float | None: ...
    @property
    def seconds(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Duration:
    """How long: frames and their rate of a video, seconds of an audio clip; all 0 for an image. `leading` is how many
    cells of time a video's latent has more, before it."""

    frames: int = 0
    frame_rate: float = 0.0
    seconds: float = 0.0
    leading: int = 0


def kind_of(facts: SamplingFacts) -> Kind:
    """What a model of `facts` makes."""
    return "video" if facts.video is not None else "audio" if facts.audio is not None else "image"


def size_of(order: Sized, model: str, facts: SamplingFacts, own: tuple[int, int]) -> tuple[int, int]:
    """Width and height in pixels, by an order for `model`, whose own are `own`; both 0 for audio. Raises
    UnusableField."""
    if facts.audio is not None:
        for name, side in (("width", order.width), ("height", order.height)):
            if side is not None:
                raise unusable_field(name, side, f"none: model {model!r} makes audio")
        return 0, 0
    width, height, step = order.width or own[0], order.height or own[1], facts.side_multiple
    if order.scale == 1:
        for name, side in (("width", width), ("height", height)):
            if step and side % step:
                expected = f"a multiple of {step}, as model {model!r} has them ({_nearest(side, step)})"
                raise unusable_field(name, side, expected)
        return width, height
    width, height = (round(side * order.scale / (step or SIZE_STEP)) * (step or SIZE_STEP) for side in (width, height))
    if max(width, height) > MOST_SIDE:
        raise unusable_field("hires.scale", order.scale, f"one that makes sides of up to {MOST_SIDE} pixels")
    return width, height


def duration_of(order: Lasting, model: str, facts: SamplingFacts) -> Duration:
    """How long what an order for `model` makes is. Raises UnusableField."""
    kind = kind_of(facts)
    if kind != "video":
        for name, found in (("frames", order.frames), ("frame_rate", order.frame_rate)):
            if found is not None:
                raise unusable_field(name, found, f"none: model {model!r} makes {_PLURALS[kind]}, and no videos")
    if kind != "audio" and order.seconds is not None:
        raise unusable_field("seconds", order.seconds, f"none: model {model!r} makes {_PLURALS[kind]}, and no audio")
    if facts.video is not None:
        frames = facts.video.frames if order.frames is None else order.frames
        return Duration(_fitting_frames(frames, model, facts.video), order.frame_rate or facts.video.rate)
    if facts.audio is not None:
        return Duration(seconds=_fitting_seconds(order.seconds, model, facts.audio))
    return Duration()


def extent_of(cells: tuple[int, ...], model: str, made_for: MadeFor) -> tuple[int, int, Duration]:
    """Width and height in pixels, and how long it is, what `model` decodes from a latent of so many `cells` behind
    channels. Raises UnusableField for those of another kind."""
    facts, sides = made_for.sampling, tuple(cell * made_for.downscale for cell in cells[-2:])
    if facts.audio is not None and cells == (facts.audio.cells,):
        return 0, 0, Duration(seconds=facts.audio.seconds)
    if facts.video is not None and len(cells) == 3 and cells[0] > facts.video.leading:
        leading = facts.video.leading
        frames = 1 + (cells[0] - 1 - leading) * facts.video.multiple
        return sides[1], sides[0], Duration(frames, facts.video.rate, leading=leading)
    if kind_of(facts) == "image" and len(cells) == 2:
        return sides[1], sides[0], Duration()
    expected = f"those of a {kind_of(facts)}: model {model!r} makes {_PLURALS[kind_of(facts)]}"
    raise unusable_field("latent", f"cells {cells}", expected)


def format_of(format_name: str | None, model: str, facts: SamplingFacts) -> str:
    """The format of the file that is made: one that `model` can make, or the usual one of its kind. Raises
    UnusableField."""
    kind = kind_of(facts)
    if format_name is not None and format_name not in _FORMATS[kind]:
        expected = f"{' or '.join(_FORMATS[kind])}: model {model!r} makes {_PLURALS[kind]}"
        raise unusable_field("format", format_name, expected)
    return format_name or _FORMATS[kind][0]


def made_by(facts: SamplingFacts) -> str:
    """What a model makes, in a word for many."""
    return _PLURALS[kind_of(facts)]


_PLURALS: dict[Kind, str] = {"image": "images", "video": "videos", "audio": "audio clips"}


def _fitting_frames(frames: int, model: str, video: VideoFacts) -> int:
    beyond = (frames - 1) % video.multiple
    if beyond:
        fewer, more = frames - beyond, frames - beyond + video.multiple
        expected = f"a multiple of {video.multiple} and one more, as model {model!r} makes them ({fewer} or {more})"
        raise unusable_field("frames", frames, expected)
    return frames


def _fitting_seconds(seconds: float | None, model: str, audio: AudioFacts) -> float:
    if seconds is None:
        return audio.seconds
    if seconds > audio.seconds:
        raise unusable_field("seconds", seconds, f"up to the {audio.seconds:g} that model {model!r} makes")
    return seconds


def _nearest(side: int, step: int) -> str:
    lower = side - side % step
    return f"{lower} or {lower + step}" if lower else str(step)
