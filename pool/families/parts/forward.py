"""Types of the functions that configure and call a diffusion model, and the names of its inputs. Torch-free to import.

The inputs of a model other than latent and noise level have these names; the first dimension of every tensor is the
batch. Legend: B batch, C channels, L tokens, D width of a token, V width of the pooled text, H W cells of a latent, T
of time.

 ===================  ==========  ===================================================================================
 name                 shape       meaning
 ===================  ==========  ===================================================================================
 context              [B,L,D]     text states of the first encoder that the model reads; Krea 2: of each layer that it
                                  reads, [B,L,layers,D]
 context_mask         [B,L] bool  real tokens; absent if all are real
 context_2            [B,L,D]     states of a second encoder; HiDream: of all layers of one, [B,layers,L,D]
 context_2_mask       [B,L] bool  as context_mask
 pooled               [B,V]       pooled text embedding
 guidance             [B]         guidance scale of a distilled model
 image                [B,C,H,W]   (or [B,C,T,H,W]) latents and masks, concatenated with the noisy latent along channels
 reference            [B,C,H,W]   latent of a reference image; its patches are appended to the latent's
 image_places         [B,K,2]     place of each name of a reference image among the words, and its number, from 1
 image_context        [B,L,D]     states of a vision encoder
 size                 [B,2]       height and width of the output in pixels
 frame_rate           [B]         frames per second
 seconds              [B,2,D]     start and length of the audio, embedded (`audio_seconds`); or [B,2], in seconds, for
                                  a module that embeds them itself
 image_mask           [B,1,T,H,W] 1 where a video keeps "image" unchanged, which then has the latent's shape; else 0
 control              [B,C,T,H,W] latents and masks of a control video
 followed             [B,C,T,H,W] latent of a video to follow, concatenated with the noisy latent along channels
 camera               [B,F,16]    the camera of each frame (`pool.models.components.diffusion.camera_rays`)
 face                 [B,3,F,S,S] pixels of a face in each frame of the video, -1 to 1
 numbers              [B,n]       numeric conditioning of a UNet: sizes and crops; frame rate, motion and noise; SV3D p:
                                  noise, height and direction of the view for each frame, [B,T,3]
 noise_level          [B]         noise added to an image to upscale, 0..999
 prior_tokens         [B,N]       tokens of the image, one for each patch, that a text encoder wrote; absent for none
 reference_tokens     [B,N]       the same of the reference images, one after the other
 prior                [B,C,H,W]   output of the prior: latents of Stable Cascade's stage C
 step                 [B,3]       noise levels at the start and at the end of the step, and the shift of the flow, on
                                  the host, for models that were distilled to complete steps
 next_level           [B]         the level after this step, for models that learned complete steps ("mean flow")
 lyrics               [B,L,D]     embedded tokens of lyrics, before the model has encoded them with the context
 source               [B,C,L]     latent of the audio that a model of music reads next to the noisy one
 unconditional        [B]         present if the module's second model predicts, which reads no text
 ===================  ==========  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from modelpool.pool.files.formats.safetensors_file import Shape

if TYPE_CHECKING:
    from torch import Tensor, nn

Shapes: TypeAlias = Mapping[str, Shape]
#: arguments of a diffusers class
Arguments: TypeAlias = dict[str, Any]
#: conditioning inputs of a model, by the names above
ModelKwargs: TypeAlias = "Mapping[str, Tensor]"
Convert: TypeAlias = "Callable[[dict[str, Tensor]], Mapping[str, Tensor]]"
Call: TypeAlias = "Callable[[nn.Module, Tensor, Tensor, ModelKwargs], Tensor]"
#: (module, shape of one latent, inputs including the context) -> those that the steps of a run read instead, and the
#: context of the state that guidance is against
Prepare: TypeAlias = "Callable[[nn.Module, tuple[int, ...], ModelKwargs], tuple[ModelKwargs, Tensor]]"


#: timestep of sigma 1 for flow models
TIMESTEPS = 1000


def config_of(module: nn.Module) -> Any:
    """Return the arguments that a diffusers module was built with."""
    return module.config


def sample_of(result: Any) -> Tensor:
    """Return the output tensor of a diffusers module."""
    sample: Tensor = result[0]
    return sample


def unchanged(*without: str) -> Convert:
    """Return a converter for models published under diffusers' names; it drops the tensors `without`."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key not in without}
