"""The three stages of a picture on components that are ready to run. Plain functions; no memory is managed here.

Shape legend: B batch, L tokens, D text width, C latent channels, H W height and width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from pool.activation import peak_bytes
from pool.checkpoints.families import LatentFacts
from pool.errors import CorruptFile
from pool.patcher import ModelPatcher
from pool.sampling.run import denoise_picture
from pool.text.encode import encode_prompt, match_lengths
from pool.text.tokenizer import ClipTokenizer
from pool.work import DecodeWork, Encoded, EncodeWork, Latent, Picture, RunHooks, SampleWork, Work

#: a chunk of CLIP tokens
CHUNK_TOKENS = 77
#: chunks that estimates allow for; a longer prompt costs a little more than estimated
ESTIMATED_CHUNKS = 3
#: latents in float32 that a sampler holds at once beside the forward pass: state, history, noise, both predictions
SAMPLER_LATENTS = 12


def latent_cells(width: int, height: int, latent: LatentFacts) -> tuple[int, int]:
    """Height and width of the latent of a picture of this many pixels."""
    return height // latent.downscale, width // latent.downscale


def encode(work: EncodeWork, text_encoder: ModelPatcher, tokenizer: ClipTokenizer, hooks: RunHooks) -> Encoded:
    """The text of `work` as the diffusion model reads it. One step."""
    with text_encoder.running() as module:
        context_LD = encode_prompt(module, tokenizer, work.text, text_encoder.device)
    hooks.on_step(1, 1)
    return Encoded(context_LD.to("cpu").float().numpy())


def sample(
    work: SampleWork,
    inputs: tuple[Encoded, ...],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
) -> Latent:
    """Denoise the latent of `work` from its seed. Raises Stopped at a step boundary."""
    contexts = [torch.from_numpy(i.context_LD.copy()) for i in inputs]
    cond_LD, uncond_LD = contexts[0], contexts[1] if len(contexts) > 1 else None
    if uncond_LD is not None:
        cond_LD, uncond_LD = match_lengths(cond_LD, uncond_LD)
    shape_CHW = (latent.channels, *latent_cells(work.width, work.height, latent))
    dtype = diffusion_model.compute_dtype
    with diffusion_model.running() as module:

        def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor) -> Tensor:
            noise_BCHW: Tensor = module(x_BCHW.to(dtype), timestep_B, context_BLD.to(dtype), return_dict=False)[0]
            return noise_BCHW

        device = diffusion_model.device
        options = diffusion_model.model_options
        samples_CHW = denoise_picture(
            predict_noise, work, shape_CHW, cond_LD, uncond_LD, device, hooks, options=options
        )
    if not torch.isfinite(samples_CHW).all():
        loras = "".join(f" with LoRA {lora.name!r} at {lora.strength}" for lora in work.loras)
        raise CorruptFile(f"model {work.model.name!r}{loras}: found a latent with NaN or infinity, expected numbers")
    return Latent(samples_CHW.numpy())


def decode(sampled: Latent, vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks) -> Picture:
    """Turn a latent into pixels. One step."""
    samples_BCHW = torch.from_numpy(sampled.samples_CHW.copy())[None] / latent.scaling_factor
    with vae.running() as module:
        image_BCHW = _decode(module, samples_BCHW.to(vae.device).to(vae.compute_dtype))
    scaled_HWC = image_BCHW[0].to("cpu").float().add(1).mul(127.5).permute(1, 2, 0)
    hooks.on_step(1, 1)
    return Picture(scaled_HWC.clamp(0, 255).round().to(torch.uint8).contiguous().numpy())


def activation_bytes(work: Work, module: nn.Module, compute_dtype: torch.dtype, latent: LatentFacts) -> int:
    """Bytes that `work` needs beside weights and scratch, counted by a dry run of its plain `module` on meta."""

    def empty(*shape: int, dtype: torch.dtype = compute_dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    plain: Any = module  # diffusers and transformers are not typed
    match work:
        case EncodeWork():
            # all chunks are one batch, and the interpolation of prompt weights holds a few results at once
            tokens = (ESTIMATED_CHUNKS, CHUNK_TOKENS)
            width = plain.get_input_embeddings().embedding_dim
            held_bytes = 4 * 4 * math.prod(tokens) * int(width)
            return held_bytes + peak_bytes(module, compute_dtype, lambda m: m(empty(*tokens, dtype=torch.long)))
        case SampleWork():
            cells = latent_cells(work.width, work.height, latent)
            batch, text_width = 1 if work.cfg == 1 else 2, int(plain.config.cross_attention_dim)
            length = ESTIMATED_CHUNKS * CHUNK_TOKENS

            def call(m: nn.Module) -> Any:
                x_BCHW, timestep_B = empty(batch, latent.channels, *cells), empty(batch, dtype=torch.float32)
                return m(x_BCHW, timestep_B, empty(batch, length, text_width), return_dict=False)

            return peak_bytes(module, compute_dtype, call) + SAMPLER_LATENTS * 4 * latent.channels * math.prod(cells)
        case DecodeWork():
            cells = latent_cells(work.width, work.height, latent)
            return peak_bytes(module, compute_dtype, lambda m: _decode(m, empty(1, latent.channels, *cells)))


def _decode(vae: nn.Module, samples_BCHW: Tensor) -> Tensor:
    image_BCHW: Tensor = vae.decode(samples_BCHW, return_dict=False)[0]  # type: ignore[operator]
    return image_BCHW
