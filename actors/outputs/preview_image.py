"""Reduces an output file to one image: the image itself, the first frame of a video, the wave of an audio clip.

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
#: videos that Pillow reads
_OF_PILLOW = VideoKind.GIF.value


def first_image(path: Path) -> Image.Image:
    """Return the preview of a file. Raises OSError if it cannot be read as its name indicates."""
    ending = path.suffix.lower()
    if ending in {kind.value for kind in AudioKind}:
        return wave_image(read_samples(path))
    if ending in {kind.value for kind in VideoKind} and ending != _OF_PILLOW:
        return _first_frame(path)
    with Image.open(path) as opened:
        if opened.mode == "RGBA":  # the lowest layer of an image, on white
            white = Image.new("RGBA", opened.size, "white")
            return Image.alpha_composite(white, opened.copy()).convert("RGB")
        if opened.mode == "RGB":
            opened.load()  # without the copy that `convert` makes
            return opened
        return opened.convert("RGB")


def wave_image(samples_CL: npt.NDArray[np.int16]) -> Image.Image:
    """Draw the loudness of an audio clip over time: for each column of pixels, the lowest and the highest sample of
    any channel.
    """
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
    import av  # imported late: it is slow, and most programs read no videos

    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            return Image.fromarray(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
    raise OSError(f"{path}: no frames in this video")


def read_samples(path: Path) -> npt.NDArray[np.int16]:
    """Return the 16-bit samples [channels, samples] of an audio file. Raises OSError."""
    import av

    with av.open(str(path)) as container:
        channels = container.streams.audio[0].codec_context.channels
        found = [frame.to_ndarray() for frame in container.decode(audio=0)]
    if not found:
        raise OSError(f"{path}: no samples in this audio file")
    samples: npt.NDArray[np.int16] = np.concatenate([one.reshape(-1, channels) for one in found]).T
    return samples
