"""Encodes an output as a file with its recipe: image, layers of an image, video or audio."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.audio import AudioKind, as_16_bits, encode_audio
from modelpool.actors.outputs.image_file import encode_animation, encode_image, encode_layers
from modelpool.actors.outputs.recipe_json import recipe_in
from modelpool.actors.outputs.video import VideoKind, encode_video
from modelpool.actors.request.labels import NO_LABELS, Labels, output_key
from modelpool.actors.request.video_output_fields import SHARED_FORMATS
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import (
    AudioSamples,
    FloatArray,
    ImagePixels,
    Output,
    PixelArray,
    VideoFrames,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: shown by players as the title, and the complete recipe as JSON
TITLE, COMMENT = "title", "comment"
#: files of other programs have their own comments; the longest prompt fits
_LONGEST_TITLE = 200


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """An output of the pool, with facts about its generation.

    index    position of its request in the command or call, from 0
    worker   the worker that sampled it
    seconds  of its own tasks together
    tasks    a dataclass for each task; written to the manifest, values with `words` as these
    labels   of its request
    """

    recipe: Recipe
    output: Output
    index: int
    job_id: str
    worker: str
    seconds: float
    tasks: tuple[DataclassInstance, ...] = ()
    labels: Labels = NO_LABELS

    @property
    def key(self) -> str:
        """The key that identifies it among the outputs of a place."""
        return output_key(self.recipe.digest, self.labels.id)


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """A `FinishedOutput` without its pixels, frames or samples."""

    recipe: Recipe
    index: int
    job_id: str
    worker: str
    seconds: float
    tasks: tuple[DataclassInstance, ...] = ()
    labels: Labels = NO_LABELS

    @property
    def key(self) -> str:
        """The key that identifies it among the outputs of a place."""
        return output_key(self.recipe.digest, self.labels.id)

    def with_output(self, output: Output) -> FinishedOutput:
        """Return it with these pixels, frames or samples."""
        return FinishedOutput(
            self.recipe, output, self.index, self.job_id, self.worker, self.seconds, self.tasks, self.labels
        )


def encoded(output: Output, recipe: Recipe, labels: Labels = NO_LABELS) -> bytes:
    """Encode an output as a file of the format in `recipe`, with the recipe in it; images have the labels, too.
    Raises UnusableField for values that the format cannot hold.
    """
    match output:
        case ImagePixels():
            return encode_image(output.pixels_HWC, recipe, labels)
        case VideoFrames() if recipe.is_layers:
            return encode_layers(output.frames_THWC, recipe, labels)
        case VideoFrames() if recipe.ending in SHARED_FORMATS:
            return encode_animation(output.frames_THWC, output.frame_rate, recipe, labels)
        case VideoFrames():
            kind = VideoKind(f".{recipe.ending}")
            texts, frames, rate = texts_of(recipe), output.frames_THWC, output.frame_rate
            return encode_video(frames, rate, kind, **texts, sound=output.sound, quality=recipe.quality)
        case AudioSamples():
            samples = as_16_bits(output.samples_SC.T)
            return encode_audio(samples, output.samples_per_second, AudioKind(f".{recipe.ending}"), **texts_of(recipe))


def array_of_output(output: Output) -> PixelArray | FloatArray:
    """Return the array of an output."""
    match output:
        case ImagePixels():
            return output.pixels_HWC
        case VideoFrames():
            return output.frames_THWC
        case AudioSamples():
            return output.samples_SC


def texts_of(recipe: Recipe) -> dict[str, str]:
    """Return the metadata of a video or an audio clip: its prompt as the title, and the complete recipe."""
    return {TITLE: recipe.prompt[:_LONGEST_TITLE], COMMENT: json.dumps(recipe.as_json())}


def read_video_recipe(path: str | Path) -> Recipe:
    """Read the recipe in a video or an audio clip. Raises UserError if it has none, or an unreadable one."""
    return recipe_in(path, "file", COMMENT, _metadata(Path(path)).get(COMMENT))


def _metadata(path: Path) -> Mapping[str, str]:
    import av  # imported late: it is slow, and most programs read no videos

    try:
        with av.open(str(path)) as container:
            # Ogg has it in its stream
            streams = [stream.metadata for stream in container.streams.audio]
            return {key.lower(): value for texts in (*streams, container.metadata) for key, value in texts.items()}
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, av.FFmpegError) as error:
        raise UserError(f"{path}: cannot be read as a video or an audio clip ({error})") from error
