"""`ParkedJobs`: queued jobs far from their turn, packed to a few hundred bytes each; the core does not know them yet.

The jobs of one user and one priority are a flow: of two of them, the one that was submitted first goes first. So those
behind `WINDOW` others of their flow do not change which task is next, and wait here. Knows neither the core nor
drivers.

Limit: equal tasks are shared by jobs that are in the core at the same time. A parked job computes what an equal one in
the core, or one that has ended meanwhile, has computed already.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.worker.wire.messages import ClientId, ResultRef, StateSaved, SubmissionId, job_id_for
from modelpool.actors.worker.wire.packing import packed, unpacked
from modelpool.pool.values.specs.spec import JobId, Stage, TaskId, UserId

#: jobs of a flow in the core: enough for 256 GPUs to have their next 16, and for jobs with equal weights to be grouped
WINDOW = 4096
#: jobs that are packed together: what they have in common takes most of their bytes
JOBS_IN_PACK = 16
#: compresses fast; higher levels save a few percent
_ZLIB_LEVEL = 1

#: combinations of tasks by stage that are kept once; a pool has a few of each kind of model
MOST_STAGES = 1024
#: number of tasks by stage
StageCounts: TypeAlias = tuple[tuple[Stage, int], ...]
#: user and priority of jobs that go in the order of their submission
Flow: TypeAlias = tuple[UserId, int]


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """An unresolved job: its driver, the inputs that the driver supplied, and states of earlier runs of its tasks.

    preview  the kind of previews that its request names; "" if it names none
    """

    client_id: ClientId
    submission_id: SubmissionId
    index: int
    graph: JobGraph
    recipe: Recipe | None
    given: Mapping[TaskId, ResultRef]
    found: tuple[tuple[StateSaved, ResultRef], ...] = ()
    preview: str = ""

    @property
    def flow(self) -> Flow:
        """See `Flow`."""
        return self.graph.job.user, self.graph.job.priority


class JobPack:
    """Consecutive jobs of one submission and one flow. Equal only to itself."""

    __slots__ = (
        "_content",
        "_jobs",
        "_refs",
        "client_id",
        "flow",
        "indexes",
        "is_bound",
        "parked_at",
        "stages",
        "submission_id",
    )

    def __init__(self, jobs: Sequence[QueuedJob]) -> None:
        first = jobs[0]
        self.client_id, self.submission_id, self.flow = first.client_id, first.submission_id, first.flow
        self.indexes = tuple(job.index for job in jobs)
        #: equal tasks of several jobs count for each
        self.stages: StageCounts = tuple(Counter(task.stage for job in jobs for task in job.graph.job.tasks).items())
        #: whether the core must know them at once, because of a deadline
        self.is_bound = any(job.graph.job.deadline is not None for job in jobs)
        #: when they were submitted, on the core's clock; None if they were not parked
        self.parked_at: float | None = None
        self._jobs: tuple[QueuedJob, ...] = tuple(jobs)
        self._content = b""
        #: references, which cannot be packed
        self._refs: tuple[tuple[Mapping[TaskId, ResultRef], tuple[tuple[StateSaved, ResultRef], ...]], ...] = ()

    def __len__(self) -> int:
        return len(self.indexes)

    def pack(self) -> None:
        """Pack the jobs. Idempotent."""
        if self._content:
            return
        if any(job.given or job.found for job in self._jobs):
            self._refs = tuple((job.given, job.found) for job in self._jobs)
        parts = [
            (job.graph.job, dict(job.graph.works), job.graph.components, dict(job.graph.fingerprints), job.recipe)
            + ((job.preview, dict(job.graph.nodes)) if job.preview or job.graph.nodes else ())
            for job in self._jobs
        ]
        self._content, self._jobs = zlib.compress(packed(parts), _ZLIB_LEVEL), ()

    def jobs(self) -> tuple[QueuedJob, ...]:
        """Return the jobs; unpacks them."""
        if not self._content:
            return self._jobs
        jobs = tuple(
            QueuedJob(
                self.client_id,
                self.submission_id,
                index,
                JobGraph(job, works, components, fingerprints=fingerprints, nodes=more[1] if more else {}),
                recipe,
                {},
                preview=more[0] if more else "",
            )
            for index, (job, works, components, fingerprints, recipe, *more) in zip(
                self.indexes, unpacked(zlib.decompress(self._content)), strict=True
            )
        )
        if not self._refs:
            return jobs
        return tuple(
            replace(job, given=given, found=found) for job, (given, found) in zip(jobs, self._refs, strict=True)
        )

    def job_ids(self) -> Iterator[JobId]:
        """Yield the ids of the jobs."""
        return (job_id_for(self.submission_id, index) for index in self.indexes)


@dataclass(slots=True)
class _FlowState:
    """The jobs of a flow: how many are in the core, and the packs behind them, in order."""

    in_core: int = 0
    packs: dict[JobPack, None] = field(default_factory=dict)


class ParkedJobs:
    """The parked jobs of all drivers."""

    def __init__(self, window: int | None = WINDOW) -> None:
        """`window` is the number of jobs of a flow in the core; None parks nothing."""
        self._window = window
        self._flows: dict[Flow, _FlowState] = {}
        #: equal tasks by stage, kept once
        self._stages: dict[StageCounts, StageCounts] = {}

    def __len__(self) -> int:
        return sum(len(pack) for pack in self._packs())

    def must_pack(self, held: int) -> bool:
        """Return whether jobs of a submission that already holds so many should be packed at once."""
        return self._window is not None and held > self._window

    def may_enter(self, pack: JobPack) -> bool:
        """Return whether jobs may enter the core now: there is room, and no earlier ones of their flow wait here."""
        flow = self._flows.get(pack.flow)
        if flow is None or self._window is None or pack.is_bound:
            return True
        return not flow.packs and self._has_room(flow, pack)

    def park(self, pack: JobPack, at: float) -> None:
        """Add jobs at the end of their flow, at this time on the core's clock."""
        pack.pack()
        pack.parked_at = at
        if len(self._stages) < MOST_STAGES:
            pack.stages = self._stages.setdefault(pack.stages, pack.stages)
        self._flows.setdefault(pack.flow, _FlowState()).packs[pack] = None

    def entered(self, flow: Flow) -> None:
        """Note that a job entered the core."""
        self._flows.setdefault(flow, _FlowState()).in_core += 1

    def left(self, flow: Flow) -> bool:
        """Note that a job left the core; return whether others may follow it."""
        found = self._flows[flow]
        found.in_core -= 1
        self._drop_empty(flow)
        return self._has_turn(found)

    def take_next(self) -> JobPack | None:
        """Remove and return jobs near their turn; None if there are none."""
        for key, flow in self._flows.items():
            if self._has_turn(flow):
                pack = next(iter(flow.packs))
                del flow.packs[pack]
                self._drop_empty(key)
                return pack
        return None

    def remove(self, packs: Iterable[JobPack]) -> None:
        """Remove parked jobs."""
        for pack in packs:
            del self._flows[pack.flow].packs[pack]
            self._drop_empty(pack.flow)

    def take_all(self) -> list[JobPack]:
        """Remove and return everything."""
        packs = list(self._packs())
        self.remove(packs)
        return packs

    def waiting(self) -> dict[UserId, Counter[Stage]]:
        """Return the number of parked tasks by user and stage."""
        found: dict[UserId, Counter[Stage]] = {}
        for pack in self._packs():
            by_stage = found.setdefault(pack.flow[0], Counter())
            for stage, count in pack.stages:
                by_stage[stage] += count
        return found

    def jobs_by_id(self) -> dict[JobId, JobPack]:
        """Return the pack of each parked job."""
        return {job_id: pack for pack in self._packs() for job_id in pack.job_ids()}

    def place_of(self, job_id: JobId, pack: JobPack) -> int:
        """Return how many unresolved jobs of its flow were submitted before a parked job."""
        flow = self._flows[pack.flow]
        before = flow.in_core
        for other in flow.packs:
            if other is pack:
                break
            before += len(other)
        return before + list(pack.job_ids()).index(job_id)

    def _packs(self) -> Iterator[JobPack]:
        return (pack for flow in self._flows.values() for pack in flow.packs)

    def _has_turn(self, flow: _FlowState) -> bool:
        return bool(flow.packs) and self._has_room(flow, next(iter(flow.packs)))

    def _has_room(self, flow: _FlowState, pack: JobPack) -> bool:
        return self._window is None or not flow.in_core or flow.in_core + len(pack) <= self._window

    def _drop_empty(self, key: Flow) -> None:
        flow = self._flows[key]
        if not flow.in_core and not flow.packs:
            del self._flows[key]


def packs_of(jobs: Iterable[QueuedJob]) -> Iterator[JobPack]:
    """Yield consecutive jobs of a submission in packs. Those with a deadline are in packs of their own."""
    for _, same in groupby(jobs, key=lambda job: (job.flow, job.graph.job.deadline is None)):
        left = list(same)
        for first in range(0, len(left), JOBS_IN_PACK):
            yield JobPack(left[first : first + JOBS_IN_PACK])
