"""A file of this project's as one picture: a picture itself, the first frame of a film, the wave of a sound.

Knows files and drawing; not what they are for.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from modelpool.actors.outputs.audio import SoundKind
from modelpool.actors.outputs.video import FilmKind

_WAVE_PIXELS = (384, 192)
_INK, _PAPER = (58, 90, 140), (255, 255, 255)
#: films that Pillow reads itself
_OF_PILLOW = FilmKind.GIF.value


def first_picture(path: Path) -> Image.Image:
    """The picture that stands for the file. Raises OSError when it cannot be read as what its name says."""
    ending = path.suffix.lower()
    if ending in {kind.value for kind in SoundKind}:
        return wave_picture(_samples(path))
    if ending in {kind.value for kind in FilmKind} and ending != _OF_PILLOW:
        return _first_frame(path)
    with Image.open(path) as opened:
        return opened.convert("RGB")


def wave_picture(samples_CL: npt.NDArray[np.int16]) -> Image.Image:
    """How loud a sound is over time: of each column of pixels, the lowest and the highest sample of any channel."""
    width, height = _WAVE_PIXELS
    picture = Image.new("RGB", _WAVE_PIXELS, _PAPER)
    pen, middle = ImageDraw.Draw(picture), (height - 1) / 2
    wave, ends = samples_CL.astype(np.float32) / 32768.0, np.linspace(0, samples_CL.shape[1], width + 1).astype(int)
    for column, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = wave[:, begin : max(end, begin + 1)]
        low, high = float(part.min()), float(part.max())
        pen.line([(column, middle - high * middle), (column, middle - low * middle)], _INK)
    return picture


def _first_frame(path: Path) -> Image.Image:
    import av  # it takes its time, and most programs read no films

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            return Image.fromarray(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
    raise OSError(f"{path}: found no frame in this film")


def _samples(path: Path) -> npt.NDArray[np.int16]:
    import av

    with av.open(str(path)) as container:
        channels = container.streams.audio[0].codec_context.channels
        found = [frame.to_ndarray() for frame in container.decode(audio=0)]
    if not found:
        raise OSError(f"{path}: found no samples in this sound")
    samples: npt.NDArray[np.int16] = np.concatenate([one.reshape(-1, channels) for one in found]).T
    return samples
