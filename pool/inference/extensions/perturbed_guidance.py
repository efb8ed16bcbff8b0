"""Guidance away from a perturbed prediction, after the guidance by the negative prompt: PAG, SAG, SLG and isolation.

Clean latents stand for predictions: a difference of clean latents is the same multiple of the difference of noises.

Sources: Ahn et al. 2024 (PAG), equation 14; Hong et al. 2023 (SAG), equation 16; Stability AI's sampling of Stable
Diffusion 3.5 Medium (SLG). Shape legend: B batch, C latent channels, H W cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import SoundTrack, joined
from modelpool.pool.inference.extensions.unet_attention import PERTURBED, AttendedTokens, map_of
from modelpool.pool.inference.guidance.cfg_rescale import rescale_by_part, rescale_to_deviation
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.run_options import Isolation, PerturbedAttention, SelfAttention, SkipLayers
from modelpool.pool.weights.options.model_options import Args, PostCfgFunction
from modelpool.pool.weights.options.run_context import call_facts, extra_options
from modelpool.pool.weights.options.transformer_options import TransformerOptions

#: side of the kernel of the blur. Source: the StableDiffusionSAGPipeline of diffusers
_BLUR_SIDE = 9
#: the name of the option
ISOLATION = "isolation"
_NO_OPTIONS = TransformerOptions()


def perturbed_guidance(name: str, option: PerturbedAttention | SkipLayers, clock: StepClock) -> PostCfgFunction:
    """Return the guidance away from the prediction for the prompt by the model that the option `name` perturbs."""
    share = option.rescale if isinstance(option, SkipLayers) else 0.0

    def guide(args: Args) -> Tensor:
        denoised_BCHW: Tensor = args["denoised"]
        if not clock.acts(option):
            return denoised_BCHW
        with call_facts(**{PERTURBED: name}):
            perturbed_BCHW: Tensor = args["predict_prompt"](args["input"])
        cond_BCHW: Tensor = args["cond_denoised"]
        guided_BCHW = denoised_BCHW + (cond_BCHW - perturbed_BCHW) * option.scale
        return rescale_to_deviation(guided_BCHW, cond_BCHW, share) if share else guided_BCHW

    return guide


def self_attention_guidance(option: SelfAttention, clock: StepClock, attended: AttendedTokens) -> PostCfgFunction:
    """Return the guidance away from the prediction for a latent that is blurred at its attended tokens."""

    def guide(args: Args) -> Tensor:
        denoised_BCHW: Tensor = args["denoised"]
        if not clock.acts(option):
            return denoised_BCHW
        assert attended.attended_BL is not None, "the middle block has not run"
        x_BCHW = args["input"]
        plain_BCHW = args["cond_denoised"] if args["uncond"] is None else args["uncond_denoised"]
        mask_B1HW = map_of(attended.attended_BL, *x_BCHW.shape[-2:])
        degraded_BCHW = torch.lerp(plain_BCHW, blurred(plain_BCHW, option.blur), mask_B1HW)
        predict = args["predict_prompt"] if args["uncond"] is None else args["predict_negative"]
        with call_facts(**{PERTURBED: "sag"}):
            perturbed_BCHW: Tensor = predict(degraded_BCHW + (x_BCHW - plain_BCHW))
        return denoised_BCHW + (degraded_BCHW - perturbed_BCHW) * option.scale

    return guide


def isolation_guidance(option: Isolation, track: SoundTrack, clock: StepClock) -> PostCfgFunction:
    """Return the guidance away from the prediction for the prompt in which frames and audio do not read each other.
    Guided clean latents are scaled after it, each by itself."""

    def guide(args: Args) -> Tensor:
        denoised_BCTHW, cond_BCTHW = args["denoised"], args["cond_denoised"]
        if clock.acts(option):
            with call_facts(**{PERTURBED: ISOLATION}):
                isolated_BCTHW: Tensor = args["predict_prompt"](args["input"])
            video, sound = track.parted(cond_BCTHW - isolated_BCTHW)
            denoised_BCTHW = denoised_BCTHW + joined(video * (option.scale - 1.0), sound * (option.audio - 1.0))
        return rescale_by_part(denoised_BCTHW, cond_BCTHW, track, track.facts.rescale)

    return guide


def isolated_call(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a model of videos with sound; a wrapper of the diffusion model. Frames and audio do not read each other in
    the calls for `isolation_guidance`."""
    if extra_options(_NO_OPTIONS).get(PERTURBED) == ISOLATION:
        kwargs = {**kwargs, "isolate_modalities": True}
    return forward(*args, **kwargs)


def blurred(x_BCHW: Tensor, deviation: float) -> Tensor:
    """Return `x_BCHW` after a Gaussian blur of this standard deviation, in cells; its edges are reflected."""
    half = min(_BLUR_SIDE // 2, *(side - 1 for side in x_BCHW.shape[-2:]))
    place = torch.arange(-half, half + 1, dtype=x_BCHW.dtype, device=x_BCHW.device)
    weight = torch.exp(-0.5 * (place / deviation) ** 2)
    kernel_11KK = torch.outer(weight, weight)[None, None] / weight.sum() ** 2
    channels = x_BCHW.shape[1]
    padded_BCHW = torch.nn.functional.pad(x_BCHW, (half,) * 4, mode="reflect")
    return torch.nn.functional.conv2d(padded_BCHW, kernel_11KK.repeat(channels, 1, 1, 1), groups=channels)
