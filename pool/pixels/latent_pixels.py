"""Latents to pixels and back on a VAE that is ready to run, of any kind, whole or by tiles. No memory is managed here.

Knows how latents are scaled, and which dimensions a VAE works over; knows neither tasks nor files.

Shape legend: B batch, C channels, T cells of time or frames, H W height and width. "BC" stands for all that a VAE has
behind channels: H W for images, T H W for video, L for audio.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from modelpool.pool.core.family_facts import LatentFacts
from modelpool.pool.core.stage_params import DecodeWork, RunHooks, SampleWork
from modelpool.pool.core.stopping import stop_check, stop_if_asked
from modelpool.pool.detection.latent_formats import LatentFormat
from modelpool.pool.detection.vae_facts import VaeFacts
from modelpool.pool.models.vae.codec import VaeCodec
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.pixels.spans import Downscale
from modelpool.pool.pixels.tiled_vae import (
    Tiling,
    decode_latent,
    encode_moments,
    frame_by_frame,
    latent_of,
    tiled_decode,
    tiled_encode,
)
from modelpool.pool.sampling.noise import ImageNoise
from modelpool.pool.specs.spec import Division

#: the kind whose latents are said by numbers alone, and whose encoder gives moments that tiles may blend
KL = "kl"


def latent_shape(width: int, height: int, frames: int, latent: LatentFacts) -> tuple[int, ...]:
    """The shape of the latent of an image of this many pixels, or of a video of so many frames: [C, H, W] or
    [C, T, H, W]; of audio, all of which are equally long, [C, L]."""
    if latent.audio is not None:
        return latent.channels, latent.audio.cells
    cells = latent.sides(width, height)
    if not frames:
        return (latent.channels, *cells)
    return (latent.channels, 1 + (frames - 1) // latent.frames_per_cell, *cells)


def sampled_shape(work: SampleWork | DecodeWork, latent: LatentFacts) -> tuple[int, ...]:
    """The shape of the latent that a run of `work` is on: `latent_shape`, with the cells of time before a video's."""
    return latent_shape(work.width, work.height, work.frames + work.leading * latent.frames_per_cell, latent)


def decoded(
    scaled_BC: Tensor, vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks, division: Division | None = None
) -> Tensor:
    """The pixels of latents in the diffusion model's scale, -1 to 1, float32 on the CPU: [B,C,H,W], video [B,C,T,H,W],
    samples of audio [B,C,S].

    Latents of images may come without time for a VAE of videos; so do their pixels. With `division.tile` by tiles of
    that edge, which share a quarter of it. One step, or one for each tile. Raises Stopped at a tile or layer.
    """
    is_flat = latent.dimensions == 3 and scaled_BC.dim() == 4
    own_BC = scaled_BC.unsqueeze(2) if is_flat else scaled_BC
    read_BC = as_vae_has_it(own_BC, latent) if latent.vae == KL else own_BC
    with vae.running(stop_check(hooks)) as module:
        codec = codec_of(module, latent)

        def decode_call(tile_BC: Tensor) -> Tensor:
            if latent.vae == KL:
                own_BC = tile_BC.to(vae.device).to(vae.compute_dtype)
                return frame_by_frame(partial(decode_latent, module), own_BC)
            return codec.decode(tile_BC.to(vae.device), dtype=vae.compute_dtype)

        pixels_BC = tiled_decode(
            decode_call,
            read_BC,
            tiling(division),
            downscales(latent),
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
        )
    return pixels_BC.squeeze(2) if is_flat else pixels_BC


def encoded(
    pixels_BC: Tensor,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    noise: ImageNoise | None = None,
    division: Division | None = None,
) -> Tensor:
    """The latents of pixels in the diffusion model's scale, float32 on the CPU: the mean of what the VAE says or, with
    `noise`, a sample of it where the VAE says how sure it is (the KL autoencoders of images).

    Raises UnusableField for a size that is no whole number of latent cells, and Stopped at a tile or layer.
    """
    is_flat = latent.dimensions == 3 and pixels_BC.dim() == 4
    own_BC = pixels_BC.unsqueeze(2) if is_flat else pixels_BC
    with vae.running(stop_check(hooks)) as module:
        codec = codec_of(module, latent)

        def encode_call(tile_BC: Tensor) -> Tensor:
            tile_BC = tile_BC.to(vae.device).to(vae.compute_dtype)
            if latent.vae == KL:
                return frame_by_frame(partial(encode_moments, module), tile_BC)
            return codec.encode(tile_BC)

        read_BC = tiled_encode(
            encode_call,
            own_BC,
            tiling(division),
            downscales(latent),
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
        )
    if latent.vae == KL:
        read_BC = _as_model_has_it(latent_of(read_BC, None if noise is None else noise.draw), latent)
    return read_BC.squeeze(2) if is_flat else read_BC


def codec_of(module: object, latent: LatentFacts) -> VaeCodec:
    """What calls a VAE of the kind that `latent` names."""
    facts = VaeFacts(
        latent.vae,
        latent.vae,
        latent.channels,
        latent.dimensions,
        encode_ratio=latent.downscale,
        decode_ratio=latent.downscale,
        temporal_ratio=latent.frames_per_cell,
    )
    means = latent.means or (latent.shift,)
    own = LatentFormat(latent.channels, latent.dimensions, latent.scaling_factor, means, latent.deviations or (1.0,))
    return VaeCodec(module, facts, own)


def downscales(latent: LatentFacts) -> tuple[Downscale, ...]:
    """How the VAE divides each dimension behind channels."""
    sides = (Downscale(latent.downscale),) * min(2, latent.dimensions)
    return (Downscale(latent.frames_per_cell, first_alone=True), *sides) if latent.dimensions == 3 else sides


def tiling(division: Division | None) -> Tiling:
    """The tiles of `division`; without one, one tile for each whole dimension."""
    return Tiling(0 if division is None else division.tile)


def as_vae_has_it(scaled_BCHW: Tensor, latent: LatentFacts) -> Tensor:
    """Latents in the diffusion model's scale, in the VAE's."""
    samples_BCHW = scaled_BCHW / latent.scaling_factor
    if latent.means:
        samples_BCHW = samples_BCHW * _by_channel(latent.deviations) + _by_channel(latent.means)
    return samples_BCHW + latent.shift if latent.shift else samples_BCHW


def _as_model_has_it(samples_BCHW: Tensor, latent: LatentFacts) -> Tensor:
    """The reverse of `as_vae_has_it`."""
    samples_BCHW = samples_BCHW - latent.shift
    if latent.means:
        samples_BCHW = (samples_BCHW - _by_channel(latent.means)) / _by_channel(latent.deviations)
    return samples_BCHW * latent.scaling_factor


def _by_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]
