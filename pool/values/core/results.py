"""Results of tasks: encoded texts, image embeddings, latents, images, videos, audio and masks.

Torch-free values; numpy arrays carry them between processes.

Shape legend: L tokens, D text width, V width of a pooled text, C channels, H W latent or pixel height and width, T
frames, S samples of audio, A numbers of a position of an audio latent.
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
    """A text encoded for the diffusion model. `pooled_V` is the pooled embedding, for models that read one.

    others  further text inputs of the model, by the names of `pool.models.components.diffusion.architecture`
    """

    context_LD: FloatArray
    pooled_V: FloatArray | None = None
    others: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All that it consists of."""
        pooled = () if self.pooled_V is None else (self.pooled_V,)
        return (self.context_LD, *pooled, *(self.others[name] for name in sorted(self.others)))

    @property
    def widths(self) -> dict[str, int]:
        """The widths of its states, "context", and of its pooled embedding, "pooled" (0 for none); and of further
        states, by their names."""
        pooled = 0 if self.pooled_V is None else len(self.pooled_V)
        further = {name: self.others[name] for name in sorted(self.others) if self.others[name].dtype.kind == "f"}
        return {
            "context": self.context_LD.shape[-1],
            "pooled": pooled,
            **{name: value.shape[-1] for name, value in further.items()},
        }


@dataclass(frozen=True, slots=True)
class ImageEmbeds:
    """Image embeddings of a vision encoder: one state for each patch, or one for the image.

    grid  rows and columns of the states if they are inserted between the tokens of a text; else 0
    """

    states_LD: FloatArray
    grid: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Latent:
    """A denoised latent in the scale of the diffusion model (the VAE reads it after un-scaling).

    sound_LA  the latent of its audio track, for models that generate videos with sound; else None
    """

    samples_CHW: FloatArray
    sound_LA: FloatArray | None = None

    @property
    def arrays(self) -> tuple[FloatArray, ...]:
        """All arrays that it consists of."""
        return (self.samples_CHW,) if self.sound_LA is None else (self.samples_CHW, self.sound_LA)


@dataclass(frozen=True, slots=True)
class SamplerState:
    """State of a sampler between two steps: the noisy latent and the history of the sampler.

    levels            noise levels of the predictions in the history, newest first
    predictions_NCHW  predictions of the clean latent at these levels
    start_CHW         latent before the last step, for samplers that need it; else None
    numbers           numbers of a sampler that chooses its steps
    draws             how often noise was drawn after the initial one
    """

    samples_CHW: FloatArray
    levels: tuple[float, ...] = ()
    predictions_NCHW: FloatArray | None = None
    start_CHW: FloatArray | None = None
    numbers: tuple[float, ...] = ()
    draws: int = 0

    @property
    def arrays(self) -> tuple[FloatArray, ...]:
        """All arrays that it consists of."""
        return tuple(a for a in (self.samples_CHW, self.predictions_NCHW, self.start_CHW) if a is not None)


@dataclass(frozen=True, slots=True)
class GuidanceState:
    """State of the guidance between two steps.

    levels           noise levels at which it was called
    level            the last of them
    differences_CHW  accumulated differences of the predictions at that level (`pool.inference.guidance.apg`); else None
    before_CHW       those before that level; None at the first one
    inputs_drawn     times that model inputs with noise were drawn
    """

    levels: int = 0
    level: float | None = None
    differences_CHW: FloatArray | None = None
    before_CHW: FloatArray | None = None
    inputs_drawn: int = 0

    @property
    def arrays(self) -> tuple[FloatArray, ...]:
        """All that it consists of."""
        return tuple(a for a in (self.differences_CHW, self.before_CHW) if a is not None)


@dataclass(frozen=True, slots=True)
class RunState:
    """Everything that a sampling run passes on when it stops between two steps: a run that resumes from it has
    bit-identical results, on any device and in any process. It has no random numbers: they follow from the seed and
    from how many were drawn before.

    step     steps done
    steps    all steps of the run
    sampler  the latent and the history of the sampler
    """

    step: int
    steps: int
    sampler: SamplerState
    guidance: GuidanceState = GuidanceState()

    @property
    def arrays(self) -> tuple[FloatArray, ...]:
        """All that it consists of."""
        return (*self.sampler.arrays, *self.guidance.arrays)


#: channels of an image without an alpha channel
COLOURS = 3


@dataclass(frozen=True, slots=True)
class ImagePixels:
    """RGB pixels, 0 to 255; between nodes of a workflow also with an alpha channel, 255 is opaque."""

    pixels_HWC: PixelArray


@dataclass(frozen=True, slots=True)
class AudioSamples:
    """Samples of each channel, -1 to 1, and samples per second."""

    samples_SC: FloatArray
    samples_per_second: int


@dataclass(frozen=True, slots=True)
class VideoFrames:
    """Frames of RGB pixels, 0 to 255, and frames per second; or the layers of an image, with opacity as a fourth
    channel. `sound` is the audio track, if the model generates one."""

    frames_THWC: PixelArray
    frame_rate: float
    sound: AudioSamples | None = None

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays that it consists of."""
        return (self.frames_THWC,) if self.sound is None else (self.frames_THWC, self.sound.samples_SC)


@dataclass(frozen=True, slots=True)
class Mask:
    """Inpaint mask: 255 where the image is regenerated, 0 where it is kept."""

    values_HW: PixelArray


@dataclass(frozen=True, slots=True)
class VideoMask:
    """Inpaint mask for each frame of a video, as `Mask`; a single frame applies to all."""

    values_THW: PixelArray


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of a decoded latent; one number for each dimension after the channels.

    sizes, tile, overlap  in latent positions
    factors       pixels or frames of a latent position, and whether the first one is a single frame
    is_flat       the result has no frames, although the VAE is of videos
    dropped       frames at the start that the output does not have
    frame_rate    of a video
    """

    sizes: tuple[int, ...]
    tile: tuple[int, ...]
    overlap: tuple[int, ...]
    factors: tuple[tuple[int, bool], ...]
    is_flat: bool = False
    dropped: int = 0
    frame_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class DecodedTiles:
    """Some tiles of a decode, before they are blended: a part of the result of another task.

    tiles_C      results of the tiles in order, in the dtype of the VAE
    first        place of the first one among all tiles of the grid
    is_bfloat16  the arrays hold the bits of bfloat16 numbers
    sound        the audio track of the video, in one of its parts
    """

    tiles_C: tuple[npt.NDArray[Any], ...]
    first: int
    grid: TileGrid
    is_bfloat16: bool = False
    sound: AudioSamples | None = None

    @property
    def arrays(self) -> tuple[npt.NDArray[Any], ...]:
        """All arrays that it consists of."""
        return self.tiles_C if self.sound is None else (*self.tiles_C, self.sound.samples_SC)


Result: TypeAlias = (
    Encoded
    | ImageEmbeds
    | Latent
    | SamplerState
    | RunState
    | ImagePixels
    | VideoFrames
    | AudioSamples
    | Mask
    | VideoMask
    | DecodedTiles
)
#: final outputs of a job
Output: TypeAlias = ImagePixels | VideoFrames | AudioSamples
