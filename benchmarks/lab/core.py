"""Base class of all cores in this folder: keeps time, sizes and workers, and emits commands.

Knows neither jobs nor places; a subclass decides what follows from an event.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from modelpool.benchmarks.lab.fleet import PeerFleet, PeerWorker
from modelpool.benchmarks.lab.jobs import PeerResults
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, JobId, TaskId
from modelpool.scheduler.model.messages import (
    CancelRequested,
    Command,
    ComponentsKnown,
    Event,
    ResultLost,
    RunEnded,
    StartFailed,
    Submitted,
    Tick,
    WorkerDown,
    WorkersWanted,
    WorkerUp,
)
from modelpool.scheduler.simulator.machines import SimulatedGpu

#: attempts at one run, as many as the scheduler of this pool makes
MOST_ATTEMPTS = 3


class PeerCore(ABC):
    """Workers, results and known sizes; a subclass decides."""

    def __init__(self, gpus: Iterable[SimulatedGpu]) -> None:
        self.at = 0.0
        self.components: dict[ComponentKey, ComponentSpec] = {}
        self._out: list[Command] = []
        self.fleet = PeerFleet(gpus, self._out)
        self._results = PeerResults(self._out)
        self._ended: set[JobId] = set()

    def handle(self, event: Event) -> list[Command]:
        """Apply the event; return the commands, in order."""
        self.at = max(self.at, event.at)
        match event:
            case RunEnded():
                self._run_ended(event)
            case Submitted():
                self._submit(event)
            case CancelRequested():
                self._cancel(event.job_id)
            case ResultLost():
                self._result_lost(event.task_id)
            case ComponentsKnown():
                self.components.update((spec.key, spec) for spec in event.components)
            case WorkersWanted():
                self._unwanted(self.fleet.want(event.worker_ids))
            case WorkerUp():
                up = self.fleet.up(event.worker, self.at)
                if up is not None:
                    self.freed(up)
            case StartFailed() | WorkerDown():
                lost = self.fleet.of(event.worker_id, event.incarnation)
                if lost is not None:
                    self._lose(lost, event.reason)
            case Tick():
                self._looked_again()
        self.dispatch()
        commands = list(self._out)
        self._out.clear()
        return commands

    @abstractmethod
    def dispatch(self) -> None:
        """Begin what can begin, after every event."""

    @abstractmethod
    def freed(self, worker: PeerWorker) -> None:
        """A worker came up, or has ended a job."""

    @abstractmethod
    def _submit(self, event: Submitted) -> None: ...

    @abstractmethod
    def _cancel(self, job_id: JobId) -> None: ...

    @abstractmethod
    def _run_ended(self, event: RunEnded) -> None: ...

    @abstractmethod
    def _result_lost(self, task_id: TaskId) -> None: ...

    @abstractmethod
    def _unwanted(self, workers: Sequence[PeerWorker]) -> None:
        """These workers have ended; others may be wanted now."""

    @abstractmethod
    def _lose(self, worker: PeerWorker, reason: str) -> None:
        """The worker is lost, or did not start."""

    @abstractmethod
    def _looked_again(self) -> None:
        """Time has passed, and nothing else has happened."""
