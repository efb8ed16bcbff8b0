"""The facts of a diffusion model that no shape determines: sampling, training size, and inputs. Torch-free.

One value per family, as plain data: in its module in `pool.families.modules`, or in the modules `*_facts` of
`pool.families`, keyed by the name that `pool.detection` returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from modelpool.pool.values.core.sampling_facts import (
    FirstFrameMode,
    LastFrameMode,
    NoiseFacts,
    Prediction,
    SoundFacts,
    VisionEncoderUse,
)
from modelpool.pool.values.core.sampling_facts import Guidance as Guidance


class Level(Enum):
    """The form of the noise level that a model reads; passed unchanged to the call of a `DiffusionArchitecture`."""

    #: share of noise of a flow, 0 to 1
    SHARE = "share"
    #: 0 to 999
    TIMESTEP = "timestep"
    #: a quarter of the natural logarithm of sigma
    LOGARITHM = "logarithm"
    #: the angle whose tangent is sigma, in units of a right angle: 0 to 1
    ANGLE = "angle"
    #: position on a cosine schedule, 0 (clean) to 1 (noise)
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The sampling defaults of one family, and the sizes that it was trained for.

    prediction      meaning of its output
    noise           noise schedule of its training; includes the shift of a flow
    level           form of the noise level that it reads
    guidance, cfg   kind of guidance and its default scale
    steps           default number
    width, height   training size in pixels; 0 for audio
    frames          training length in frames; 1 for images, 0 for audio
    side_multiple   both sides are multiples of it, in pixels: VAE ratio times patch size
    patch_side      pixels along a side of a patch, if both sides are multiples of several; 0: `side_multiple`
    frame_multiple  frame counts are a multiple of it plus one; 0 for image and audio models
    cell_frames     frames of a latent frame, if `frame_multiple` is a multiple of it; 0: `frame_multiple`
    unseen_cells    latent frames before those of a video that are sampled and not decoded
    layers          frames are transparent layers of one image
    frame_rate      frames per second of its training; 0 for none
    seconds         length of audio of its training, or the usual one
    samples_per_second  of each audio channel
    cells           length of every audio latent; 0: it is as long as the audio
    most_seconds, cell_samples, peak  as in `AudioFacts`
    learned_negative  it is guided against a state that it has learned
    reads           names in `ModelKwargs` that it requires
    may_read        names in `ModelKwargs` that it accepts
    sound           the audio track of its videos; None if they have none
    begins          first-frame conditioning, if it is the only use of an input image
    ends            whether the model takes a last frame
    vision_use      use of the vision encoder; requires one
    boundary        two experts: share of noise below which the low-noise expert runs; 0 for one model
    low_cfg         default guidance scale of the low-noise expert
    image_cfg       default guidance scale of the image, for models guided by text and image
    negative        negative prompt of requests that set none
    last_cfg        largest guidance scale of the last steps; 0: that of the others
    sources         where the figures are from
    """

    prediction: Prediction
    noise: NoiseFacts
    level: Level
    guidance: Guidance
    cfg: float
    steps: int
    width: int
    height: int
    frames: int
    side_multiple: int
    frame_multiple: int
    frame_rate: float
    reads: tuple[str, ...]
    may_read: tuple[str, ...] = ()
    seconds: float = 0.0
    samples_per_second: int = 0
    cells: int = 0
    most_seconds: float = 0.0
    cell_samples: int = 0
    peak: float = 0.0
    learned_negative: bool = False
    patch_side: int = 0
    cell_frames: int = 0
    unseen_cells: int = 0
    layers: bool = False
    sound: SoundFacts | None = None
    begins: FirstFrameMode | None = None
    ends: LastFrameMode | None = None
    vision_use: VisionEncoderUse | None = None
    boundary: float = 0.0
    low_cfg: float = 0.0
    image_cfg: float = 0.0
    negative: str = ""
    last_cfg: float = 0.0
    sources: str = ""


_IMAGE: Mapping[str, Any] = {
    "width": 1024, "height": 1024, "frames": 1, "side_multiple": 16, "frame_multiple": 0, "frame_rate": 0.0,
}  # fmt: skip

_AUDIO: Mapping[str, Any] = {
    "width": 0, "height": 0, "frames": 0, "side_multiple": 1, "frame_multiple": 0, "frame_rate": 0.0,
}  # fmt: skip


def audio_facts(noise: NoiseFacts, guidance: Guidance, **more: Any) -> ModelFacts:
    """Return the facts of a family that generates audio; `more` are its other fields."""
    return ModelFacts(**{**_AUDIO, "noise": noise, "guidance": guidance, **more})


def image_flow(noise: NoiseFacts, guidance: Guidance, **more: Any) -> ModelFacts:
    """Return the facts of a family that makes images of 1024 x 1024 pixels with a flow, in patches of 2x2 cells of 8x8
    pixels; `more` are its other fields."""
    usual = {"prediction": Prediction.FLOW, "level": Level.SHARE, "noise": noise, "guidance": guidance}
    return ModelFacts(**{**_IMAGE, **usual, **more})


def image_timesteps(prediction: Prediction, noise: NoiseFacts, guidance: Guidance, **more: Any) -> ModelFacts:
    """Return the same, for a model that reads a timestep."""
    usual = {"prediction": prediction, "level": Level.TIMESTEP, "noise": noise, "guidance": guidance}
    return ModelFacts(**{**_IMAGE, **usual, **more})
