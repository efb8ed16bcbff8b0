"""Protocols for the machinery that runs workers and for time; `actors.ray.ray_fleet` implements the fleet.

Rules for implementations
1. Every wait ends: with a value, with an exception of this module, or with another exception that has the reason.
2. A worker is one incarnation of one id. `end` may be called at any time and ends it permanently.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from modelpool.actors.control.losses import Loss
from modelpool.actors.worker.process_memory import ProcessMemory
from modelpool.actors.worker.wire.messages import (
    CallId,
    EndsWanted,
    LoadReport,
    LoadRequest,
    ResultRef,
    RunRequest,
    StartedWorker,
)
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.previews import PreviewWish
from modelpool.pool.values.core.stage_params import PreloadRequest, Result
from modelpool.pool.values.specs.spec import TaskId, TaskReport, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.model.messages import LossCause

#: a run to send with others: the request, and references to its inputs
RunCall: TypeAlias = tuple[RunRequest, Sequence[ResultRef]]


class WorkerLost(Exception):
    """The worker is gone. The message has the reason."""

    def __init__(self, reason: str, cause: LossCause = LossCause.CRASH) -> None:
        super().__init__(reason)
        self.cause = cause


class InputsLost(Exception):
    """A run could not start because an input is no longer available."""


@dataclass(frozen=True, slots=True)
class SentRuns:
    """Runs that were sent in one call.

    reports  waits for the ends of all, in order; None for one that was revoked before it started. Of a pass, the end
             of it: `WorkerFleet.ends` has the ends of its runs. Raises WorkerLost or InputsLost: then none has a report
    results  their outputs, or their states; read after `reports`: one is valid if its report has no error, or a state
    """

    reports: Awaitable[Sequence[TaskReport | None]]
    results: Sequence[ResultRef]


class WorkerFleet(Protocol):
    """Starts, uses and ends workers."""

    async def take_over(self) -> int:
        """Find the workers that earlier controllers of the pool left, and have them serve this one only; `start` uses
        them. Those that do not answer, or were started for another configuration, are ended. Returns their number.
        Called once, before any other method.
        """

    async def start(self, worker_id: WorkerId, incarnation: int, group: str = "") -> StartedWorker:
        """Start a worker on a node of `group` ("" is any), or continue with one that was taken over, and wait until it
        answers. Raises whatever prevents it: WorkerLost if it ended, or if no node came up in time.
        """

    async def gone(self, worker_id: WorkerId, incarnation: int) -> Loss:
        """Wait until a started worker is gone, and return why."""

    def ping(self, worker_id: WorkerId, incarnation: int) -> Awaitable[bool] | None:
        """Ask the worker to answer; whoever awaits it gets whether `grow` would give it more memory, or an exception if
        the worker is gone. None if it has no process yet, or is unknown.
        """

    async def grow(self, worker_id: WorkerId, incarnation: int) -> Residency:
        """Let a started worker take memory that other processes have given back, after what it was sent before. Return
        the weights on its GPU, with the new capacity. Raises WorkerLost."""

    async def why_silent(self, worker_id: WorkerId, incarnation: int, silent_seconds: float) -> Loss:
        """Find out why a worker has not answered for `silent_seconds`, within seconds. It will be ended: its process is
        killed then even if it takes no messages.
        """

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        """End the worker, started or starting, busy or idle. Idempotent."""

    def run(self, worker_id: WorkerId, incarnation: int, call: CallId, runs: Sequence[RunCall]) -> SentRuns:
        """Send one or several runs to a started worker in one call. It begins them after the runs that it was sent
        before: one after the other, and each can be revoked until it begins; as one batch, if possible; or as a
        pass."""

    def join(self, worker_id: WorkerId, incarnation: int, call: CallId, run: RunCall) -> Awaitable[bool]:
        """Let a run join a pass at its next step; False if that is over. Raises InputsLost and WorkerLost."""

    def ends(self, worker_id: WorkerId, incarnation: int, wanted: EndsWanted) -> SentRuns:
        """Ask a worker for runs of a call that are over while others still run: there may be fewer reports than
        results. None of them if all were told and none follows; without waiting, also if none is over."""

    async def revoke(self, worker_id: WorkerId, incarnation: int, run: int) -> bool:
        """Take back a run that has not begun. False if it has, or if the worker is gone; never raises."""

    def stop(self, worker_id: WorkerId, incarnation: int, run: int, keep_state: bool = False) -> None:
        """Stop a run at its next step, with its state as its result if `keep_state`. It may be over already."""

    def want_previews(self, worker_id: WorkerId, incarnation: int, run: int, wish: PreviewWish | None) -> None:
        """Let a started worker make previews of a run, which may be over already, as `wish` says from now on. Nobody
        waits for it.
        """

    async def gang_address(self, worker_id: WorkerId, incarnation: int) -> str:
        """Return the address at which the members of a gang meet that a started worker leads. Raises WorkerLost."""

    def prefetch(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        """Let a started worker prefetch these files, in place of earlier ones. Nobody waits for it."""

    def preload(self, worker_id: WorkerId, incarnation: int, run: int, preload_request: PreloadRequest) -> None:
        """Let a started worker preload the weights of these tasks during that run, which may be over already. Nobody
        waits for it.
        """

    def forget_checkpoints(self, worker_id: WorkerId, incarnation: int, task_id: TaskId) -> None:
        """Let a started worker, which may be gone, remove the checkpoints of a task. Nobody waits for it."""

    async def load(self, worker_id: WorkerId, incarnation: int, request: LoadRequest) -> LoadReport:
        """Let a started worker load weights, after what it was sent before, and wait for the end. `stop` ends it.
        Raises WorkerLost."""

    def drop_weights(self, worker_id: WorkerId, incarnation: int) -> None:
        """Let a started worker, which may be gone, take all weights off its GPU after what it was sent before. Nobody
        waits for it."""

    async def copy_result(self, ref: ResultRef) -> ResultRef:
        """Copy a result to the machine of the caller; return the reference of the copy. Raises InputsLost."""

    async def read_result(self, ref: ResultRef) -> Result:
        """Return a result itself. Raises InputsLost."""

    async def hold(self, result: Result) -> ResultRef:
        """Store a result on the machine of the caller; return its reference."""

    async def memory_reports(self) -> dict[WorkerId, ProcessMemory]:
        """Return the host memory of every worker that answers."""

    async def close(self) -> None:
        """End what was taken over and never used, and wait until all ends that were requested are under way."""


class Clock(Protocol):
    """Time for the dispatcher; tests substitute their own."""

    def now(self) -> float:
        """Return seconds that never decrease."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""
