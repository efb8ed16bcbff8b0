"""What was made, as the bytes of the file that it is kept in: a PNG, a video, an audio clip, with the recipe in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.outputs.audio import AudioKind, as_16_bits, encode_audio
from modelpool.actors.outputs.png import encode_png, recipe_from_json
from modelpool.actors.outputs.video import VideoKind, encode_video
from modelpool.pool.core.errors import UserError
from modelpool.pool.core.stage_params import AudioSamples, FloatArray, ImagePixels, Made, PixelArray, VideoFrames

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: what players show as the title, and the whole recipe as JSON
TITLE, COMMENT = "title", "comment"
#: a file of another program has comments of its own; the longest prompt fits
_LONGEST_TITLE = 200


@dataclass(frozen=True, slots=True)
class Finished:
    """What came from the pool, with what is worth telling about its making.

    index    place in its submission
    worker   who sampled it
    seconds  of its own tasks together
    tasks    any dataclass a task; written to the manifest as they are, what has `words` in words
    """

    recipe: Recipe
    made: Made
    index: int
    job_id: str
    worker: str
    seconds: float
    tasks: tuple[DataclassInstance, ...] = ()


def encoded(made: Made, recipe: Recipe) -> bytes:
    """The bytes of the file that `recipe` asks for, which says how it was made. Raises UnusableField for what cannot be
    written so."""
    match made:
        case ImagePixels():
            return encode_png(made.pixels_HWC, recipe)
        case VideoFrames():
            kind = VideoKind(f".{recipe.ending}")
            return encode_video(made.frames_THWC, made.frame_rate, kind, **texts_of(recipe))
        case AudioSamples():
            samples = as_16_bits(made.samples_SC.T)
            return encode_audio(samples, made.samples_per_second, AudioKind(f".{recipe.ending}"), **texts_of(recipe))


def array_of(made: Made) -> PixelArray | FloatArray:
    """The numbers that it consists of."""
    match made:
        case ImagePixels():
            return made.pixels_HWC
        case VideoFrames():
            return made.frames_THWC
        case AudioSamples():
            return made.samples_SC


def texts_of(recipe: Recipe) -> dict[str, str]:
    """What stands in a video or an audio clip: its prompt as the title, and the whole recipe."""
    return {TITLE: recipe.prompt[:_LONGEST_TITLE], COMMENT: json.dumps(recipe.as_json())}


def read_video_recipe(path: str | Path) -> Recipe:
    """The recipe that a video or an audio clip carries. Raises UserError when it has none, or one that cannot be
    read."""
    text = _metadata(Path(path)).get(COMMENT)
    if text is None:
        raise UserError(f"{path}: no {COMMENT!r} text in this file (not of modelpool, or stripped)")
    try:
        return recipe_from_json(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: the recipe in this file cannot be read ({error})") from error


def _metadata(path: Path) -> Mapping[str, str]:
    import av  # it takes its time, and most programs read no videos

    try:
        with av.open(str(path)) as container:
            return {key.lower(): value for key, value in container.metadata.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, av.FFmpegError) as error:
        raise UserError(f"{path}: cannot be read as a video or an audio clip ({error})") from error
