"""Decodes latents to pixels and encodes pixels, with a prepared VAE of any kind, complete or tiled.

Knows the scaling of latents, and the dimensions of a VAE; knows neither tasks nor files, and does not manage memory.

Shape legend: B batch, C channels, T frames or latent frames, H W height and width. "BC" stands for any dimensions after
the channels: H W for images, T H W for video, L for audio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from modelpool.pool.families.detection.vaes import VaeFacts
from modelpool.pool.families.parts.audio_tracks import sound_cells, sound_length
from modelpool.pool.families.parts.latent_format import LatentFormat
from modelpool.pool.inference.pixels.spans import Downscale
from modelpool.pool.inference.pixels.tiled import HOST, TileCall
from modelpool.pool.inference.pixels.tiled_vae import (
    Tiling,
    decode_latent,
    encode_moments,
    frame_by_frame,
    latent_of,
    tiled_decode,
    tiled_encode,
)
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.vae.codec import VaeCodec
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import DecodeParams, OutputShape, RunHooks, SampleParams
from modelpool.pool.values.core.stopping import stop_check, stop_if_asked
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: VAEs with latent scaling given by numbers, and with an encoder that returns moments that tiles can blend
KL = "kl"
#: kinds of VAE that drop leading latent frames before decoding: the frames of others depend on them, or nobody wants
#: them
DROPS_BEFORE = frozenset({"cogvideox", "qwen_image_layered"})
#: frames of a video that are converted to bytes at once
_FRAMES = 4


def latent_shape(width: int, height: int, frames: int, latent: LatentFacts, seconds: float = 0.0) -> tuple[int, ...]:
    """Return the latent shape of an image of this size, or of a video of `frames`: [C, H, W] or [C, T, H, W]; of audio
    of `seconds`, unless its length is fixed, [C, L]."""
    if latent.audio is not None:
        return latent.channels, latent.audio.cells_of(seconds, latent.downscale)
    cells = latent.sides(width, height)
    if not frames:
        return (latent.channels, *cells)
    return (latent.channels, 1 + (frames - 1) // latent.frames_per_cell, *cells)


def sampled_shape(work: SampleParams | DecodeParams, latent: LatentFacts) -> tuple[int, ...]:
    """Return the latent shape of a run of `work`: `latent_shape`, including leading latent frames of a video, unless
    they are dropped before it, and, while it is sampled, the cells with its audio track."""
    leading = 0 if isinstance(work, DecodeParams) and latent.vae in DROPS_BEFORE else work.shape.leading
    frames = work.shape.frames + leading * latent.frames_per_cell
    own = latent_shape(work.shape.width, work.shape.height, frames, latent, work.shape.seconds)
    if latent.sound is None or not work.shape.frames or isinstance(work, DecodeParams):
        return own
    channels, cells, *sides = own
    shape, numbers = work.shape, channels * math.prod(sides)
    return channels, cells + sound_cells(latent.sound, shape.frames, shape.frame_rate, numbers), *sides


def sound_length_of(shape: OutputShape, latent: LatentFacts) -> int:
    """Return the positions of the latent of a video's audio track; 0 without one."""
    return 0 if latent.sound is None else sound_length(latent.sound, shape.frames, shape.frame_rate)


def decoded(
    scaled_BC: Tensor,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
    into: torch.device = HOST,
    requested: Tiling | None = None,
) -> Tensor:
    """Return the pixels of latents in the diffusion model's scale, -1 to 1, float32 on the CPU: [B,C,H,W], video
    [B,C,T,H,W], audio samples [B,C,S]; or the result of `finish`, which gets them on the device and in the VAE's dtype
    where that is possible. The result is moved to the device `into`.

    Latents of images may omit the time dimension for a VAE of videos; so do their pixels then. With `division.tile`,
    runs tiles of that edge, which overlap by a quarter; with `requested` tiles, the division is within each of them.
    One step, or one for each tile. Raises Stopped at a tile or layer.
    """
    read_BC, is_flat = read_by_vae(scaled_BC, latent), is_without_time(scaled_BC, latent)
    outer = tiling(division, into) if requested is None else replace(requested, accumulator=into)
    with decode_by(vae, latent, hooks, None if requested is None else division) as call:
        pixels_BC = tiled_decode(
            call,
            read_BC,
            outer,
            downscales(latent),
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
            None if finish is None else lambda pixels_BC: finish(flat(pixels_BC, is_flat)),
        )
    return flat(pixels_BC, is_flat) if finish is None else pixels_BC


@contextmanager
def decode_by(
    vae: ModelPatcher, latent: LatentFacts, hooks: RunHooks, division: ExecutionMode | None
) -> Iterator[TileCall]:
    """Prepare the VAE for the block, which gets the call that decodes a latent or a tile, in the scale that it reads:
    on the device in the VAE's dtype, or by tiles of `division` within it."""
    with vae.running(stop_check(hooks)) as module:
        codec = codec_of(module, latent)

        def decode_call(tile_BC: Tensor) -> Tensor:
            if latent.vae == KL:
                tile_BC = tile_BC.to(vae.device).to(vae.compute_dtype)
                return frame_by_frame(partial(decode_latent, module), tile_BC)
            return codec.decode(tile_BC.to(vae.device), dtype=vae.compute_dtype)

        def decode_divided(tile_BC: Tensor) -> Tensor:
            inner = downscales(latent), partial(stop_if_asked, hooks.should_stop)
            return tiled_decode(decode_call, tile_BC, tiling(division), *inner)

        yield decode_call if division is None or not division.tile else decode_divided


def read_by_vae(scaled_BC: Tensor, latent: LatentFacts) -> Tensor:
    """Return latents of the diffusion model's scale with the dimensions of the VAE, and in its scale unless its codec
    converts them."""
    unflat_BC = scaled_BC.unsqueeze(2) if is_without_time(scaled_BC, latent) else scaled_BC
    return to_vae_scale(unflat_BC, latent) if latent.vae == KL else unflat_BC


def is_without_time(scaled_BC: Tensor, latent: LatentFacts) -> bool:
    """Return whether these are latents of images for a VAE of videos."""
    return latent.dimensions == 3 and scaled_BC.dim() == 4


def flat(pixels_BC: Tensor, is_flat: bool) -> Tensor:
    """Return pixels without the dimension of time, if latents had none."""
    return pixels_BC.squeeze(2) if is_flat else pixels_BC


def as_bytes(pixels_BC: Tensor, sums: list[Tensor] | None = None) -> Tensor:
    """Return decoded pixels, -1 to 1, as uint8 with the channels last: [B,H,W,C], video [B,T,H,W,C]; computed in
    float32. Adds sums of the pixels to `sums`, still on their device, for `expect_finite`: a byte cannot be NaN.

    One image, or some frames, at a time: estimates of decoding count no other tensor of the size of a video in float32.
    """
    size_BC = pixels_BC.shape
    levels_BC = torch.empty((size_BC[0], *size_BC[2:], size_BC[1]), dtype=torch.uint8, device=pixels_BC.device)
    for image_C, into in zip(pixels_BC, levels_BC, strict=True):
        pieces = [(image_C, into)]
        if pixels_BC.dim() == 5:
            pieces = list(zip(image_C.split(_FRAMES, dim=1), into.split(_FRAMES), strict=True))
        for some_C, place in pieces:
            if sums is not None:
                sums.append(some_C.sum(dtype=torch.float32))
            place.copy_(some_C.to(torch.float32).add(1).mul_(127.5).clamp_(0, 255).round_().movedim(0, -1))
    return levels_BC


def expect_finite(sums: Sequence[Tensor], vae: ModelPatcher) -> None:
    """Raise CorruptFile unless all sums of what a VAE decoded are finite: they are only if each of its numbers is."""
    if sums and not torch.isfinite(torch.stack(tuple(sums))).all():
        raise CorruptFile(f"VAE {vae.key}: decoded NaN or infinity, expected numbers")


def encoded(
    pixels_BC: Tensor,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    noise: ImageNoise | None = None,
    division: ExecutionMode | None = None,
) -> Tensor:
    """Return the latents of pixels in the diffusion model's scale, float32 on the CPU: the mean of the posterior or,
    with `noise`, a sample of it if the VAE has one (the KL autoencoders of images).

    Raises UnusableField for a size that is not a whole number of latent positions, and Stopped at a tile or layer.
    """
    is_flat = latent.dimensions == 3 and pixels_BC.dim() == 4
    unflat_BC = pixels_BC.unsqueeze(2) if is_flat else pixels_BC
    with vae.running(stop_check(hooks)) as module:
        codec = codec_of(module, latent)

        def encode_call(tile_BC: Tensor) -> Tensor:
            tile_BC = tile_BC.to(vae.device).to(vae.compute_dtype)
            if latent.vae == KL:
                return frame_by_frame(partial(encode_moments, module), tile_BC)
            return codec.encode(tile_BC)

        read_BC = tiled_encode(
            encode_call,
            unflat_BC,
            tiling(division),
            downscales(latent),
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
        )
    if latent.vae == KL:
        read_BC = to_model_scale(latent_of(read_BC, None if noise is None else noise.draw), latent)
    return read_BC.squeeze(2) if is_flat else read_BC


def codec_of(module: object, latent: LatentFacts) -> VaeCodec:
    """Return the codec of a VAE of the kind that `latent` names."""
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
    scaling = LatentFormat(
        latent.channels, latent.dimensions, latent.scaling_factor, means, latent.deviations or (1.0,)
    )
    return VaeCodec(module, facts, scaling)


def downscales(latent: LatentFacts) -> tuple[Downscale, ...]:
    """Return the VAE's downscale of each dimension after the channels."""
    sides = (Downscale(latent.downscale),) * min(2, latent.dimensions)
    return (Downscale(latent.frames_per_cell, first_alone=True), *sides) if latent.dimensions == 3 else sides


def tiling(division: ExecutionMode | None, into: torch.device = HOST) -> Tiling:
    """Return the tiles of `division`, with the result on `into`; without one, a single tile."""
    return Tiling(0 if division is None else division.tile, accumulator=into)


def to_vae_scale(scaled_BCHW: Tensor, latent: LatentFacts) -> Tensor:
    """Convert latents from the diffusion model's scale to the VAE's."""
    samples_BCHW = scaled_BCHW / latent.scaling_factor
    if latent.means:
        samples_BCHW = samples_BCHW * _by_channel(latent.deviations) + _by_channel(latent.means)
    return samples_BCHW + latent.shift if latent.shift else samples_BCHW


def to_model_scale(samples_BCHW: Tensor, latent: LatentFacts) -> Tensor:
    """Convert latents from the VAE's scale to the diffusion model's."""
    samples_BCHW = samples_BCHW - latent.shift
    if latent.means:
        samples_BCHW = (samples_BCHW - _by_channel(latent.means)) / _by_channel(latent.deviations)
    return samples_BCHW * latent.scaling_factor


def _by_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None, None]
