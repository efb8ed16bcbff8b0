"""Tiles of a decode that a request asks for: their geometry, some of them as the part of a task, and the join of parts.

The join blends with the function of `run_tiled`, so that parts on any number of workers give the bytes of one run. It
needs neither VAE nor device: each part states the grid of the tiles.

Shape legend: B batch, C channels, then the dimensions of `pool.inference.pixels.latent_pixels`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from modelpool.pool.families.detection.vaes import TILED_IN_TIME
from modelpool.pool.inference.pixels.latent_pixels import (
    KL,
    as_bytes,
    decode_by,
    downscales,
    expect_finite,
    flat,
    is_without_time,
    read_by_vae,
    sampled_shape,
)
from modelpool.pool.inference.pixels.spans import Downscale
from modelpool.pool.inference.pixels.tiled import blend_tiles, count_tiles, run_some_tiles
from modelpool.pool.inference.pixels.tiled_vae import OVERLAP_SHARE, Tiling
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.results import TileGrid
from modelpool.pool.values.core.stage_params import AudioSamples, DecodedTiles, DecodeParams, RunHooks
from modelpool.pool.values.core.stopping import stop_if_asked
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


def requested_tiling(work: DecodeParams, latent: LatentFacts) -> Tiling | None:
    """Return the tiles that `work` asks for, in cells of `latent`; None if it asks for none.

    Neighbours overlap by a quarter of a tile, and by at least one latent frame in time, since the first one of a tile
    is a single frame; not at all in time if the VAE decodes frame by frame. Raises UnusableField for tiles in time of a
    VAE that needs all frames."""
    if not work.is_tiled:
        return None
    if work.tile_frames and latent.vae not in TILED_IN_TIME:
        raise unusable_field("vae_frames", work.tile_frames, f"no such tiles: a VAE of kind {latent.vae!r} decodes all")
    edge = max(1, work.tile * latent.cells // latent.downscale) if work.tile else 0
    tile, overlap = [edge] * min(2, latent.dimensions), [edge // OVERLAP_SHARE] * min(2, latent.dimensions)
    if latent.dimensions == 3:
        apart = latent.vae == KL and latent.frames_per_cell == 1
        frames = 1 + (work.tile_frames - 1) // latent.frames_per_cell if work.tile_frames else 0
        frames = frames if apart or not frames else max(2, frames)
        tile.insert(0, frames)
        overlap.insert(0, 0 if apart or not frames else max(1, frames // OVERLAP_SHARE))
    return Tiling(tile, overlap)


def largest_tile(work: DecodeParams, latent: LatentFacts) -> tuple[int, ...]:
    """Return the shape of the latent that one call of the VAE decodes, as `sampled_shape`: of a tile, if `work` asks
    for tiles. Raises UnusableField as `requested_tiling`."""
    shape, tiling = sampled_shape(work, latent), requested_tiling(work, latent)
    if tiling is None:
        return shape
    channels, *cells = shape
    edges, _ = tiling.edges(_dimensions(cells, latent))
    return (channels, *map(min, edges[-len(cells) :], cells))


def cells_computed(work: DecodeParams, latent: LatentFacts) -> int:
    """Return the latent cells of all tiles together: cells of overlaps count as often as they are computed."""
    _, *cells = sampled_shape(work, latent)
    tiling, computed = requested_tiling(work, latent) or Tiling(0), 1
    sizes = _dimensions(cells, latent)
    for size, edge, overlap in zip(sizes, *tiling.edges(sizes), strict=True):
        count = count_tiles((size,), (edge,), (overlap,), (1,))
        computed *= size + (count - 1) * overlap
    return computed


def decoded_part(
    scaled_BC: Tensor,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None,
    work: DecodeParams,
    sound: AudioSamples | None = None,
) -> DecodedTiles:
    """Compute the tiles of one latent that are the part of `work`; none if there are fewer tiles than parts. The
    output drops the leading latent frames of `work`. As `decoded` otherwise."""
    tiling = requested_tiling(work, latent)
    assert tiling is not None, f"{work} has no tiles"
    read_BC, scales = read_by_vae(scaled_BC, latent), [downscale.decoding for downscale in downscales(latent)]
    sizes = tuple(read_BC.shape[2:])
    tile, overlap = tiling.edges(sizes)
    count = count_tiles(sizes, tile, overlap, scales)
    places = range(count * (work.part - 1) // work.parts, count * work.part // work.parts)
    with decode_by(vae, latent, hooks, division) as call:
        stop = partial(stop_if_asked, hooks.should_stop)
        tiles_BC = run_some_tiles(call, read_BC, tile, overlap, scales, places, stop, hooks.on_step)
    expect_finite([tile_BC.sum(dtype=torch.float32) for tile_BC in tiles_BC], vae)
    grid = TileGrid(
        sizes,
        tuple(tile),
        tuple(overlap),
        tuple((one.factor, one.first_alone) for one in downscales(latent)),
        is_without_time(scaled_BC, latent),
        work.shape.leading * latent.frames_per_cell,
        work.shape.frame_rate,
    )
    bits = any(tile_BC.dtype is torch.bfloat16 for tile_BC in tiles_BC)
    arrays = tuple((tile_BC[0].view(torch.int16) if bits else tile_BC[0]).numpy() for tile_BC in tiles_BC)
    return DecodedTiles(arrays, places.start, grid, bits, sound)


def joined_bytes(parts: Sequence[DecodedTiles]) -> Tensor:
    """Return the bytes of the result of which `parts` are all tiles, on the host: [H,W,C], of a video [T,H,W,C].
    Raises UnusableField if tiles are missing, or are of another grid."""
    grid, ordered = parts[0].grid, sorted(parts, key=lambda part: part.first)
    scales = [Downscale(*factor).decoding for factor in grid.factors]
    count = count_tiles(grid.sizes, grid.tile, grid.overlap, scales)
    places = [place for part in ordered for place in range(part.first, part.first + len(part.tiles_C))]
    if places != list(range(count)) or any(part.grid != grid for part in parts):
        found = f"places {places} of {counted(len({part.grid for part in parts}), 'grid')}"
        raise unusable_field("tiles", found, f"each place below {count} of one grid, once")
    return blend_tiles(
        _tensors(ordered),
        grid.sizes,
        grid.tile,
        grid.overlap,
        scales,
        finish=lambda pixels_BC: as_bytes(flat(pixels_BC, grid.is_flat)),
    )[0]


def _tensors(parts: Sequence[DecodedTiles]) -> Iterator[Tensor]:
    for part in parts:
        for tile_C in part.tiles_C:
            # results of other processes are read-only, of which torch warns; nothing writes to them
            own = tile_C if tile_C.flags.writeable else np.array(tile_C)
            tile_BC = torch.from_numpy(own)[None]
            yield tile_BC.view(torch.bfloat16) if part.is_bfloat16 else tile_BC


def _dimensions(cells: Sequence[int], latent: LatentFacts) -> tuple[int, ...]:
    """Return the sizes that the VAE reads: an image of a VAE of videos has one latent frame."""
    return (1,) * (latent.dimensions - len(cells)) + tuple(cells)
