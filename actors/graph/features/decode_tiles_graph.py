"""The tiles of a request's decodes, and the tasks that compute them: parts that idle workers take, and their join.

Whether a decode is tiled is a property of the request, and so of its pixels. The number of parts follows from sizes
alone and changes no pixel: `pool.inference.pixels.decode_parts`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.output_shape import kind_of, output_plural
from modelpool.actors.graph.common.task_collector import TaskCollector, result_values
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import ModelDefaults, SamplingFacts
from modelpool.pool.values.core.stage_params import DecodeParams
from modelpool.pool.values.core.task_inputs import IMAGE, LATENT, MASK, TILES, numbered
from modelpool.pool.values.specs.spec import TaskId

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: tasks of one decode: more wait for each other's results longer than they save on the GPUs of a node
MAX_PARTS = 8
#: pixels of a part, of all its frames: fewer decode in less time than their results take to reach the join
LEAST_PART_PIXELS = 1 << 20
#: float32 numbers of all tiles that object stores hold at once
MAX_TILE_BYTES = 4 << 30


def check_tiles(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for tiles of models that decode no images or no videos."""
    if request.vae_tile is not None and kind_of(facts) == "audio":
        raise unsupported_field("vae_tile", request.model, f"generates {output_plural(facts)}", request.vae_tile)
    if request.vae_frames is not None and kind_of(facts) != "video":
        raise unsupported_field("vae_frames", request.model, f"generates {output_plural(facts)}", request.vae_frames)


def with_tiles(work: DecodeParams, request: GenerateRequest, facts: SamplingFacts) -> DecodeParams:
    """Return `work` with the tiles that `request` asks for. Raises UnusableField as `check_tiles`: a stage of a request
    is built without the checks of a complete one."""
    check_tiles(request, facts)
    if not request.vae_tile and not request.vae_frames:
        return work
    return replace(work, tile=request.vae_tile or 0, tile_frames=request.vae_frames or 0)


def add_decode(
    tasks: TaskCollector, work: DecodeParams, needs: Mapping[str, TaskId], defaults: ModelDefaults
) -> TaskId:
    """Add `work` of a model with these `defaults` as one task, or as parts and their join. Return the task with the
    result."""
    parts = count_parts(work, defaults)
    if parts < 2:
        return tasks.add(work, needs)
    part = replace(work, pastes=False, parts=parts)
    latent = {LATENT: needs[LATENT]}
    found = {numbered(TILES, place): tasks.add(replace(part, part=place + 1), latent) for place in range(parts)}
    pasted = {name: need for name, need in needs.items() if name in (IMAGE, MASK)}
    return tasks.add(replace(work, parts=parts), found | pasted)


def count_parts(work: DecodeParams, defaults: ModelDefaults) -> int:
    """Return the number of tasks that compute the tiles of `work`: at most one for each tile, none with few pixels; 1
    without tiles, and for results that are too large to be sent."""
    if not work.is_tiled:
        return 1
    video, shape = defaults.sampling.video, work.shape
    sides = [(side // defaults.downscale, work.tile // defaults.downscale) for side in (shape.width, shape.height)]
    if shape.frames and video is not None:
        cell = video.frames_per_cell
        sides.append((1 + (shape.frames - 1) // cell, 1 + (work.tile_frames - 1) // cell if work.tile_frames else 0))
    tiles, computed = 1, 1.0
    for size, tile in sides:
        if 0 < tile < size:
            stride = tile - tile // 4
            count = math.ceil((size - tile // 4) / stride)
            tiles, computed = tiles * count, computed * (1 + (count - 1) * (tile // 4) / size)
    pixels = shape.width * shape.height * max(1, shape.frames)
    if 4 * result_values(shape) * computed > MAX_TILE_BYTES:
        return 1
    return max(1, min(MAX_PARTS, tiles, pixels // LEAST_PART_PIXELS))


def _recorded(source: RecipeSource) -> dict[str, Any]:
    return {"vae_tile": source.request.vae_tile or 0, "vae_frames": source.request.vae_frames or 0}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    found = {"vae_tile": recipe.vae_tile, "vae_frames": recipe.vae_frames}
    return {name: value for name, value in found.items() if value}


def _lines(recipe: Recipe) -> Iterator[Line]:
    tiles = [f"{recipe.vae_tile} pixels"] if recipe.vae_tile else []
    tiles += [f"{recipe.vae_frames} frames"] if recipe.vae_frames else []
    if tiles:
        yield "tiles of the VAE", " and ".join(tiles)


DECODE_TILES = Feature(check_tiles, recipe=Section(_recorded, _restored, _lines))
