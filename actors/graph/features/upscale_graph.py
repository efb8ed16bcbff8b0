"""Builds the changes of a decoded output (its upscaling), and the upscaling of first passes and of images of a driver.

Pure functions of values. Every error names a field of a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.graph.common.output_shape import kind_of, output_plural
from modelpool.actors.graph.common.stage_request import UpscaleRequest
from modelpool.actors.graph.common.task_collector import JobGraph, TaskCollector
from modelpool.actors.graph.features.feature import Feature, FindFile, Line, RecipeSource, Section
from modelpool.actors.graph.features.recorded import FILE_NAME
from modelpool.actors.request.field_errors import unsupported_field
from modelpool.actors.request.image_decoding import MAX_SIDE
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.upscale_fields import Upscale
from modelpool.actors.request.workflow_fields import UpscaleNode
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.sampling_facts import SamplingFacts
from modelpool.pool.values.core.stage_params import OutputShape, UpscaleParams, UpscalerRef
from modelpool.pool.values.core.task_inputs import IMAGE
from modelpool.pool.values.specs.spec import JobId, TaskId

if TYPE_CHECKING:
    from modelpool.actors.graph.features.recipe import Recipe

#: pixels of the result of a network, before it is scaled: 2 GiB on the host
MAX_OWN_PIXELS = MAX_SIDE * MAX_SIDE


def check_upscale(request: GenerateRequest, facts: SamplingFacts) -> None:
    """Raise UnusableField for an upscaler of audio, or of layers: no upscaler reads their transparency."""
    if request.upscale is not None and kind_of(facts) in ("audio", "layers"):
        raise unsupported_field("upscale", request.model, f"generates {output_plural(facts)}")


def upscale_params(upscale: Upscale, upscaler: UpscalerRef, shape: OutputShape) -> UpscaleParams:
    """Return the parameters that enlarge an output of `shape`. Raises UnusableField for a result that is too large,
    also a result of the network itself, which the host holds before it is scaled."""
    if upscaler.latent_channels:
        raise unusable_field("upscale.model", f"{upscaler.name!r}, an upscaler of latents", "an upscaler of images")
    scale = upscaler.scale if upscale.scale is None else upscale.scale
    width, height = round(shape.width * scale), round(shape.height * scale)
    if max(width, height) > MAX_SIDE:
        raise unusable_field("upscale.scale", scale, f"a scale that gives sides of up to {MAX_SIDE} pixels")
    check_own_size(upscaler, shape.width, shape.height, "upscale.model")
    tiles = upscale.tile or 0, upscale.overlap or 0
    return UpscaleParams(upscaler, shape.width, shape.height, width, height, shape.frames, *tiles)


def output_nodes(request: GenerateRequest) -> dict[str, UpscaleNode]:
    """Return the nodes that change the decoded output of `request`, by name; the first one reads "image", and each
    other one the node before it."""
    if request.upscale is None:
        return {}
    return {"enlarged": UpscaleNode(kind="upscale", upscale=request.upscale, inputs={"image": "image"})}


def add_output_changes(
    tasks: TaskCollector, request: GenerateRequest, catalog: GraphCatalog, decoded: TaskId, shape: OutputShape
) -> TaskId:
    """Add what changes the output after it is `decoded` with this `shape`; return the task of the output."""
    if request.upscale is None:
        return decoded
    upscaler = catalog.upscalers.find(request.upscale.model)
    return tasks.add(upscale_params(request.upscale, upscaler, shape), {IMAGE: decoded})


def check_own_size(upscaler: UpscalerRef, width: int, height: int, field: str) -> None:
    """Raise UnusableField, naming the `field`, for an upscaler that enlarges an image of this size too much by
    itself."""
    own_width, own_height = width * upscaler.scale, height * upscaler.scale
    if own_width * own_height > MAX_OWN_PIXELS:
        found = f"{upscaler.name!r}, which makes {own_width}x{own_height} pixels"
        raise unusable_field(field, found, f"an upscaler that makes up to {MAX_OWN_PIXELS} pixels of {width}x{height}")


def enlarged_to(upscaler: UpscalerRef, before: tuple[int, int], after: tuple[int, int]) -> UpscaleParams:
    """Return the parameters that enlarge an image from one size to another. Raises UnusableField."""
    if upscaler.latent_channels:
        raise unusable_field("hires.upscaler", f"{upscaler.name!r}, an upscaler of latents", "an upscaler of images")
    check_own_size(upscaler, *before, "hires.upscaler")
    return UpscaleParams(upscaler, *before, *after)


def upscale_job(wanted: UpscaleRequest, job_id: JobId, catalog: GraphCatalog) -> JobGraph:
    """Return the job that enlarges an image of the driver. Raises UserError."""
    shape = OutputShape(wanted.image.width, wanted.image.height)
    work = upscale_params(wanted.upscale, catalog.upscalers.find(wanted.upscale.model), shape)
    tasks = TaskCollector(catalog)
    task = tasks.add(work, {IMAGE: input_image_id(wanted.image)})
    return tasks.job(job_id, task, frozenset(), ())


@dataclass(frozen=True, slots=True)
class RecipeUpscale:
    """The upscaler of the output, as it was used: factor of both sides, edge of tiles and their overlap; 0 for the
    edge and the overlap of the pool."""

    model: str = field(metadata=FILE_NAME)
    sha256: str
    scale: float
    tile: int = 0
    overlap: int = 0


def _recorded(source: RecipeSource) -> dict[str, Any]:
    upscale, params = source.request.upscale, source.graph.works[source.graph.job.wanted]
    if upscale is None or not isinstance(params, UpscaleParams):
        return {}
    model, tiles = params.model, (params.tile, params.overlap)
    scale = float(model.scale if upscale.scale is None else upscale.scale)
    return {"upscale": RecipeUpscale(model.name, model.sha256, scale, *tiles)}


def _restored(recipe: Recipe, find: FindFile) -> dict[str, Any]:
    if (upscale := recipe.upscale) is None:
        return {}
    tiles = {name: value for name in ("tile", "overlap") if (value := getattr(upscale, name))}
    return {"upscale": {"model": upscale.model, "scale": upscale.scale, **tiles}}


def _lines(recipe: Recipe) -> Iterator[Line]:
    if (upscale := recipe.upscale) is not None:
        tiles = f", tiles of {upscale.tile}" if upscale.tile else ""
        yield "upscaler", f"{upscale.model}, scale {upscale.scale:g}{tiles}  (sha256 {upscale.sha256})"


UPSCALE = Feature(check_upscale, recipe=Section(_recorded, _restored, _lines))
