"""VAEs called whole, by batches and by tiles; nothing is set on the module, which its clones share.

Knows how diffusers' autoencoders are called and what their attributes say of sizes; knows neither memory nor stages.

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

from modelpool.pool.core.errors import unusable_field
from modelpool.pool.pixels.spans import Downscale, even_tile
from modelpool.pool.pixels.tiled import HOST, TileCall, run_tiled

#: a tile shares one part in so many of its edge with the next one. Source: ComfyUI's for decoding
OVERLAP_SHARE = 4
#: limits of a posterior's logarithmic variance. Source: diffusers, `DiagonalGaussianDistribution`
LEAST_LOGVAR, MOST_LOGVAR = -30.0, 20.0


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a VAE is run by tiles.

    tile         edge of a tile in latent cells: one number for all dimensions but the time of a video, which stays
                 whole, or one for each dimension, where 0 stays whole
    overlap      what neighbours share, in latent cells, likewise; None is a quarter of the tile
    accumulator  where the result is added up, in float32
    """

    tile: int | Sequence[int]
    overlap: int | Sequence[int] | None = None
    accumulator: torch.device = HOST

    def edges(self, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tile and overlap for each dimension of a latent of these sizes: tiles of nearly equal size, none larger than
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
            raise unusable_field("tile", tuple(edge), f"a number, or {dimensions} of them")
        return list(edge)


def tiled_decode(
    decode_call: TileCall,
    latent_BC: Tensor,
    tiling: Tiling,
    downscales: Sequence[Downscale],
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
) -> Tensor:
    """`decode_call(latent_BC)` by tiles: pixels in float32 on the accumulator's device. See `run_tiled`.

    One pass. ComfyUI averages three, of differently shaped tiles. Measured with the shapes example's VAE at 256x256, as
    root mean square against the untiled result in levels of 255, tiles of 16 cells: one pass 5.3; three 4.4, for three
    times the cells computed; one with twice the overlap 4.7, for 1.3 times. Tiles of 8 cells: one pass 13.1, three
    13.8. One pass shows no edges at either size; what differs is colour within a shape.
    """
    tile, overlap = tiling.edges(latent_BC.shape[2:])
    scales = [downscale.decoding for downscale in downscales]
    return run_tiled(decode_call, latent_BC, tile, overlap, scales, tiling.accumulator, before_tile, on_tile)


def tiled_encode(
    encode_call: TileCall,
    pixels_BC: Tensor,
    tiling: Tiling,
    downscales: Sequence[Downscale],
    before_tile: Callable[[], None] | None = None,
    on_tile: Callable[[int, int], None] | None = None,
) -> Tensor:
    """`encode_call(pixels_BC)` by tiles: latents, or their moments, in float32 on the accumulator's device.

    `tiling` is in latent cells here too. Raises UnusableField for sizes that are no whole number of latent cells.
    """
    sizes = pixels_BC.shape[2:]
    check_pixels(sizes, downscales)
    cells = [downscale.encoding.length(size) for size, downscale in zip(sizes, downscales, strict=True)]
    tile, overlap = tiling.edges(cells)
    # a tile that covers all is as long as the input, which may be one frame and some whole cells
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
    """Raise UnusableField unless `sizes` are whole numbers of latent cells."""
    for size, downscale in zip(sizes, downscales, strict=True):
        if size < 1 or downscale.pixels(downscale.encoding.length(size)) != size:
            more = " and one" if downscale.first_alone else ""
            raise unusable_field("size of the pixels", tuple(sizes), f"multiples of {downscale.factor}{more}")


def decode_latent(vae: nn.Module, latent_BC: Tensor) -> Tensor:
    """Pixels of a latent in the VAE's own scale, by one plain call. What it cached is dropped when it fails."""
    with _no_leftovers(vae):
        pixels_BC: Tensor = vae.decode(latent_BC, return_dict=False)[0]  # type: ignore[operator]
    return pixels_BC


def encode_moments(vae: nn.Module, pixels_BC: Tensor) -> Tensor:
    """What the encoder says of the latent of `pixels_BC`, by one plain call: mean and logarithmic variance, one after
    the other along the channels, or the latent alone of a VAE without a posterior. Tiles of these may be blended;
    `latent_of` draws from them."""
    with _no_leftovers(vae):
        posterior: Any = vae.encode(pixels_BC, return_dict=False)[0]  # type: ignore[operator]
    if isinstance(posterior, Tensor):
        return posterior
    moments_BC: Tensor = posterior.parameters
    return moments_BC


def frame_by_frame(call: Callable[[Tensor], Tensor], x_BC: Tensor) -> Tensor:
    """`call(x_BC)` of a VAE of images; a video, [B, C, T, H, W], goes through it one frame after the other."""
    if x_BC.dim() == 4:
        return call(x_BC)
    return torch.stack([call(frame_BCHW) for frame_BCHW in x_BC.unbind(2)], dim=2)


def latent_of(moments_BC: Tensor, draw: Callable[[tuple[int, ...]], Tensor] | None = None) -> Tensor:
    """The latent that a Gaussian posterior's moments stand for: its mean, or a sample with the unit noise that
    `draw` gives for the latent's shape."""
    mean_BC, logvar_BC = moments_BC.chunk(2, dim=1)
    if draw is None:
        return mean_BC
    deviation_BC = torch.exp(0.5 * logvar_BC.clamp(LEAST_LOGVAR, MOST_LOGVAR))
    return mean_BC + deviation_BC * draw(tuple(mean_BC.shape)).to(mean_BC)


def downscales_of(vae: nn.Module, dimensions: int) -> tuple[Downscale, ...]:
    """How `vae` divides each of its `dimensions` (1, 2 or 3), from its attributes and configuration.

    Raises UnusableField for a VAE that does not say.
    """
    plain: Any = vae  # diffusers is not typed
    config = dict(plain.config)
    if dimensions == 1:
        factor = getattr(plain, "hop_length", None)
        return (_known(factor, vae),)
    space = config.get("spatial_compression_ratio") or getattr(plain, "spatial_compression_ratio", None)
    if space is None:
        blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels")
        space = None if blocks is None else 2 ** (len(blocks) - 1)
    elif "scale_factor_spatial" in config:
        # Wan's attribute leaves its patches out
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
        raise unusable_field("VAE", type(vae).__name__, "one whose configuration says how it divides sizes")
    return Downscale(int(factor))


@contextmanager
def _no_leftovers(vae: nn.Module) -> Iterator[None]:
    """Video VAEs that go over time by chunks keep the ends of chunks on themselves; a call that is stopped midway would
    leave them there, on the device, until the next one."""
    try:
        yield
    except BaseException:
        clear_cache = getattr(vae, "clear_cache", None)
        if clear_cache is not None:
            clear_cache()
        raise
