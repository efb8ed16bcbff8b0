"""Task graphs of requests that differ only in their seed, built once.

A batch mostly asks for many seeds of few requests. Everything else of their graphs is equal: names, files, sizes,
estimates and checks. A graph is derived from an earlier one if each seed in it is its request's. A two-stage
model derives another seed from it; its graphs are built for each request.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import SampleParams, StageParams, TaskIdTemplate, seed_of, with_seed
from modelpool.pool.values.specs.spec import JobId, TaskId, TaskSpec
from modelpool.pool.values.specs.wire_value import WireValue, evolve

#: a request without its seed, and the fields that are set: those left out get the defaults of the model
_Shape: TypeAlias = tuple[GenerateRequest, frozenset[str]]


@dataclass(frozen=True, slots=True)
class BuiltRequest(WireValue):
    """The recipe and the task graph of a request."""

    recipe: Recipe
    graph: JobGraph


class GraphShapes:
    """The shapes of the requests of one call, and a graph of each. Valid as long as each name means the same file."""

    def __init__(self) -> None:
        self._numbers: dict[_Shape, int] = {}
        #: shapes of requests with a graph that is not derived: they were refused, or have another seed
        self._apart: set[int] = set()
        self._built: dict[int, BuiltRequest] = {}
        #: of built shapes from which a graph was derived
        self._task_ids: dict[int, Mapping[TaskId, TaskIdTemplate]] = {}

    def number(self, request: GenerateRequest) -> int | None:
        """Return a number for the shape of a request; None if it holds a value that cannot be compared."""
        shape = (request.model_copy(update={"seed": 0}), frozenset(request.model_fields_set))
        try:
            return self._numbers.setdefault(shape, len(self._numbers))
        except TypeError:
            return None

    def note(self, shape: int | None, built: BuiltRequest | UserError) -> None:
        """Derive later graphs of this shape from `built`, if that is possible."""
        if shape is None or shape in self._built:
            return
        if isinstance(built, BuiltRequest) and has_one_seed(built):
            self._built[shape] = built
        else:
            self._apart.add(shape)

    def derived(self, shape: int | None, request: GenerateRequest, job_id: JobId) -> BuiltRequest | None:
        """Return the recipe and the graph of a request with a seed; None if it must be built."""
        assert request.seed is not None, "a request without a seed"
        if shape is None or (known := self._built.get(shape)) is None:
            return None
        if (task_ids := self._task_ids.get(shape)) is None:
            works = known.graph.works
            task_ids = self._task_ids[shape] = {task: TaskIdTemplate.of(work) for task, work in works.items()}
        return _with_seed(known, task_ids, request.seed, job_id)

    def to_build(self, shapes: Sequence[int | None], first: int, most: int, done: Container[int]) -> list[int]:
        """Return the indexes of up to `most` requests that must be built, from the index `first` on, without those that
        are `done`: of each shape, one is enough if the others may be derived from it."""
        found: list[int] = []
        begun: set[int] = set()
        for index in range(first, len(shapes)):
            shape = shapes[index]
            if index in done or shape in begun or shape in self._built:
                continue
            if shape is not None and shape not in self._apart:
                begun.add(shape)
            found.append(index)
            if len(found) == most:
                break
        return found


def has_one_seed(built: BuiltRequest) -> bool:
    """Return whether every seed of the graph is the request's, or none: encoding has the seed 0 if it draws
    nothing; a sampling always draws."""
    seed = built.recipe.seed
    seeds = (seed_of(work) for work in built.graph.works.values() if not isinstance(work, SampleParams))
    sampled = (work.seed for work in built.graph.works.values() if isinstance(work, SampleParams))
    return seed != 0 and all(each in (0, seed) for each in seeds) and all(each == seed for each in sampled)


def _with_seed(
    built: BuiltRequest, task_ids: Mapping[TaskId, TaskIdTemplate], seed: int, job_id: JobId
) -> BuiltRequest:
    """Return what the request of `built`, which has one seed, would be with another seed."""
    graph, before = built.graph, built.recipe.seed
    works: dict[TaskId, StageParams] = {}
    tasks: list[TaskSpec] = []
    ids: dict[TaskId, TaskId] = {}
    for task in graph.job.tasks:
        work = graph.works[task.task_id]
        needs = tuple([ids.get(need, need) for need in task.needs])
        if seed_of(work) == before:
            work = with_seed(work, seed)
        elif needs == task.needs:
            works[task.task_id] = work
            tasks.append(task)
            continue
        inputs = dict(zip(task.input_names, needs, strict=True))
        new = ids[task.task_id] = task_ids[task.task_id].task_id(seed_of(work), inputs)
        works[new] = work
        tasks.append(evolve(task, task_id=new, needs=needs))
    job = evolve(graph.job, job_id=job_id, tasks=tuple(tasks), wanted=ids.get(graph.job.wanted, graph.job.wanted))
    nodes = {ids.get(task_id, task_id): names for task_id, names in graph.nodes.items()} if graph.nodes else graph.nodes
    same = graph.components, graph.warnings, graph.fingerprints
    new_graph = JobGraph(job, works, *same, nodes=nodes, batch_gain=graph.batch_gain)
    return BuiltRequest(evolve(built.recipe, seed=seed), new_graph)
