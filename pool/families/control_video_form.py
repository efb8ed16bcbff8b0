"""The form in which a model is told of a video to follow, and which models are. Torch-free.

What is told, cell by cell along the channels: the latent of what of the video is kept, the latent of what is made anew
(following what it shows there), and the mask of that with a channel for each pixel of a cell. Cells of time before the
video's own have the latent of an image to work from, zeros and zeros.
Source: diffusers, WanVACEPipeline.
"""

from __future__ import annotations

from modelpool.pool.core.sampling_facts import SamplingFacts

#: the name by which a model is told of it (`pool.models.diffusion.architecture`)
CONTROL = "control"


def follows_video(facts: SamplingFacts) -> bool:
    """Whether models of `facts` are told of a video to follow; where nobody gives one, of a grey one."""
    return CONTROL in facts.reads


def followed_channels(channels: int, downscale: int) -> int:
    """Channels of what is told, where latents have so many and a cell is so many pixels a side."""
    return 2 * channels + downscale**2
