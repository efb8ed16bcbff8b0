"""What it takes to build and call one kind of diffusion model: the form of the rows of the tables beside this module.

Does not know any model, and does not read files.

What a model is told beside latent and noise level goes by these names; every tensor begins with the batch.
Legend: B batch, C channels, L tokens, D width of a token, V width of the pooled text, H W cells of a latent, T of time.

===================  ==========  ===================================================================================
name                 shape       what it is
===================  ==========  ===================================================================================
context              [B,L,D]     states of the text, from the encoder that the model reads first; Krea 2: of each
                                 layer that it reads, [B,L,layers,D]
context_mask         [B,L] bool  which tokens are real; left out when all are
context_2            [B,L,D]     states of a second encoder; HiDream: of all layers of one, [B,layers,L,D]
context_2_mask       [B,L] bool  as context_mask
pooled               [B,V]       the text as one vector
guidance             [B]         how strongly a distilled model is to follow the text
image                [B,C,H,W]   (or [B,C,T,H,W]) latents and masks beside the noisy latent, joined to its channels
reference            [B,C,H,W]   the latent of an image to work from, whose patches stand beside those of the latent
image_context        [B,L,D]     states of a vision encoder
size                 [B,2]       height and width in pixels that the image is to have
frame_rate           [B]         frames a second
seconds              [B,2,D]     where audio starts and how long it is, embedded (`audio_seconds`); or [B,2], in
                                 seconds, for a module that embeds them itself
image_mask           [B,1,T,H,W] 1 where video keeps "image" as it is, which then has the latent's form, 0 elsewhere
control              [B,C,T,H,W] latents and masks of a video to follow
numbers              [B,n]       what a UNet is told as numbers: sizes and crops; frame rate, motion and noise; SV3D p:
                                 noise, height and direction of the view for each frame, [B,T,3]
noise_level          [B]         how much noise was put on an image to upscale, 0..999
prior                [B,C,H,W]   what the model before made: latents of Stable Cascade's stage C
next_level           [B]         the level after this step, for models that learned whole steps ("mean flow")
===================  ==========  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn

from modelpool.pool.detection.layouts.shape_sizes import Config
from modelpool.pool.formats.safetensors_file import Shape

Shapes: TypeAlias = Mapping[str, Shape]
#: what a class of diffusers is built with
Arguments: TypeAlias = dict[str, Any]
#: what a model is told, by the names above
Told: TypeAlias = Mapping[str, Tensor]
Convert: TypeAlias = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Call: TypeAlias = Callable[[nn.Module, Tensor, Tensor, Told], Tensor]


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one kind of diffusion model is built and called.

    module   the class
    config   its arguments: from the sizes that recognition read, whichever naming the file has, and the shapes of the
             parameters, as `convert` gives them. Both are the same for both namings, but that recognition may have
             None where one naming does not tell. Raises UnknownArchitecture or an arithmetic or look-up error for
             sizes that cannot be
    convert  tensors under the published names, without prefix, to the module's parameters: renames, cuts and reshapes
             rows, and nothing else (`pool.keymaps.key_map.discover` watches it). Files in the naming of diffusers
             do not go through it
    call     (module, x, level_B, told) -> what the model predicts, in the form of x, which is the latent as the sampler
             has it: [B,C,H,W], video [B,C,T,H,W], audio [B,C,L]. Patches, positions, signs and the scale of time are
             the call's business. `level_B` is float32 whatever x is, since half precision has no digits for a timestep:
             sigma in 0..1 for flow models, whose prediction is noise - clean; for others it is the timestep, 0..999,
             and the prediction is what the family predicts. The same numbers as diffusers' pipeline gives the module
    """

    module: type[nn.Module]
    config: Callable[[Config, Shapes], Arguments]
    convert: Convert
    call: Call
