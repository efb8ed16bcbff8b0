"""`JobEnds`: which jobs of a submission have ended, and how; and why no more will."""

from __future__ import annotations

import time
from collections.abc import Sequence

from modelpool.actors.client.monitor import Monitor
from modelpool.actors.outputs.results.end_states import EndStates
from modelpool.actors.outputs.results.job_ledger import EndState, JobLedger
from modelpool.actors.outputs.results.outcomes import JobFailure, Summary, TaskSummary
from modelpool.actors.outputs.results.packed_list import PackedList
from modelpool.pool.values.core.errors import counted


class JobEnds:
    """The ends of the jobs, and the totals of their tasks. Properties without `is_` require the lock of `monitor`."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self.ledger: JobLedger[EndState] = JobLedger(str, EndStates())
        #: why the pool ends no more jobs
        self.lost: Exception | None = None
        #: why the requests could not be taken to their end
        self.stream_problem: Exception | None = None
        self._started_at = self._ended_at = time.monotonic()
        self._without_output: PackedList[JobFailure] = PackedList()
        self._tasks: PackedList[TaskSummary] = PackedList()

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        with self._monitor:
            return self.ledger.over

    @property
    def is_sealed(self) -> bool:
        """Whether no requests will be added."""
        return self.ledger.sealed

    @property
    def unended_count(self) -> int:
        """Number of requests so far with a job that has not ended."""
        with self._monitor:
            return self.ledger.unended

    @property
    def problem(self) -> Exception | None:
        """Why no more jobs will end, although some have not, or why not all requests could be taken; None while they
        do."""
        return self.stream_problem or (None if self.ledger.over else self.lost)

    @property
    def stopped(self) -> bool:
        """Whether every job has ended, or why the others will not is known."""
        return self.ledger.over or self.problem is not None

    @property
    def failures(self) -> tuple[JobFailure, ...]:
        """The jobs that failed so far, without cancelled ones."""
        with self._monitor:
            return tuple(failure for failure in self._without_output if not failure.cancelled)

    def note(self, failure: JobFailure | None, tasks: Sequence[TaskSummary]) -> None:
        """Note the end of a job that is in the ledger, and its tasks; `failure` if it has no output. Requires the
        lock."""
        self._tasks.extend(task for task in tasks if not task.shared)
        self._ended_at = time.monotonic()
        if failure is not None:
            self.note_lost(failure)

    def note_lost(self, failure: JobFailure) -> None:
        """Note that a job has no output, though its end was noted. Requires the lock."""
        self._without_output.append(failure)

    def wait(self, timeout: float | None = None) -> Summary:
        """Wait until every job has ended; results can still be iterated. Raises TimeoutError, PoolLost, or why not all
        requests could be taken.
        """
        with self._monitor:
            if not self._monitor.wait_until(lambda: self.stopped, timeout):
                raise TimeoutError(
                    f"{self.ledger.unended} of {counted(self.ledger.expected, 'job has', 'jobs have')} not ended"
                )
            if self.problem is not None:
                raise self.problem
            return self.summary()

    def summary(self) -> Summary:
        """Return the totals so far."""
        with self._monitor:
            until = self._ended_at if self.ledger.over else time.monotonic()
            return Summary(
                jobs=self.ledger.expected,
                succeeded=self.ledger.count("succeeded"),
                failed=self.ledger.count("failed"),
                cancelled=self.ledger.count("cancelled"),
                seconds=until - self._started_at,
                tasks=self._tasks.so_far(),
            )
