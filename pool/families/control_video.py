"""Control videos of VACE models: which models read one, and how many channels it has. Torch-free.

Channels of each cell, in order: the latent of the kept part of the video, the latent of the part to regenerate (where
the video guides the result), and the mask of that part with one channel per pixel of a cell. Leading time cells hold a
reference image latent, zeros and zeros. Source: diffusers, WanVACEPipeline.
"""

from __future__ import annotations

from modelpool.pool.core.sampling_facts import SamplingFacts

#: name of the control video in `ModelKwargs` (`pool.models.diffusion.architecture`)
CONTROL = "control"


def takes_control_video(facts: SamplingFacts) -> bool:
    """Return whether models of `facts` read a control video; a grey one stands in for a missing one."""
    return CONTROL in facts.reads


def control_video_channels(channels: int, downscale: int) -> int:
    """Return the channels of a control video, for latents with `channels` and cells of `downscale` pixels a side."""
    return 2 * channels + downscale**2
