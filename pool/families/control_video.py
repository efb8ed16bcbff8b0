"""Control videos of VACE models, and of models that animate a character: which models read one, and how many channels
it has. Torch-free.

Channels of each cell, in order: the latent of the kept part of the video, the latent of the part to regenerate (where
the video guides the result), and the mask of that part with one channel per pixel of a cell. Leading time cells hold a
reference image latent, zeros and zeros. Source: diffusers, WanVACEPipeline.

Of models that animate: a mask with a channel for each frame of a cell, the latent of the character and of what is kept,
and the latent of the poses. The leading cell has the character and no poses. Source: diffusers, WanAnimatePipeline.
"""

from __future__ import annotations

from modelpool.pool.core.sampling_facts import SamplingFacts
from modelpool.pool.families.parts.video import MASK_CHANNELS

#: name of the control video in `ModelKwargs` (`pool.models.diffusion.architecture`)
CONTROL = "control"
#: the same of the pixels of a face
FACE = "face"


def takes_control_video(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` read a control video; a grey one stands in for a missing one."""
    return CONTROL in facts.reads


def takes_face_video(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` animate a character: with the poses of a control video, and a face."""
    return FACE in facts.reads


def control_video_channels(facts: SamplingFacts, channels: int, downscale: int) -> int:
    """Return the channels of a control video, for latents with `channels` and cells of `downscale` pixels a side."""
    return 2 * channels + (MASK_CHANNELS if takes_face_video(facts) else downscale**2)
