"""The batch size that `batch = "adaptive"` means: chosen when the controller takes a request, by the load.

A request is built with the size that `auto` has (`actors.graph.features.auto_batch`). If that is above 1 and its
sampling can join passes, the load decides between it and 1 (`scheduler.decisions.queue.size_by_load`), from measured
run times, else from the measured gains of batches. The recipe and the job have the number. The same request keeps its
size as long as it is remembered: it is submitted again if its output was lost, or if it was withdrawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from modelpool.actors.control.build_requests import build_requests
from modelpool.actors.control.catalog_service import CatalogQueries
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.control.question_turns import QuestionTurns
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.request.field_table import ADAPTIVE_BATCH
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.batch_gains import PAYS_FROM
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.specs.spec import JobId, Stage, TaskId, TaskSpec
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.queue.size_by_load import SizeByLoad, SizeCosts
from modelpool.scheduler.model.run_kinds import size_class
from modelpool.scheduler.model.workers import Worker

#: requests that keep their size if they come again
MAX_SIZES_KEPT = 4096


@dataclass(frozen=True, slots=True)
class _Chosen:
    size: int
    reason: str


class AdaptiveBatches:
    """Chooses the sizes of requests as they come. One per controller."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._sizes = SizeByLoad()
        self._kept: LruCache[TaskId, _Chosen] = LruCache(MAX_SIZES_KEPT)
        #: whether a request has had this size: until then, nothing is noted
        self._is_used = False

    async def sized(
        self,
        wanted: Sequence[tuple[JobId, GenerateRequest]],
        built: Sequence[BuiltRequest | UserError],
        catalog: CatalogQueries,
        capacity_bytes: int | None,
        turns: QuestionTurns,
        user: str,
        at: float,
    ) -> list[BuiltRequest | UserError]:
        """Return the requests, of which `built` are the first, with the sizes that `batch = "adaptive"` means at this
        time."""
        found = list(built)
        single: dict[int, _Chosen] = {}
        self._is_used = self._is_used or any(request.batch == ADAPTIVE_BATCH for _, request in wanted)
        for place, ((_, request), one) in enumerate(zip(wanted, built, strict=False)):
            if isinstance(one, UserError) or not self._is_used:
                continue
            if request.batch != ADAPTIVE_BATCH or not one.recipe.batch:
                self._sizes.note_other(at, self._worker_seconds(one.graph))
                continue
            chosen = self._chosen(one, at)
            if chosen.size == 1:
                single[place] = chosen
            else:
                found[place] = _with_reason(one, chosen.reason)
        if single:
            asked = [(wanted[place][0], wanted[place][1].model_copy(update={"batch": 1})) for place in single]
            again = await build_requests(catalog, asked, capacity_bytes, turns=turns, user=user)
            for (place, chosen), one in zip(single.items(), again, strict=True):
                found[place] = one if isinstance(one, UserError) else _with_reason(one, chosen.reason)
        return found

    def _chosen(self, built: BuiltRequest, at: float) -> _Chosen:
        wanted = built.graph.job.wanted
        if (kept := self._kept.kept(wanted)) is not None:
            self._kept.put(wanted, kept)  # used now
            return kept
        samplings = [task for task in built.graph.job.tasks if task.stage is Stage.SAMPLE]
        if not self._state.config.joins or not all(task.pass_key for task in samplings):
            chosen = _Chosen(1, "nothing joins its passes, so it would wait for whole ones")
        else:
            kind = (built.recipe.batch, *(task.pass_key for task in samplings))
            workers = max(1, self._state.worker_table.worker_index.count)
            choice = self._sizes.choose(kind, at, workers, self._costs(built.graph, built.recipe.batch))
            chosen = _Chosen(choice.size, choice.reason)
        return self._kept.setdefault(wanted, chosen)

    def _costs(self, graph: JobGraph, rows: int) -> SizeCosts:
        """What a request takes. All rows of a pass stop for the tasks of each that are no samplings; a decode of one
        image is as long as one of `rows`."""
        # the least gain for which a size is chosen, where none was measured
        gain = graph.batch_gain or PAYS_FROM ** (rows.bit_length() - 1)
        single = shared = 0.0
        for task in graph.job.tasks:
            if task.batch_size == 1:
                seconds = self._seconds(task)
                single += seconds
                shared += seconds * rows
                continue
            one = replace(
                task, batch_size=1, activation_bytes=task.activation_bytes // rows, run_seconds=task.run_seconds / rows
            )
            of_one, of_all = self._measured(one), self._measured(task)
            if of_one is None:
                of_one = self._prior(one) if of_all is None else of_all * gain / rows
            if of_all is None:
                of_all = of_one * rows / gain
            single += of_one
            shared += of_all if task.stage is Stage.SAMPLE else of_all * rows
        return SizeCosts(rows, single, shared)

    def _worker_seconds(self, graph: JobGraph) -> float:
        """The time of a worker that a request takes, in full passes."""
        return sum(self._seconds(task) / task.batch_size for task in graph.job.tasks)

    def _seconds(self, task: TaskSpec) -> float:
        measured = self._measured(task)
        return self._prior(task) if measured is None else measured

    def _measured(self, task: TaskSpec) -> float | None:
        """Seconds of a run of this size, as measured on the kind of GPU of a worker that is up; None if none was."""
        worker, kinds = self._worker(), self._state.costs.run_kinds
        if worker is None or worker.spec is None:
            return None
        components = tuple(use.component for use in task.uses)
        ratio = kinds.measured_of_size(task.stage, components, worker.spec.device_name, size_class(task))
        return None if ratio is None else task.run_seconds * ratio

    def _prior(self, task: TaskSpec) -> float:
        """Expected seconds of a run, without measurements of its size."""
        worker, kinds = self._worker(), self._state.costs.run_kinds
        return (
            task.run_seconds if worker is None or worker.spec is None else kinds.unmeasured_seconds(task, worker.spec)
        )

    def _worker(self) -> Worker | None:
        return next((each for each in self._state.worker_table.workers.values() if each.residency is not None), None)


def _with_reason(built: BuiltRequest, reason: str) -> BuiltRequest:
    """Return the same, with why its batch size is what it is."""
    graph = replace(built.graph, job=replace(built.graph.job, batch_reason=reason))
    return BuiltRequest(replace(built.recipe, batch_reason=reason), graph)
