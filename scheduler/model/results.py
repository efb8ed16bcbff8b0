"""Decides which results the shell holds, and when they are released. Knows ids and sizes; the bytes are elsewhere.

A result is held while a task that has to run reads it, a live job provided it, or a job waits for the hashes of the
files that it was made with. After that an encode result is kept, and any result of a
workflow, for later jobs, in LRU order within two limits; any other is released. `sweep` decides, once per event.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import NO_NODE, JobId, NodeId, TaskId, WorkerId
from modelpool.scheduler.model.file_verdicts import NO_ORIGINS, Origins


@dataclass(slots=True)
class Result:
    """A result that the shell holds. Every run creates one."""

    result_bytes: int = 0
    #: worth keeping for later jobs
    shareable: bool = False
    #: live jobs that provided it
    providers: dict[JobId, None] = field(init=False, default_factory=dict)
    #: the machine that computed it, and with which it would be lost; "" if unknown, or copied elsewhere
    node: NodeId = NO_NODE
    #: states of the files with unknown hashes that it was made with
    origins: Origins = NO_ORIGINS
    #: jobs that want it, and end when they are known
    awaited_by: dict[JobId, None] = field(init=False, default_factory=dict)


class Results:
    """The results that the shell holds. Attributes are for reading; the methods write."""

    def __init__(self, kept_limit: int, kept_bytes_limit: int) -> None:
        self._kept_limit = kept_limit
        self._kept_bytes_limit = kept_bytes_limit
        #: what the shell holds
        self.held: dict[TaskId, Result] = {}
        #: result (held or not) -> existing tasks that read it
        self.readers: dict[TaskId, dict[TaskId, None]] = {}
        #: held, neither read nor provided: least recently used first
        self.kept: OrderedDict[TaskId, None] = OrderedDict()
        self.kept_bytes = 0
        #: results to check at the next sweep: readers, providers or waiting jobs changed
        self._touched: dict[TaskId, None] = {}
        #: held by the shell, unknown to the core
        self._strays: list[TaskId] = []

    def add(
        self,
        task_id: TaskId,
        result_bytes: int,
        shareable: bool,
        node: NodeId = NO_NODE,
        origins: Origins = NO_ORIGINS,
    ) -> None:
        """The shell holds the result of a run on `node`."""
        result = self.held.get(task_id)
        if result is None:
            self.held[task_id] = Result(result_bytes, shareable, node, origins)
        else:
            self._unkeep(task_id)
            result.result_bytes, result.shareable, result.node = result_bytes, shareable, node
            result.origins = origins
        self._touched[task_id] = None

    def add_provided(self, task_id: TaskId, provider: JobId) -> None:
        """The shell holds a result that a driver provided with a job."""
        self.held.setdefault(task_id, Result()).providers[provider] = None
        self._touched[task_id] = None

    def stray(self, task_id: TaskId) -> None:
        """The shell received a result that is no longer requested: release it unless an equal one is held."""
        if task_id not in self.held:
            self._strays.append(task_id)

    def provider_failed(self, task_id: TaskId, provider: JobId) -> None:
        """The job that provided it has ended."""
        if result := self.held.get(task_id):
            result.providers.pop(provider, None)
            self._touched[task_id] = None

    def lost(self, task_id: TaskId) -> Result | None:
        """The result no longer exists. Returns it; None if it was not held."""
        self._unkeep(task_id)
        return self.held.pop(task_id, None)

    def await_verdict(self, task_id: TaskId, job_id: JobId) -> None:
        """A job ends when the files are known with which its result was made."""
        self.held[task_id].awaited_by[job_id] = None
        self._touched[task_id] = None

    def waiter_ended(self, task_id: TaskId, job_id: JobId) -> None:
        """A job that may have waited for a result has ended."""
        if result := self.held.get(task_id):
            result.awaited_by.pop(job_id, None)
            self._touched[task_id] = None

    def made_with(self, origins: Origins) -> list[TaskId]:
        """Return the results that were made with one of these states of files."""
        return [task_id for task_id, result in self.held.items() if not origins.isdisjoint(result.origins)]

    def origins_from(self, worker_id: WorkerId, incarnation: int) -> Origins:
        """Return the origins of results that this worker has used."""
        found = (origin for result in self.held.values() for origin in result.origins)
        return frozenset([origin for origin in found if origin[0] == worker_id and origin[1] == incarnation])

    def origins_of(self, task_ids: Iterable[TaskId]) -> Origins:
        """Return the origins of these results."""
        found = NO_ORIGINS
        for task_id in task_ids:
            result = self.held.get(task_id)
            if result is not None and result.origins:
                found = found | result.origins
        return found

    def add_reader(self, task_id: TaskId, needs: tuple[TaskId, ...]) -> None:
        """A task exists that reads `needs`."""
        for need in needs:
            self.readers.setdefault(need, {})[task_id] = None
            self._touched[need] = None

    def drop_reader(self, task_id: TaskId, needs: tuple[TaskId, ...]) -> None:
        """The task no longer exists."""
        for need in needs:
            readers = self.readers.get(need, {})
            readers.pop(task_id, None)
            if not readers:
                self.readers.pop(need, None)
            self._touched[need] = None

    def sweep(self) -> list[TaskId]:
        """Check every result with changed readers, providers or waiting jobs; return ids to release, in order."""
        if not self._touched and not self._strays:
            return []
        released, self._strays = self._strays, []
        for task_id in self._touched:
            result = self.held.get(task_id)
            if result is None:
                continue
            if task_id in self.readers or result.providers or result.awaited_by:
                if task_id in self.kept:
                    self._unkeep(task_id)
            elif result.shareable and result.result_bytes <= self._kept_bytes_limit:
                self._unkeep(task_id)
                self.kept[task_id] = None
                self.kept_bytes += result.result_bytes
            else:
                del self.held[task_id]
                released.append(task_id)
        self._touched.clear()
        while len(self.kept) > self._kept_limit or self.kept_bytes > self._kept_bytes_limit:
            oldest = next(iter(self.kept))
            self._unkeep(oldest)
            del self.held[oldest]
            released.append(oldest)
        return released

    def _unkeep(self, task_id: TaskId) -> None:
        if task_id in self.kept:
            del self.kept[task_id]
            self.kept_bytes -= self.held[task_id].result_bytes
