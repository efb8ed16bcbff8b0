"""Control videos of VACE models, of models that animate a character, and of models that follow a video: which models
read one, and how many channels it has. Torch-free.

Channels of each cell, in order: the latent of the kept part of the video, the latent of the part to regenerate (where
the video guides the result), and the mask of that part with one channel per pixel of a cell. Leading time cells hold a
reference image latent, zeros and zeros. Source: diffusers, WanVACEPipeline.

Of models that animate: a mask with a channel for each frame of a cell, the latent of the character and the kept part,
and the latent of the poses. The leading cell has the character and no poses. Source: diffusers, WanAnimatePipeline.

Of models that follow a video: its latent alone. Sources: diffusers, CogVideoXFunControlPipeline; for Wan Fun, the
pipeline of its authors.
"""

from __future__ import annotations

from modelpool.pool.families.parts.video_calls import MASK_CHANNELS
from modelpool.pool.values.core.sampling_facts import SamplingFacts

#: name of the control video in `ModelKwargs` (`pool.models.components.diffusion.architecture`)
CONTROL = "control"
#: the same of the pixels of a face
FACE = "face"
#: the same of a control video without a mask
FOLLOWED = "followed"
#: families with the tensors of the models that follow tracks
_TRACKED = frozenset({"wan21_i2v"})


def takes_control_video(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` read a control video; for VACE, a grey one stands in for a missing one."""
    return CONTROL in facts.reads or follows_video(facts)


def follows_tracks(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` may be ones that follow tracks of points: those that were published have the
    tensors of Wan 2.1 image-to-video."""
    return facts.model in _TRACKED


def takes_face_video(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` animate a character: with the poses of a control video, and a face."""
    return FACE in facts.reads


def follows_video(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` follow a control video, which they require, as a whole: without a mask and
    without reference images."""
    return FOLLOWED in facts.reads


def control_input(facts: SamplingFacts) -> str:
    """Return the name of the control video among the inputs of models of `facts`."""
    return FOLLOWED if follows_video(facts) else CONTROL


def control_video_channels(facts: SamplingFacts, channels: int, downscale: int) -> int:
    """Return the channels of a control video, for latents with `channels` and cells of `downscale` pixels a side."""
    if follows_video(facts):
        return channels
    return 2 * channels + (MASK_CHANNELS if takes_face_video(facts) else downscale**2)
