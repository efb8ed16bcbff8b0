"""What a task gives back: texts as models read them, images as they see them, latents, images, videos, audio clips.

Torch-free values; numpy arrays carry them between processes.

Shape legend: L tokens, D text width, V width of a pooled text, C channels, H W latent or pixel height and width, T
frames, S samples of audio.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FloatArray: TypeAlias = npt.NDArray[np.float32]
PixelArray: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as the diffusion model reads it. `pooled_V` is all of it in one vector, for models that are told that.

    others  what a model is told of the text beside these, by the names of `pool.models.diffusion.architecture`
    """

    context_LD: FloatArray
    pooled_V: FloatArray | None = None
    others: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All that it consists of."""
        pooled = () if self.pooled_V is None else (self.pooled_V,)
        return (self.context_LD, *pooled, *(self.others[name] for name in sorted(self.others)))


@dataclass(frozen=True, slots=True)
class Seen:
    """An image as a vision encoder has it: a state for each of its parts, or one for all of it.

    grid  rows and columns of the states, for those that stand among the words of a text; 0 for others
    """

    states_LD: FloatArray
    grid: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Latent:
    """A denoised latent in the model's own scale (what the VAE reads after un-scaling)."""

    samples_CHW: FloatArray


@dataclass(frozen=True, slots=True)
class Halfway:
    """A latent between two steps of a run, as noisy as it is there, and what the sampler remembers of the steps before.

    levels       of noise, at which it remembers guesses of the clean latent, the newest first
    guesses_NCHW these guesses, in that order
    start_CHW    where its last step began, for samplers that look back to that; None for others
    """

    samples_CHW: FloatArray
    levels: tuple[float, ...] = ()
    guesses_NCHW: FloatArray | None = None
    start_CHW: FloatArray | None = None

    @property
    def arrays(self) -> tuple[FloatArray, ...]:
        """All that it consists of."""
        return tuple(a for a in (self.samples_CHW, self.guesses_NCHW, self.start_CHW) if a is not None)


@dataclass(frozen=True, slots=True)
class ImagePixels:
    """RGB pixels, 0 to 255."""

    pixels_HWC: PixelArray


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames of RGB pixels, 0 to 255, and how many there are to a second."""

    frames_THWC: PixelArray
    frame_rate: float


@dataclass(frozen=True, slots=True)
class AudioSamples:
    """Samples of each channel, -1 to 1, and how many there are to a second."""

    samples_SC: FloatArray
    samples_per_second: int


@dataclass(frozen=True, slots=True)
class Mask:
    """Where an image is made anew: 255 for all of it, 0 where it is kept."""

    values_HW: PixelArray


@dataclass(frozen=True, slots=True)
class VideoMask:
    """Where each frame of a video is made anew, as of `Mask`; one frame stands for all."""

    values_THW: PixelArray


Result: TypeAlias = Encoded | Seen | Latent | Halfway | ImagePixels | VideoFrames | AudioSamples | Mask | VideoMask
#: what people ask for
Made: TypeAlias = ImagePixels | VideoFrames | AudioSamples
