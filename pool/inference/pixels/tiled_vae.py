"""Calls VAEs completely, frame by frame and by tiles, without setting anything on the module, which clones share.

Knows how diffusers' autoencoders are called and their size attributes; knows neither memory nor stages.

Shape legend: B batch, C channels, then one (audio), two (images: H W) or three (video: T H W) dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.inference.pixels.spans import Downscale, even_tile
from modelpool.pool.inference.pixels.tiled import HOST, TileCall, run_tiled
from modelpool.pool.values.core.errors import unusable_field

#: neighbouring tiles overlap by this fraction (1 / n) of their edge. Source: ComfyUI's for decoding
OVERLAP_SHARE = 4
#: limits of the log-variance of a posterior. Source: diffusers, `DiagonalGaussianDistribution`
MIN_LOGVAR, MAX_LOGVAR = -30.0, 20.0


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tiles of a VAE run.

    tile         edge of a tile in latent positions: one number for all dimensions except the time of a video, which is
                 not tiled, or one for each dimension, where 0 is not tiled
    overlap      overlap of neighbours, in latent positions, likewise; None is a quarter of the tile
    accumulator  device of the result, which is summed in float32
    """

    tile: int | Sequence[int]
    overlap: int | Sequence[int] | None = None
    accumulator: torch.device = HOST

    def edges(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return tile and overlap for each dimension of a latent of these sizes: tiles of nearly equal size, at most
        `tile`."""
        tiles = self._each(self.tile, len(sizes))
        tiles = [tile or size for tile, size in zip(tiles, sizes, strict=True)]
        if self.overlap is None:
            overlaps = [tile // OVERLAP_SHARE for tile in tiles]
        else:
            overlaps = self._each(self.overlap, len(sizes))
        overlaps = [0 if size <= tile else o for size, tile, o in zip(sizes, tiles, overlaps, strict=True)]
        return [even_tile(*numbers) for numbers in zip(sizes, tiles, overlaps, strict=True)], overlaps

    @staticmethod
    def _each(edge: int | Sequence[int], dimensions: int) -> list[int]:
        if isinstance(edge, int):
            return [0 if dimensions == 3 and place == 0 else edge for place in range(dimensions)]
        if len(edge) != dimensions:
            raise unusable_field("tile", tuple(edge), f"one number, or {dimensions} numbers")
        return list(edge)


def tiled_decode(
    decode_call: TileCall,
    latent_BC: Tensor,
    tiling: Tiling,
    downscales: Sequence[Downscale],
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute `decode_call(latent_BC)` by tiles: pixels in float32, or what `finish` makes of them, on the device of
    the accumulator. See `run_tiled`.

    One pass. ComfyUI averages three, of differently shaped tiles. Measured with the VAE of the shapes example at
    256x256, as root mean square error against the untiled result in levels of 255, tiles of 16 latent positions: one
    pass 5.3; three 4.4, for three times the compute; one with twice the overlap 4.7, for 1.3 times. Tiles of 8: one
    pass 13.1, three 13.8. One pass has no visible edges at either size; the error is in the colours within a shape.
    """
    tile, overlap = tiling.edges(latent_BC.shape[2:])
    scales = [downscale.decoding for downscale in downscales]
    return run_tiled(decode_call, latent_BC, tile, overlap, scales, tiling.accumulator, before_tile, on_tile, finish)


def tiled_encode(
    encode_call: TileCall,
    pixels_BC: Tensor,
    tiling: Tiling,
    downscales: Sequence[Downscale],
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Compute `encode_call(pixels_BC)` by tiles: latents, or their moments, in float32 on the accumulator's device.

    `tiling` is in latent positions here too. Raises UnusableField for sizes that are not a whole number of them.
    """
    sizes = pixels_BC.shape[2:]
    check_pixels(sizes, downscales)
    cells = [downscale.encoding.length(size) for size, downscale in zip(sizes, downscales, strict=True)]
    tile, overlap = tiling.edges(cells)
    # a single tile has the length of the input, which may be one frame plus whole latent frames
    pixel_tile = [
        size if edge >= cell else downscale.factor * edge
        for size, edge, cell, downscale in zip(sizes, tile, cells, downscales, strict=True)
    ]
    pixel_overlap = [downscale.factor * o for o, downscale in zip(overlap, downscales, strict=True)]
    scales = [downscale.encoding for downscale in downscales]
    return run_tiled(
        encode_call, pixels_BC, pixel_tile, pixel_overlap, scales, tiling.accumulator, before_tile, on_tile
    )


def check_pixels(sizes: Sequence[int], downscales: Sequence[Downscale]) -> None:
    """Raise UnusableField unless `sizes` are whole numbers of latent positions."""
    for size, downscale in zip(sizes, downscales, strict=True):
        if size < 1 or downscale.pixels(downscale.encoding.length(size)) != size:
            more = " plus one" if downscale.first_alone else ""
            raise unusable_field("size of the pixels", tuple(sizes), f"multiples of {downscale.factor}{more}")


def decode_latent(vae: nn.Module, latent_BC: Tensor) -> Tensor:
    """Decode a latent in the VAE's scale by one plain call. The module's cache is cleared if it fails."""
    with _clears_cache(vae):
        pixels_BC: Tensor = vae.decode(latent_BC, return_dict=False)[0]  # type: ignore[operator]
    return pixels_BC


def encode_moments(vae: nn.Module, pixels_BC: Tensor) -> Tensor:
    """Encode `pixels_BC` by one plain call: mean and log-variance of the latent, concatenated along the channels, or
    the latent itself of a VAE without a posterior. Tiles of these may be blended; `latent_of` samples from them."""
    with _clears_cache(vae):
        posterior: Any = vae.encode(pixels_BC, return_dict=False)[0]  # type: ignore[operator]
    if isinstance(posterior, Tensor):
        return posterior
    moments_BC: Tensor = posterior.parameters
    return moments_BC


def frame_by_frame(call: Callable[[Tensor], Tensor], x_BC: Tensor) -> Tensor:
    """Compute `call(x_BC)` of an image VAE; a video, [B, C, T, H, W], is processed frame by frame."""
    if x_BC.dim() == 4:
        return call(x_BC)
    return torch.stack([call(frame_BCHW) for frame_BCHW in x_BC.unbind(2)], dim=2)


def latent_of(moments_BC: Tensor, draw: Callable[[tuple[int, ...]], Tensor] | None = None) -> Tensor:
    """Return the latent of a Gaussian posterior's moments: its mean, or a sample with the unit noise that `draw`
    returns for the latent's shape."""
    mean_BC, logvar_BC = moments_BC.chunk(2, dim=1)
    if draw is None:
        return mean_BC
    deviation_BC = torch.exp(0.5 * logvar_BC.clamp(MIN_LOGVAR, MAX_LOGVAR))
    return mean_BC + deviation_BC * draw(tuple(mean_BC.shape)).to(mean_BC)


def downscales_of(vae: nn.Module, dimensions: int) -> tuple[Downscale, ...]:
    """Return the downscale of each of the `dimensions` (1, 2 or 3) of `vae`, from its attributes and configuration.

    Raises UnusableField for a VAE that does not define it.
    """
    plain: Any = vae  # diffusers is not typed
    config = dict(plain.config)
    if dimensions == 1:
        factor = getattr(plain, "hop_length", None) or getattr(plain, "downsampling_ratio", None)
        return (_known(factor, vae),)
    space = config.get("spatial_compression_ratio") or getattr(plain, "spatial_compression_ratio", None)
    if space is None:
        blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels")
        space = None if blocks is None else 2 ** (len(blocks) - 1)
    elif "scale_factor_spatial" in config:
        # Wan's attribute does not include its patches
        space *= config.get("patch_size") or 1
    height = _known(space, vae)
    if dimensions == 2:
        return (height, height)
    time = config.get("temporal_compression_ratio") or config.get("scale_factor_temporal")
    time = time or getattr(plain, "temporal_compression_ratio", None)
    if time is None and "temperal_downsample" in config:
        time = 2 ** sum(config["temperal_downsample"])
    return (dataclasses.replace(_known(time, vae), first_alone=True), height, height)


def _known(factor: int | None, vae: nn.Module) -> Downscale:
    if factor is None:
        raise unusable_field("VAE", type(vae).__name__, "a VAE whose configuration defines its downscale factors")
    return Downscale(int(factor))


@contextmanager
def _clears_cache(vae: nn.Module) -> Iterator[None]:
    """Clear the cache of a video VAE after an error: it keeps the ends of time chunks on the module, which a stopped
    call would leave on the device until the next one."""
    try:
        yield
    except BaseException:
        clear_cache = getattr(vae, "clear_cache", None)
        if clear_cache is not None:
            clear_cache()
        raise
