"""Builds the task graph of a request: pure functions of a request and a catalog.

A request with the model's defaults becomes stage parameters, which become tasks; the recipe describes the same
parameters. Equal work gets equal task ids, for all users, so it runs once. A LoRA is part of the work of a stage
only if it changes the stage's weights, so the other stages are shared with jobs that do not use it. Knows neither
workers nor queues.
"""

from __future__ import annotations

from modelpool.actors.graph.all_features import check_request, recipe_of, with_defaults
from modelpool.actors.graph.common.graph_catalog import GraphCatalog
from modelpool.actors.graph.common.stage_request import StageLike, StageRequest, UpscaleRequest
from modelpool.actors.graph.common.task_collector import JobGraph, RunsAlone
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS, BatchTerms, chosen_batch
from modelpool.actors.graph.features.prompt_syntax import prompt_warnings
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.recorded_batches import CHOSEN_BATCHES, NO_BATCHES, BatchKind
from modelpool.actors.graph.features.reference_graph import (
    edit_model_warnings,
)
from modelpool.actors.graph.features.schedule_guidance import sampler_warnings
from modelpool.actors.graph.features.upscale_graph import upscale_job
from modelpool.actors.graph.request_tasks import RequestTasks
from modelpool.actors.graph.workflow_graph import build_workflow
from modelpool.actors.request.field_table import ADAPTIVE_BATCH
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.sampling_facts import ModelDefaults
from modelpool.pool.values.core.stage_params import ModelRef
from modelpool.pool.values.specs.spec import JobId, Stage, TaskId
from modelpool.pool.values.specs.wire_value import evolve


def build_graph(
    request: GenerateRequest,
    job_id: JobId,
    catalog: GraphCatalog,
    terms: BatchTerms = USUAL_TERMS,
) -> tuple[Recipe, JobGraph]:
    """Build the recipe (without versions) and the task graph of `request`. Its seed must be set, and its images must
    be in the pool; fields left out get the model's defaults. `terms` decide about the batch size "auto"; "adaptive" is
    here the larger size that the load may choose (`actors.control.adaptive_batch`). Raises UserError."""
    if request.workflow is not None or request.passes:
        if request.batch in CHOSEN_BATCHES:
            request = request.model_copy(update={"batch": 1})
        return build_workflow(request, job_id, catalog)
    model = catalog.find_model(request.model)
    defaults = catalog.model_defaults(model)
    check_request(request, defaults.sampling)
    request = with_defaults(request, model, defaults)
    if request.batch not in CHOSEN_BATCHES:
        return _built(request, job_id, catalog, model, defaults)
    if request.batch == ADAPTIVE_BATCH:  # each request has a size of its own
        terms = evolve(terms, submission=NO_BATCHES)
    work, sides = catalog.batched_work(model), (request.width or defaults.width, request.height or defaults.height)
    choice = terms.pool.usual(work, *sides, request.frames or 0, terms.submission.expected)

    def built_with(size: int) -> tuple[Recipe, JobGraph]:
        return _built(request.model_copy(update={"batch": size}), job_id, catalog, model, defaults)

    try:
        recipe, graph = built_with(choice.size)
        before, choice = choice, chosen_batch(BatchKind.of(recipe), graph, work, terms)
        if choice.size != before.size:
            recipe, graph = built_with(choice.size)
        reason = choice.reason
    except RunsAlone as alone:
        recipe, graph = built_with(1)
        reason = alone.reason
    graph = evolve(graph, job=evolve(graph.job, batch_reason=reason), batch_gain=choice.gain)
    return evolve(recipe, batch_reason=reason), graph


def _built(
    request: GenerateRequest, job_id: JobId, catalog: GraphCatalog, model: ModelRef, defaults: ModelDefaults
) -> tuple[Recipe, JobGraph]:
    """Build the recipe and the task graph of a request with the defaults of its model, and a batch size."""
    builder = RequestTasks(catalog, StageRequest(Stage.DECODE, request))
    builder.warnings |= dict.fromkeys(edit_model_warnings(request, defaults.sampling, model))
    builder.warnings |= dict.fromkeys(sampler_warnings(request, defaults.sampling))
    if defaults.sampling.reads_text:
        builder.warnings |= dict.fromkeys(prompt_warnings(request))
    graph = builder.build(job_id)
    return recipe_of(request, graph, builder.loras), graph


def build_stage_graph(
    stage: StageLike, job_id: JobId, catalog: GraphCatalog, given: frozenset[TaskId] = frozenset()
) -> JobGraph:
    """Build the task graph of `stage`; tasks in `given` are left out: their results exist. Raises UserError."""
    if isinstance(stage, UpscaleRequest):
        return upscale_job(stage, job_id, catalog)
    return RequestTasks(catalog, stage).build(job_id, given)
