"""The run of one task or a batch on a simulated worker, and how its seconds and bytes are divided among the tasks.

While several tasks run together each has an equal share of every second. When one of them leaves, the others take over
its share of later seconds, and its bytes. A run that is cut short has loaded as many of its weights as the elapsed
seconds of loading allow. Knows neither hosts nor events.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, RunCost, TaskReport
from modelpool.pool.weights.plan.eviction_plan import Move, Residency, ResidencyPlan
from modelpool.scheduler.model.messages import BatchMate, GangMember


@dataclass(frozen=True, slots=True)
class RunSpan:
    """When one task runs, and which steps.

    began_at           it was started, or joined
    loaded_at, run_seconds  its steps begin, and take
    first_step, steps  steps done before, and all of them; 0 for stages without steps
    """

    began_at: float
    loaded_at: float
    run_seconds: float
    first_step: int = 0
    steps: int = 0

    @property
    def ends_at(self) -> float:
        """Time at which it is done, unless it hangs."""
        return self.loaded_at + self.run_seconds

    def next_step(self, at: float) -> tuple[int, float]:
        """Return the first step that ends at `at` or later, counted over all steps, and its end."""
        step_seconds = self.run_seconds / (self.steps - self.first_step)
        # the end of a step is a sum of floats: a time within a millionth of a step of it is at it
        step = max(1, ceil((at - self.loaded_at) / step_seconds - 1e-6)) if step_seconds else 1
        return self.first_step + step, max(at, self.loaded_at + step * step_seconds)


@dataclass(slots=True)
class BatchRun:
    """A task on a simulated worker, alone or in a batch.

    report   its report if it ends by itself
    cost     its share of the transfers; seconds are divided as they pass
    cold     bytes of weights that were not there before, with any patches
    number   identifies its event on the heap; a newer number replaces it
    span     when it runs, and its steps
    leaving  it was stopped
    pausing  it was asked to stop with its state
    """

    member: BatchMate
    report: TaskReport
    cost: RunCost
    adapters_loaded: tuple[ComponentKey, ...]
    cold: tuple[Move, ...]
    number: int
    span: RunSpan
    leaving: bool = False
    pausing: bool = False
    load_seconds: float = 0.0
    run_seconds: float = 0.0


@dataclass(slots=True)
class RunningBatch:
    """Tasks that began together on one worker, the first task of the command first, or that joined them.

    load_seconds, run_seconds  of the complete batch
    rows          of each forward pass that others may join; 0 if none may
    step_seconds  of such a pass
    gang, rank    the members with which the worker shares the run, itself included, and its place
    """

    began_at: float
    load_seconds: float
    run_seconds: float
    moves: ResidencyPlan
    runs: dict[BatchMate, BatchRun] = field(default_factory=dict)
    rows: int = 0
    step_seconds: float = 0.0
    gang: tuple[GangMember, ...] = ()
    rank: int = 0
    _shared_load_seconds: float = 0.0
    _shared_run_seconds: float = 0.0

    @property
    def ends_at(self) -> float:
        """Time at which it is done, unless it hangs."""
        return self.began_at + self.load_seconds + self.run_seconds

    @property
    def loaded_at(self) -> float:
        """Time at which all weights are loaded."""
        return self.began_at + self.load_seconds

    def join(self, at: float, run_seconds: float, first_step: int, steps: int) -> RunSpan:
        """A task joins, at the next step of the pass; return when it runs."""
        self.share(at)
        done = ceil((at - self.loaded_at) / self.step_seconds - 1e-6) if self.step_seconds else 0
        joins_at = max(at, self.loaded_at + max(0, done) * self.step_seconds)
        span = RunSpan(at, joins_at, run_seconds, first_step, steps)
        self.run_seconds = max(self.run_seconds, span.ends_at - self.loaded_at)
        return span

    def share(self, at: float) -> None:
        """Give every remaining task its share of the seconds until now."""
        passed_seconds = at - self.began_at
        loaded_seconds = min(passed_seconds, self.load_seconds)
        ran_seconds = self.run_seconds if at == self.ends_at else passed_seconds - loaded_seconds
        for run in self.runs.values():
            run.load_seconds += (loaded_seconds - self._shared_load_seconds) / len(self.runs)
            run.run_seconds += (ran_seconds - self._shared_run_seconds) / len(self.runs)
        self._shared_load_seconds, self._shared_run_seconds = loaded_seconds, ran_seconds

    def hand_over(self, run: BatchRun, other: BatchRun) -> None:
        """Move the bytes of a task that leaves to another one: the batch continues with them."""
        other.cost = replace(
            other.cost,
            uploaded_bytes=other.cost.uploaded_bytes + run.cost.uploaded_bytes,
            streamed_bytes=other.cost.streamed_bytes + run.cost.streamed_bytes,
            storage_bytes=other.cost.storage_bytes + run.cost.storage_bytes,
            patch_switches=other.cost.patch_switches + run.cost.patch_switches,
        )
        other.adapters_loaded += run.adapters_loaded
        other.cold += run.cold
        run.cost = replace(run.cost, uploaded_bytes=0, streamed_bytes=0, storage_bytes=0, patch_switches=0)
        run.adapters_loaded = run.cold = ()

    def cut(self, at: float, runs: Iterable[BatchRun], unread: Mapping[ComponentKey, int]) -> None:
        """End the rest of the batch now: the transfers of these runs are what was reached by then. `unread` are the
        bytes of files that storage does not read any more."""
        load_part, run_part = self.load_part(at), self._run_part(at)
        unread_bytes = sum(unread.values())
        for run in runs:
            cost = run.cost
            left_bytes = max(0, cost.storage_bytes - unread_bytes)
            unread_bytes -= cost.storage_bytes - left_bytes
            run.cost = replace(
                cost,
                uploaded_bytes=int(cost.uploaded_bytes * load_part),
                streamed_bytes=int(cost.streamed_bytes * run_part),
                storage_bytes=left_bytes,
                patch_switches=cost.patch_switches if load_part == 1.0 else 0,
            )
            run.adapters_loaded = tuple(key for key in run.adapters_loaded if key not in unread)
            run.cold = tuple(Move(move.component, int(move.bytes * load_part)) for move in run.cold)

    def load_part(self, at: float) -> float:
        """The part of the loading that is done."""
        passed_seconds = at - self.began_at
        return 1.0 if passed_seconds >= self.load_seconds else passed_seconds / self.load_seconds

    def _run_part(self, at: float) -> float:
        passed_seconds = max(0.0, at - self.loaded_at)
        return 1.0 if passed_seconds >= self.run_seconds else passed_seconds / self.run_seconds


def half_loaded(moves: ResidencyPlan, part: float, specs: Mapping[ComponentKey, ComponentSpec]) -> Residency:
    """The residency when this part of the loading is done: evictions are complete, and of the arriving bytes the first
    have arrived, one component after the other."""
    arrived_bytes = int(moves.upload_bytes * part)
    away: dict[ComponentKey, int] = {}
    for move in moves.upload:
        missing_bytes = max(0, move.bytes - arrived_bytes)
        arrived_bytes = max(0, arrived_bytes - move.bytes)
        spec = specs[move.component]
        away[move.component] = -(-missing_bytes * spec.weight_bytes // spec.upload_bytes)
    entries = (
        replace(entry, resident_bytes=max(0, entry.resident_bytes - away.get(entry.component, 0)))
        for entry in moves.after.entries
    )
    return replace(moves.after, entries=tuple(entry for entry in entries if entry.resident_bytes))
