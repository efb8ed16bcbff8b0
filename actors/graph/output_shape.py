"""How large and how long a thing is that is to be made: what an order says of it, and otherwise the model's own.

Pure functions over values; every complaint names a field of a request, and numbers that would do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from modelpool.actors.request.image_fields import MOST_SIDE
from modelpool.actors.request.requests import SIZE_STEP
from modelpool.actors.request.video_output_fields import FILM_FORMATS, SOUND_FORMATS
from modelpool.pool.core.errors import unusable_field
from modelpool.pool.core.sampling_facts import FilmFacts, MadeFor, SamplingFacts, SoundFacts

#: what is made
Kind = Literal["picture", "film", "sound"]
_FORMATS: dict[Kind, tuple[str, ...]] = {"picture": ("png",), "film": FILM_FORMATS, "sound": SOUND_FORMATS}


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
    """How long: frames and their rate of a film, seconds of a sound; all 0 for a picture. `leading` is how many cells
    of time a film's latent has more, before it."""

    frames: int = 0
    frame_rate: float = 0.0
    seconds: float = 0.0
    leading: int = 0


def kind_of(facts: SamplingFacts) -> Kind:
    """What a model of `facts` makes."""
    return "film" if facts.film is not None else "sound" if facts.sound is not None else "picture"


def size_of(order: Sized, model: str, facts: SamplingFacts, own: tuple[int, int]) -> tuple[int, int]:
    """Width and height in pixels, by an order for `model`, whose own are `own`; both 0 for sound. Raises
    UnusableField."""
    if facts.sound is not None:
        for name, side in (("width", order.width), ("height", order.height)):
            if side is not None:
                raise unusable_field(name, side, f"none: model {model!r} makes sound")
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
    if kind != "film":
        for name, found in (("frames", order.frames), ("frame_rate", order.frame_rate)):
            if found is not None:
                raise unusable_field(name, found, f"none: model {model!r} makes {_PLURALS[kind]}, and no films")
    if kind != "sound" and order.seconds is not None:
        raise unusable_field("seconds", order.seconds, f"none: model {model!r} makes {_PLURALS[kind]}, and no sound")
    if facts.film is not None:
        frames = facts.film.frames if order.frames is None else order.frames
        return Duration(_fitting_frames(frames, model, facts.film), order.frame_rate or facts.film.rate)
    if facts.sound is not None:
        return Duration(seconds=_fitting_seconds(order.seconds, model, facts.sound))
    return Duration()


def extent_of(cells: tuple[int, ...], model: str, made_for: MadeFor) -> tuple[int, int, Duration]:
    """Width and height in pixels, and how long it is, what `model` decodes from a latent of so many `cells` behind
    channels. Raises UnusableField for those of another kind."""
    facts, sides = made_for.sampling, tuple(cell * made_for.downscale for cell in cells[-2:])
    if facts.sound is not None and cells == (facts.sound.cells,):
        return 0, 0, Duration(seconds=facts.sound.seconds)
    if facts.film is not None and len(cells) == 3 and cells[0] > facts.film.leading:
        leading = facts.film.leading
        frames = 1 + (cells[0] - 1 - leading) * facts.film.multiple
        return sides[1], sides[0], Duration(frames, facts.film.rate, leading=leading)
    if kind_of(facts) == "picture" and len(cells) == 2:
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


_PLURALS: dict[Kind, str] = {"picture": "pictures", "film": "films", "sound": "sounds"}


def _fitting_frames(frames: int, model: str, film: FilmFacts) -> int:
    beyond = (frames - 1) % film.multiple
    if beyond:
        fewer, more = frames - beyond, frames - beyond + film.multiple
        expected = f"a multiple of {film.multiple} and one more, as model {model!r} makes them ({fewer} or {more})"
        raise unusable_field("frames", frames, expected)
    return frames


def _fitting_seconds(seconds: float | None, model: str, sound: SoundFacts) -> float:
    if seconds is None:
        return sound.seconds
    if seconds > sound.seconds:
        raise unusable_field("seconds", seconds, f"up to the {sound.seconds:g} that model {model!r} makes")
    return seconds


def _nearest(side: int, step: int) -> str:
    lower = side - side % step
    return f"{lower} or {lower + step}" if lower else str(step)
