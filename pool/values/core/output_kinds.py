"""What models make (images, videos, layers, audio), and the sizes and lengths that they make it in. Torch-free.

Pure functions of values; every error names a field, and valid values.
"""

from __future__ import annotations

from typing import Literal

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts, VideoFacts
from modelpool.pool.values.core.stage_params import OutputShape

#: kind of output
Kind = Literal["image", "video", "layers", "audio"]
_PLURALS: dict[Kind, str] = {
    "image": "images",
    "video": "videos",
    "layers": "layers of images",
    "audio": "audio clips",
}
#: the numbers that an extent consists of
EXTENT = ("width", "height", "frames")


def kind_of(facts: SamplingFacts) -> Kind:
    """Return the kind of output of models of `facts`."""
    if facts.video is not None:
        return "layers" if facts.video.layers else "video"
    return "audio" if facts.audio is not None else "image"


def output_plural(facts: SamplingFacts) -> str:
    """Return the kind of output in the plural."""
    return _PLURALS[kind_of(facts)]


def check_extent(size: tuple[int, int], frames: int, model: str, defaults: ModelDefaults) -> None:
    """Raise UnusableField for a video of another size or length if the model generates one only."""
    if defaults.extent is None:
        return
    width, height, length = defaults.extent
    for name, found, expected in zip(EXTENT, (*size, frames), defaults.extent, strict=True):
        if found != expected:
            only = f"model {model!r} has positions for {width} x {height} pixels and {length} frames only"
            raise unusable_field(name, found, f"{expected}: {only}")


def output_shape_of(cells: tuple[int, ...], model: str, model_defaults: ModelDefaults) -> OutputShape:
    """Return the shape of what `model` decodes from a latent of this shape after the channels. Raises UnusableField for
    a latent of another kind."""
    facts, sides = model_defaults.sampling, tuple(cell * model_defaults.downscale for cell in cells[-2:])
    audio = facts.audio
    if audio is not None and len(cells) == 1 and (seconds := audio.seconds_of(cells[0], model_defaults.downscale)):
        return OutputShape(0, 0, seconds=seconds)
    if facts.video is not None and len(cells) == 3 and cells[0] > facts.video.leading:
        leading = facts.video.leading
        frames = 1 + (cells[0] - 1 - leading) * facts.video.frames_per_cell
        return OutputShape(sides[1], sides[0], frames, facts.video.rate, leading=leading)
    if kind_of(facts) == "image" and len(cells) == 2:
        return OutputShape(sides[1], sides[0])
    expected = f"a latent of a {kind_of(facts)}: model {model!r} generates {_PLURALS[kind_of(facts)]}"
    raise unusable_field("latent", f"shape {cells}", expected)


def fitting_frames(frames: int, model: str, video: VideoFacts) -> int:
    """Return `frames`, a number that `model` makes. Raises UnusableField."""
    beyond = (frames - 1) % video.multiple
    if beyond:
        fewer, more = frames - beyond, frames - beyond + video.multiple
        expected = f"a multiple of {video.multiple} plus 1 for model {model!r} ({fewer} or {more})"
        raise unusable_field("frames", frames, expected)
    return frames
