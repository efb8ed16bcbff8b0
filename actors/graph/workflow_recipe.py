"""The recipe of the output of a workflow: its nodes with the defaults of their models, the files that they use, and its
images; and the workflow that a recipe has. Pure, but for looking up input files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.feature import FindFile, find_input
from modelpool.actors.graph.features.recipe import IMAGE_FORMAT, Recipe
from modelpool.actors.graph.features.workflow_part import RecipeWorkflow
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.request.workflow_fields import OperationNode, SampleNode, Workflow
from modelpool.pool.values.core.stage_params import (
    EncodeParams,
    GligenRef,
    OperationParams,
    OutputShape,
    SampleParams,
    StageParams,
    UpscaleParams,
)

#: keys of an image, and of a video, in the pool, as JSON; and of those that another node computes
_INPUT_IMAGE, _TASK_IMAGE = frozenset(("sha256", "width", "height", "file")), frozenset(("task", "width", "height"))
_INPUT_AUDIO = frozenset(("sha256", "seconds", "rate", "channels", "file"))
_GIVEN = (_INPUT_IMAGE, _INPUT_IMAGE | {"frames"}, _INPUT_AUDIO)
_OF_TASKS = (_TASK_IMAGE, _TASK_IMAGE | {"frames"})


def workflow_recipe(
    request: GenerateRequest,
    workflow: Workflow,
    resolved: Mapping[str, GenerateRequest],
    graph: JobGraph,
    shape: OutputShape,
    file: tuple[str, int],
    versions: Mapping[str, str] = MappingProxyType({}),
) -> Recipe:
    """Return the recipe of an output of `shape`. `resolved` are the requests of sampling nodes with the defaults of
    their models, `file` is the format and the quality, `versions` are of the nodes of users, by name."""
    images: dict[str, str] = {}
    nodes: dict[str, Any] = {}
    for node_id, node in workflow.in_order:
        fields = node.model_dump(mode="json", exclude_unset=True, exclude={"request"})
        if isinstance(node, SampleNode):
            # models that read a whole image run all steps, and accept no strength
            unset = {name for name in ("seed", "strength") if getattr(node.request, name) is None}
            outer = {"quality", "format"} | unset
            fields["request"] = resolved[node_id].model_dump(mode="json", exclude_unset=True, exclude=outer)
        if isinstance(node, OperationNode) and node.name in versions:
            fields["version"] = versions[node.name]
        nodes[node_id] = _without_images(fields, images)
    sampled = [work for work in graph.works.values() if isinstance(work, SampleParams)]
    last = sampled[-1] if sampled else None
    files = tuple(sorted({each for work in graph.works.values() for each in _files(work)}))
    name = request.model if last is None else last.model.name
    sha256 = next((sha256 for _, found, sha256 in files if found == name), "")
    file_format, quality = file
    return Recipe(
        model=name,
        model_sha256=sha256,
        prompt=request.prompt,
        negative=request.negative,
        loras=(),
        steps=0 if last is None else last.schedule.steps,
        cfg=0.0 if last is None else last.guidance.distilled or last.guidance.cfg,
        sampler="" if last is None else last.schedule.sampler,
        schedule="" if last is None else last.schedule.noise_schedule,
        width=shape.width,
        height=shape.height,
        seed=request.seed or 0,
        warnings=graph.warnings,
        frames=shape.frames,
        frame_rate=shape.frame_rate,
        seconds=shape.seconds,
        format="" if file_format == IMAGE_FORMAT else file_format,
        quality=quality,
        workflow=RecipeWorkflow(nodes, workflow.output, files, images),
    )


def request_of_workflow(recipe: Recipe, find: FindFile) -> GenerateRequest:
    """Return the request that leads to the recipe of a workflow. Raises InputMissing for an image that is not there."""
    recorded = recipe.workflow
    assert recorded is not None, "the recipe of a workflow"
    nodes = {name: _with_images(node, recorded.images, find) for name, node in recorded.nodes.items()}
    fields: dict[str, Any] = {"format": recipe.format or None, "quality": recipe.quality or None}
    return GenerateRequest(workflow={"nodes": nodes, "output": recorded.output}, seed=recipe.seed, **fields)


def _files(work: StageParams) -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the name and the hash of each file that a task reads."""
    if isinstance(work, OperationParams):
        return
    kind = "upscaler" if isinstance(work, UpscaleParams) else "model"
    yield kind, work.model.name, work.model.sha256
    if isinstance(work, UpscaleParams) and work.vae is not None:
        yield "model", work.vae.name, work.vae.sha256
    if isinstance(work, EncodeParams | SampleParams):
        yield from (("model" if lora.merge else "lora", lora.name, lora.sha256) for lora in work.loras)
    if isinstance(work, EncodeParams):
        yield from (("embedding", each.name, each.sha256) for each in work.embeddings)
    if isinstance(work, SampleParams):
        yield from (("controlnet", each.name, each.sha256) for each in work.controls)
        yield from (("image_prompt", each.name, each.sha256) for each in work.image_prompts)
        yield from (("gligen", each.name, each.sha256) for each in work.all_of(GligenRef))


def _without_images(value: Any, images: dict[str, str]) -> Any:
    """Return a value of JSON with images as their hashes, with their file names in `images`; images that other nodes
    compute are left out: the inputs of the node name them."""
    match value:
        case dict() if value.keys() in _GIVEN:
            images[value["sha256"]] = value["file"]
            return {"sha256": value["sha256"]}
        case dict():
            return {
                name: _without_images(each, images)
                for name, each in value.items()
                if not (isinstance(each, dict) and each.keys() in _OF_TASKS)
            }
        case list():
            kept = (each for each in value if not (isinstance(each, dict) and each.keys() in _OF_TASKS))
            return tuple(_without_images(each, images) for each in kept)  # as it is read from JSON
    return value


def _with_images(value: Any, files: Mapping[str, str], find: FindFile) -> Any:
    match value:
        case {"sha256": str(sha256)} if len(value) == 1:
            return find_input("workflow", files.get(sha256, ""), find)
        case Mapping():
            return {name: _with_images(each, files, find) for name, each in value.items()}
        case list() | tuple():
            return [_with_images(each, files, find) for each in value]
    return value
