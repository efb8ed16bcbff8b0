"""What no shape tells of a diffusion model: how it is sampled, what for, and what it is told. Torch-free.

One row for each family, as plain data: the modules `*_facts` of this package have them, by the name that
`pool.detection` gives. Nothing here computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from modelpool.pool.core.sampling_facts import Beginning, Ending, NoiseFacts, Prediction, Sight
from modelpool.pool.core.sampling_facts import Guidance as Guidance


class Level(Enum):
    """The number by which a model is told how much noise there is; an `Architecture`'s call gets it as it is named."""

    #: the share of noise, 0 to 1, of a flow
    SHARE = "share"
    #: 0 to 999
    TIMESTEP = "timestep"
    #: a quarter of the natural logarithm of sigma
    LOGARITHM = "logarithm"
    #: the angle whose tangent is sigma, in right angles: 0 to 1
    ANGLE = "angle"
    #: how far along a cosine schedule, 0 (clean) to 1 (noise)
    COSINE = "cosine"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """How one family is sampled by default, and what it is made for.

    prediction      what its answers mean
    noise           the noise that it was trained with; a flow's shift is in it
    level           the number that it is told
    guidance, cfg   the kind and its usual strength
    steps           usual number
    width, height   pixels that it was made for; 0 for audio
    frames          frames that it was made for, 1 for images, 0 for audio
    side_multiple   both sides are multiples of it, in pixels: cells of the VAE times cells of a patch
    frame_multiple  it makes a multiple of so many frames and one more; 0 for those that make images or audio alone
    frame_rate      frames a second that it was made for; 0 for none
    seconds         of audio that it was made for
    samples_per_second  of each channel of that audio
    cells           of every latent of audio
    reads           names of `Told` that it must have
    may_read        names of `Told` that it can have
    begins          how it is told of an image that its video begins with, where that is all that it reads of one
    ends            whether it is told of an image that its video ends with
    sight           how it sees images through a vision encoder, which it must have then
    boundary        of a model that is two: the share of noise below which the second takes over; 0 for one
    low_cfg         the usual strength of that second model
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
    begins: Beginning | None = None
    ends: Ending | None = None
    sight: Sight | None = None
    boundary: float = 0.0
    low_cfg: float = 0.0
    sources: str = ""
