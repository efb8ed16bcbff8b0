"""A file of this project's as one image: an image itself, the first frame of a video, the wave of an audio clip.

Knows files and drawing; not what they are for.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from modelpool.actors.outputs.audio import AudioKind
from modelpool.actors.outputs.video import VideoKind

_WAVE_PIXELS = (384, 192)
_INK, _PAPER = (58, 90, 140), (255, 255, 255)
#: videos that Pillow reads itself
_OF_PILLOW = VideoKind.GIF.value


def first_image(path: Path) -> Image.Image:
    """The image that stands for the file. Raises OSError when it cannot be read as what its name says."""
    ending = path.suffix.lower()
    if ending in {kind.value for kind in AudioKind}:
        return wave_image(_samples(path))
    if ending in {kind.value for kind in VideoKind} and ending != _OF_PILLOW:
        return _first_frame(path)
    with Image.open(path) as opened:
        return opened.convert("RGB")


def wave_image(samples_CL: npt.NDArray[np.int16]) -> Image.Image:
    """How loud an audio clip is over time: of each column of pixels, the lowest and the highest sample of any
    channel."""
    width, height = _WAVE_PIXELS
    image = Image.new("RGB", _WAVE_PIXELS, _PAPER)
    pen, middle = ImageDraw.Draw(image), (height - 1) / 2
    wave, ends = samples_CL.astype(np.float32) / 32768.0, np.linspace(0, samples_CL.shape[1], width + 1).astype(int)
    for column, (begin, end) in enumerate(itertools.pairwise(ends)):
        part = wave[:, begin : max(end, begin + 1)]
        low, high = float(part.min()), float(part.max())
        pen.line([(column, middle - high * middle), (column, middle - low * middle)], _INK)
    return image


def _first_frame(path: Path) -> Image.Image:
    import av  # it takes its time, and most programs read no videos

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            return Image.fromarray(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
    raise OSError(f"{path}: found no frame in this video")


def _samples(path: Path) -> npt.NDArray[np.int16]:
    import av

    with av.open(str(path)) as container:
        channels = container.streams.audio[0].codec_context.channels
        found = [frame.to_ndarray() for frame in container.decode(audio=0)]
    if not found:
        raise OSError(f"{path}: found no samples in this audio")
    samples: npt.NDArray[np.int16] = np.concatenate([one.reshape(-1, channels) for one in found]).T
    return samples
