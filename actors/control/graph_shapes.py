"""`GraphShapes`: task graphs of requests that differ only in their seed, built once.

A batch mostly asks for many seeds of few requests. Everything else of their graphs is equal: names, files, sizes,
estimates and checks. A graph is derived from an earlier one if each seed in it is that of its request. A two-stage
model derives another seed from it; its graphs are built for each request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from modelpool.actors.graph.recipe import Recipe
from modelpool.actors.graph.task_collector import JobGraph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.core.lru_cache import LruCache
from modelpool.pool.core.stage_params import EncodeImageParams, SampleParams, StageParams, task_id
from modelpool.pool.specs.spec import JobId, TaskId, TaskSpec

#: a request without its seed, and the fields that are set: those left out get the defaults of the model
_Shape: TypeAlias = tuple[GenerateRequest, frozenset[str]]
#: shapes of one submission that are kept
MOST_SHAPES = 64


@dataclass(frozen=True, slots=True)
class BuiltRequest:
    """The recipe and the task graph of a request."""

    recipe: Recipe
    graph: JobGraph


class GraphShapes:
    """Builds the graphs of requests. Valid as long as each name means the same file."""

    def __init__(self, build: Callable[[GenerateRequest, JobId], BuiltRequest]) -> None:
        """`build` builds one graph from nothing; its errors are passed on."""
        self._build = build
        self._known: LruCache[_Shape, BuiltRequest] = LruCache(MOST_SHAPES)

    def build(self, request: GenerateRequest, job_id: JobId) -> BuiltRequest:
        """Return the recipe and the graph of a request, whose seed must be set."""
        assert request.seed is not None, "a request without a seed"
        shape = _shape_of(request)
        known = None if shape is None else self._known.kept(shape)
        if known is not None:
            return with_seed(known, request.seed, job_id)
        built = self._build(request, job_id)
        if shape is not None and has_one_seed(built):
            self._known.put(shape, built)
        return built


def _shape_of(request: GenerateRequest) -> _Shape | None:
    """Return everything of a request but its seed; None if it holds a value that cannot be a key."""
    shape = (request.model_copy(update={"seed": 0}), frozenset(request.model_fields_set))
    try:
        hash(shape)
    except TypeError:
        return None
    return shape


def has_one_seed(built: BuiltRequest) -> bool:
    """Return whether every seed of the graph is that of the request, or none. The encoding of an image has the seed 0
    if it draws nothing; a sampling always draws."""
    seed = built.recipe.seed
    seeds = (_seed_of(work) for work in built.graph.works.values() if not isinstance(work, SampleParams))
    sampled = (work.seed for work in built.graph.works.values() if isinstance(work, SampleParams))
    return seed != 0 and all(each in (0, seed) for each in seeds) and all(each == seed for each in sampled)


def with_seed(built: BuiltRequest, seed: int, job_id: JobId) -> BuiltRequest:
    """Return what the request of `built`, which has one seed, would be with another seed."""
    graph, before = built.graph, built.recipe.seed
    works: dict[TaskId, StageParams] = {}
    tasks: list[TaskSpec] = []
    ids: dict[TaskId, TaskId] = {}
    for task in graph.job.tasks:
        work = graph.works[task.task_id]
        needs = tuple([ids.get(need, need) for need in task.needs])
        if isinstance(work, (SampleParams, EncodeImageParams)) and work.seed == before:
            work = replace(work, seed=seed)
        elif needs == task.needs:
            works[task.task_id] = work
            tasks.append(task)
            continue
        new = ids[task.task_id] = task_id(work, dict(zip(task.input_names, needs, strict=True)))
        works[new] = work
        tasks.append(replace(task, task_id=new, needs=needs))
    job = replace(graph.job, job_id=job_id, tasks=tuple(tasks), wanted=ids.get(graph.job.wanted, graph.job.wanted))
    return BuiltRequest(replace(built.recipe, seed=seed), replace(graph, job=job, works=works))


def _seed_of(work: StageParams) -> int:
    return work.seed if isinstance(work, (SampleParams, EncodeImageParams)) else 0
