"""What the dispatcher needs of the machinery that runs workers, as a protocol. `actors.ray.ray_fleet` is the real one.

Rules for whoever implements it
1. Every wait ends: with a value, or with an exception of this module, or with another exception that says why.
2. A worker is one incarnation of one id. `end` may come at any time and ends it for good.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from modelpool.actors.wire.messages import ResultRef, RunRequest
from modelpool.actors.worker.host_memory import HostMemory
from modelpool.pool.core.stage_params import Coming
from modelpool.pool.loading.file_parts import FilePart
from modelpool.pool.specs.spec import TaskReport, WorkerId, WorkerSpec

#: an attempt that is sent with others: what is asked, and the results that it reads
Asked: TypeAlias = tuple[RunRequest, Sequence[ResultRef]]


class WorkerLost(Exception):
    """The worker is gone. The message says why."""


class InputsLost(Exception):
    """A run could not begin because an input cannot be read any more."""


@dataclass(frozen=True, slots=True)
class Run:
    """An attempt that was sent.

    report  waits for its end. Raises WorkerLost or InputsLost
    result  what it made; to be looked into only when the report has no error
    """

    report: Awaitable[TaskReport]
    result: ResultRef


@dataclass(frozen=True, slots=True)
class JointRun:
    """Attempts that were sent to be run together: as `Run`, one report and one result for each, in order."""

    reports: Awaitable[Sequence[TaskReport]]
    results: Sequence[ResultRef]


class Fleet(Protocol):
    """Starts, uses and ends workers."""

    async def start(self, worker_id: WorkerId, incarnation: int) -> WorkerSpec:
        """Start a worker and wait until it answers. Raises whatever keeps it from that."""

    async def gone(self, worker_id: WorkerId, incarnation: int) -> str:
        """Wait until a started worker is gone, and say why."""

    def end(self, worker_id: WorkerId, incarnation: int) -> None:
        """End the worker, started or starting, busy or not. Idempotent."""

    def run(self, worker_id: WorkerId, incarnation: int, request: RunRequest, inputs: Sequence[ResultRef]) -> Run:
        """Send an attempt to a started worker."""

    def run_together(self, worker_id: WorkerId, incarnation: int, asked: Sequence[Asked]) -> JointRun:
        """Send attempts that are to be run together to a started worker."""

    def stop(self, worker_id: WorkerId, incarnation: int, run: int) -> None:
        """Ask a run to end at its next step. It may be over already."""

    def read_ahead(self, worker_id: WorkerId, incarnation: int, parts: Sequence[FilePart]) -> None:
        """Have a started worker read these files ahead of their use, in place of what it was to read before. Nobody
        waits for it."""

    def upload_ahead(self, worker_id: WorkerId, incarnation: int, run: int, coming: Coming) -> None:
        """Have a started worker bring these tasks' weights to its GPU beside that run, which may be over already.
        Nobody waits for it."""

    async def memory_reports(self) -> dict[WorkerId, HostMemory]:
        """The host memory of every worker that answers."""


class Clock(Protocol):
    """Time for the dispatcher; tests bring their own."""

    def now(self) -> float:
        """Seconds that never fall."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""
