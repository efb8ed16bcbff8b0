"""`PastJobs`: the latest jobs that have ended. A journal keeps their histories for the time after this controller.

A history travels and is stored as bytes: compressed JSON, which other versions of modelpool may not read.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId, NodeId
from modelpool.scheduler.core.history import JobHistory, history_of, with_node_names
from modelpool.scheduler.core.remembering import memory_of
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.pool_memory import PoolMemory
from modelpool.scheduler.simulator.record.plain_values import plain, read

#: histories of one answer; of a pool with more ends between two questions, the latest
MOST_HISTORIES = 128


@dataclass(frozen=True, slots=True)
class PastJob:
    """The history of a job that has ended, as `packed_history` writes it."""

    job_id: JobId
    history: bytes


@dataclass(frozen=True, slots=True)
class ControllerMemory:
    """What outlives a controller.

    memory       of its core, as `memory_text` writes it
    controllers  of the pool so far, this one included
    past_jobs    that have ended since the last question, oldest first
    ended        number of jobs that had ended by now, for the next question
    """

    memory: str
    controllers: int
    past_jobs: tuple[PastJob, ...]
    ended: int


class PastJobs:
    """The ids of the latest jobs that have ended."""

    def __init__(self) -> None:
        self._latest: deque[JobId] = deque(maxlen=MOST_HISTORIES)
        #: number of jobs that have ended
        self.ended = 0

    def note(self, job_id: JobId) -> None:
        """A job has ended."""
        self._latest.append(job_id)
        self.ended += 1

    def since(self, ended: int) -> tuple[JobId, ...]:
        """Return the jobs that have ended since so many had, at most the `MOST_HISTORIES` latest."""
        new = max(0, self.ended - ended)
        return tuple(self._latest)[-new:] if new else ()

    def packed(self, state: SchedulerState, ended: int, now: float, names: Mapping[NodeId, str]) -> tuple[PastJob, ...]:
        """Return the histories of the jobs that have ended since so many had, with these names of nodes."""
        new = [job_id for job_id in self.since(ended) if job_id in state.demand.ended]
        if not new:
            return ()
        log = state.log.by_subject()
        return tuple(
            PastJob(job_id, packed_history(with_node_names(history_of(state, job_id, now, log), names)))
            for job_id in new
        )


def memory_text(state: SchedulerState, now: float) -> str:
    """Return the memory of a core as JSON."""
    return plain_memory(memory_of(state, now))


def plain_memory(memory: PoolMemory) -> str:
    """Return a memory as JSON."""
    return json.dumps(plain(memory), separators=(",", ":"))


def memory_in_text(text: str) -> PoolMemory:
    """Return what `memory_text` wrote. Raises ValueError if this version of modelpool reads it differently."""
    memory: PoolMemory = read(PoolMemory, json.loads(text), "memory")
    return memory


def packed_history(history: JobHistory) -> bytes:
    """Return a history as bytes, without what its tasks wait for."""
    tasks = tuple(replace(task, wait=None) for task in history.tasks)
    return zlib.compress(json.dumps(plain(replace(history, tasks=tasks)), separators=(",", ":")).encode())


def unpacked_history(content: bytes) -> JobHistory | None:
    """Return what `packed_history` wrote; None if this version of modelpool reads it differently."""
    try:
        history: JobHistory = read(JobHistory, json.loads(zlib.decompress(content)), "history")
    except (UserError, ValueError, zlib.error):
        return None
    return history
