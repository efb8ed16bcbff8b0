"""The three stages of a picture on components that are ready to run, for one picture or for several at once. Plain
functions; no memory is managed here.

Shape legend: B batch, L tokens, D text width, V width of a pooled text, C latent channels, H W height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pool.checkpoints.families import PLAIN_SAMPLING, PLAIN_TEXT, LatentFacts, SamplingFacts, TextFacts
from pool.errors import CorruptFile
from pool.patcher import ModelPatcher
from pool.sampling.conditions import Condition
from pool.sampling.extras import call_unet, extras_of
from pool.sampling.noise import PictureNoise
from pool.sampling.run import denoise_pictures
from pool.sampling.schedules import sigma_table
from pool.spec import Division
from pool.stopping import stop_check, stop_if_asked
from pool.text.encode import ReadText, match_lengths, read_texts
from pool.text.tokenizer import ClipTokenizer
from pool.tiling.spans import Downscale
from pool.tiling.vae import Tiling, decode_latent, encode_moments, latent_of, tiled_decode, tiled_encode
from pool.work import Encoded, EncodeWork, Latent, Picture, RunHooks, SampleWork


def latent_cells(width: int, height: int, latent: LatentFacts) -> tuple[int, int]:
    """Height and width of the latent of a picture of this many pixels."""
    return height // latent.downscale, width // latent.downscale


@dataclass(frozen=True, slots=True)
class TextEncoder:
    """One of a model's text encoders, and how it is read."""

    patcher: ModelPatcher
    facts: TextFacts = PLAIN_TEXT


def encode(work: EncodeWork, encoders: Sequence[TextEncoder], tokenizer: ClipTokenizer, hooks: RunHooks) -> Encoded:
    """The text of `work` as the diffusion model reads it: what `encoders` read, side by side. One step. Raises Stopped
    at a layer."""
    return encode_together((work,), encoders, tokenizer, hooks)[0]


def encode_together(
    works: Sequence[EncodeWork], encoders: Sequence[TextEncoder], tokenizer: ClipTokenizer, hooks: RunHooks
) -> tuple[Encoded, ...]:
    """`encode` for each of `works`, which differ in their texts, in one run."""
    texts, read = [work.text for work in works], []
    for encoder in encoders:
        with encoder.patcher.running(stop_check(hooks)) as module:
            read.append(read_texts(module, tokenizer, texts, encoder.patcher.device, encoder.facts))
    hooks.on_step(1, 1)
    return tuple(_encoded(parts) for parts in zip(*read, strict=True))


def _encoded(parts: Sequence[ReadText]) -> Encoded:
    """What the text encoders read of one text."""
    context_LD = torch.cat([part.context_LD.to("cpu") for part in parts], dim=-1)
    pooled = [part.pooled_V.to("cpu") for part in parts if part.pooled_V is not None]
    return Encoded(context_LD.numpy(), torch.cat(pooled).numpy() if pooled else None)


def sample(
    work: SampleWork,
    inputs: tuple[Encoded, ...],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
) -> Latent:
    """Denoise the latent of `work` from its seed. Raises Stopped at a step or layer.

    With `division.batch` 1 the two texts run apart, each at its own length. `facts` are those of the model.
    """
    return sample_together((work,), (inputs,), diffusion_model, latent, hooks, division, facts)[0]


def sample_together(
    works: Sequence[SampleWork],
    inputs: Sequence[tuple[Encoded, ...]],
    diffusion_model: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
    facts: SamplingFacts = PLAIN_SAMPLING,
) -> tuple[Latent, ...]:
    """`sample` for each of `works`, which differ in their seeds and texts, in one run: `denoise_pictures`.

    All prompts have one length, and so have all negative prompts. Raises CorruptFile when one of the latents is not
    finite, whichever that is.
    """
    work = works[0]
    most_at_once = 0 if division is None else division.batch
    texts = [_texts(each, most_at_once != 1) for each in inputs]
    cond_BLD, uncond_BLD = _stacked([cond for cond, _ in texts]), _stacked([uncond for _, uncond in texts])
    assert cond_BLD is not None, "sampling reads a prompt"
    shape_CHW = (latent.channels, *latent_cells(work.width, work.height, latent))
    pooled = [_stacked([_pooled(each[place]) for each in inputs]) for place in range(len(inputs[0]))]
    extras = [extras_of(facts.size_conditions, p, work.width, work.height, n > 0) for n, p in enumerate(pooled)]
    cond = Condition(cond_BLD, extras=extras[0])
    uncond = None if uncond_BLD is None else Condition(uncond_BLD, extras=extras[-1])
    dtype = diffusion_model.compute_dtype
    with diffusion_model.running(stop_check(hooks)) as module:

        def predict_noise(x_BCHW: Tensor, timestep_B: Tensor, context_BLD: Tensor, **told: Tensor) -> Tensor:
            return call_unet(module, x_BCHW.to(dtype), timestep_B, context_BLD.to(dtype), told)

        device = diffusion_model.device
        options = diffusion_model.model_options
        samples_BCHW = denoise_pictures(
            predict_noise,
            work,
            [each.seed for each in works],
            shape_CHW,
            cond,
            uncond,
            device,
            hooks,
            table=sigma_table(facts.noise),
            options=options,
            most_at_once=most_at_once,
            prediction=facts.prediction,
        )
    if not torch.isfinite(samples_BCHW).all():
        loras = "".join(f" with LoRA {lora.name!r} at {lora.strength}" for lora in work.loras)
        raise CorruptFile(f"model {work.model.name!r}{loras}: found a latent with NaN or infinity, expected numbers")
    return tuple(Latent(samples_CHW.numpy()) for samples_CHW in samples_BCHW.unbind())


def decode(
    sampled: Latent, vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks, division: Division | None = None
) -> Picture:
    """Turn a latent into pixels. One step, or one for each tile. Raises Stopped at a tile or layer.

    With `division.tile` by tiles of that edge, which share a quarter of it; a tile as large as the latent changes
    nothing.
    """
    return decode_together((sampled,), vae, latent, hooks, division)[0]


def decode_together(
    sampled: Sequence[Latent],
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: Division | None = None,
) -> tuple[Picture, ...]:
    """`decode` for each of `sampled`, latents of one size, in one run."""
    scaled_BCHW = torch.stack([torch.from_numpy(each.samples_CHW.copy()) for each in sampled])
    samples_BCHW = _as_vae_has_it(scaled_BCHW, latent)
    with vae.running(stop_check(hooks)) as module:

        def decode_call(tile_BCHW: Tensor) -> Tensor:
            return decode_latent(module, tile_BCHW.to(vae.device).to(vae.compute_dtype))

        image_BCHW = tiled_decode(
            decode_call,
            samples_BCHW,
            _tiling(division),
            (Downscale(latent.downscale),) * 2,
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
        )
    return tuple(_picture(image_CHW) for image_CHW in image_BCHW.unbind())


def vae_encode(
    picture: Picture,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    seed: int | None = None,
    division: Division | None = None,
) -> Latent:
    """Turn pixels into a latent in the diffusion model's own scale: the mean of what the VAE says, or, with `seed`, a
    sample of it by that seed's noise. One step, or one for each tile; `division.tile` is in latent cells here too.

    Raises UnusableField for a size that is no whole number of latent cells, CorruptFile for a result with NaN or
    infinity, and Stopped at a tile or layer.
    """
    pixels_BCHW = torch.from_numpy(picture.pixels_HWC.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    noise = None if seed is None else PictureNoise(seed)
    with vae.running(stop_check(hooks)) as module:

        def encode_call(tile_BCHW: Tensor) -> Tensor:
            return encode_moments(module, tile_BCHW.to(vae.device).to(vae.compute_dtype))

        moments_BCHW = tiled_encode(
            encode_call,
            pixels_BCHW,
            _tiling(division),
            (Downscale(latent.downscale),) * 2,
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
        )
    samples_BCHW = latent_of(moments_BCHW, None if noise is None else noise.draw)
    if not torch.isfinite(samples_BCHW).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    return Latent(_as_model_has_it(samples_BCHW[0], latent).contiguous().numpy())


def _as_vae_has_it(scaled_BCHW: Tensor, latent: LatentFacts) -> Tensor:
    """Latents in the diffusion model's scale, in the VAE's."""
    samples_BCHW = scaled_BCHW / latent.scaling_factor
    if latent.means:
        samples_BCHW = samples_BCHW * _by_channel(latent.deviations) + _by_channel(latent.means)
    return samples_BCHW + latent.shift if latent.shift else samples_BCHW


def _as_model_has_it(samples_CHW: Tensor, latent: LatentFacts) -> Tensor:
    """The reverse of `_as_vae_has_it`, for one latent."""
    samples_CHW = samples_CHW - latent.shift
    if latent.means:
        samples_CHW = (samples_CHW - _by_channel(latent.means)) / _by_channel(latent.deviations)
    return samples_CHW * latent.scaling_factor


def _by_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]


def _texts(inputs: tuple[Encoded, ...], matched: bool) -> tuple[Tensor, Tensor | None]:
    """The prompt and the negative prompt of one picture; `matched` brings them to one length where that can be."""
    contexts = [torch.from_numpy(i.context_LD.copy()) for i in inputs]
    cond_LD, uncond_LD = contexts[0], contexts[1] if len(contexts) > 1 else None
    if uncond_LD is None or not matched:
        return cond_LD, uncond_LD
    return match_lengths(cond_LD, uncond_LD)


def _pooled(text: Encoded) -> Tensor | None:
    return None if text.pooled_V is None else torch.from_numpy(text.pooled_V.copy())


def _stacked(texts: Sequence[Tensor | None]) -> Tensor | None:
    """Texts of one length as a batch; None when there are none."""
    found = [text_LD for text_LD in texts if text_LD is not None]
    assert len(found) in (0, len(texts)), "some pictures of a batch are told what others are not"
    return torch.stack(found) if found else None


def _picture(image_CHW: Tensor) -> Picture:
    """Pixels of what a VAE made, which goes from -1 to 1."""
    scaled_HWC = image_CHW.add(1).mul(127.5).permute(1, 2, 0)
    return Picture(scaled_HWC.clamp(0, 255).round().to(torch.uint8).contiguous().numpy())


def _tiling(division: Division | None) -> Tiling:
    """The tiles of `division`; without one, one tile for each whole dimension."""
    return Tiling(0 if division is None else division.tile)
