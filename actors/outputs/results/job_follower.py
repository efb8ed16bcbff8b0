"""`JobFollower`: where each job of a submission is, from its request to its end. Pure: no I/O, clock or locks.

A shell around it talks to the pool, has outputs written, and asks it what an event means. The drivers of attached jobs,
the job service and the HTTP server are such shells; the ends are in a `JobLedger`, or in a journal on disk.

    submitted -> sent -> arrived -> ended
                  ^ '-------+-- withdrawn, or its output lost: to be sent again
                  '---------'

Rules
1. A job has one end: the first one counts, unless its output is lost afterwards.
2. An event of the pool counts under the id under which the job was sent last, and once: events come twice after a
   takeover, and late from a submission that was sent again.
3. A job with a lost output is sent again, `MOST_REPEATS` times; not after its driver has cancelled it.
4. A job that the pool has cancelled is sent again if it was withdrawn, since its output could not be written. A journal
   decides alone which of its jobs are cancelled: whatever else cancels one, it is sent again.
5. That jobs of an id were withdrawn is forgotten with the last job in the pool under it: the pool has forgotten the id
   then, and jobs that are sent under it later were not withdrawn. It is kept while outputs cannot be written: jobs that
   are being sent may be withdrawn, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Generic, TypeVar

from modelpool.actors.outputs.results.job_ledger import JobLedger, LostOutputs

E = TypeVar("E")


class JobFollower(Generic[E]):
    """The jobs of one submission, by index. An `E` is what its `ledger` remembers of an end."""

    __slots__ = (
        *("_again", "_arrived", "_cancelled_jobs", "_given_up", "_held", "_ledger", "_losses", "_sent", "_starts"),
        *("_sent_under", "_submitted", "_times", "_withdrawn_ids", "is_cancelled"),
    )

    def __init__(self, ledger: JobLedger[E] | None = None) -> None:
        """`ledger` remembers the ends; None if a journal does."""
        self._ledger = ledger
        self._submitted = 0
        #: first indexes of the requests that were submitted together, and when
        self._starts: list[int] = []
        self._times: list[float] = []
        #: jobs in the pool, by the id under which they were sent last; and jobs with an end that has come
        self._sent: dict[int, str] = {}
        #: number of these jobs by id; none is 0
        self._sent_under: dict[str, int] = {}
        self._arrived: set[int] = set()
        #: jobs to send again, the oldest first
        self._again: dict[int, None] = {}
        self._losses = LostOutputs()
        #: whether the driver has cancelled all jobs
        self.is_cancelled = False
        self._cancelled_jobs: set[int] = set()
        #: whether outputs cannot be written now; whether that was given up; ids from which jobs were withdrawn
        self._held = False
        self._given_up = False
        self._withdrawn_ids: set[str] = set()

    # ---- requests -------------------------------------------------------------------------------------------------

    def submit(self, count: int, at_seconds: float = 0.0) -> range:
        """Add `count` requests; return their indexes, none after `cancel`. `at_seconds` is on the shell's clock."""
        if self.is_cancelled:
            return range(0)
        added = range(self._submitted, self._submitted + count)
        self._submitted = added.stop
        self._starts.append(added.start)
        self._times.append(at_seconds)
        if self._ledger is not None:
            self._ledger.add(count)
        return added

    def passed_seconds(self, index: int, now_seconds: float) -> float:
        """Return for how long a request has been submitted: its deadline goes on when it is sent again. A clock that
        was set back gives no job more than its deadline."""
        return max(0.0, now_seconds - self._times[bisect_right(self._starts, index) - 1])

    def sent(self, indexes: Iterable[int], submission_id: str) -> None:
        """Note that jobs are being sent under an id. Call it first: an end may come before the pool has answered."""
        for index in indexes:
            self._again.pop(index, None)
            before = self._sent.get(index)
            self._sent[index] = submission_id
            self._sent_under[submission_id] = self._sent_under.get(submission_id, 0) + 1
            if before is not None:
                self._note_left(before)

    def unwanted(self, indexes: Iterable[int]) -> list[int]:
        """Return which of the jobs the driver has cancelled. Ask after sending: a pool that was told of a cancellation
        before it knew the id has cancelled nothing."""
        return [index for index in indexes if self.is_cancelled or index in self._cancelled_jobs]

    def want(self, indexes: Iterable[int]) -> None:
        """Note that jobs that were not sent, since they seemed to have their outputs, are to be sent after all."""
        self._again |= dict.fromkeys(indexes)

    def refused(self, indexes: Iterable[int]) -> None:
        """Note that the pool has not taken jobs that were being sent."""
        for index in indexes:
            self._leave(index)

    def take_again(self, most: int | None = None) -> list[int]:
        """Return jobs to send again, at most so many, the oldest first. They are not returned a second time."""
        taken = list(self._again)[:most]
        for index in taken:
            del self._again[index]
        return taken

    @property
    def in_pool(self) -> int:
        """Number of jobs that were sent and have no end, those that are being written included."""
        return len(self._sent)

    def is_in_use(self, submission_id: str) -> bool:
        """Whether the pool may have jobs under an id, those that are being written included."""
        return submission_id in self._sent_under

    # ---- events of the pool ---------------------------------------------------------------------------------------

    def arrived(self, index: int, submission_id: str) -> bool:
        """Note that the pool has ended a job. False, and no effect, if that does not count (rule 2)."""
        if self._sent.get(index) != submission_id or index in self._arrived:
            return False
        self._arrived.add(index)
        return True

    def withdrawn(self, index: int, submission_id: str) -> bool:
        """Note that the pool has cancelled a job that has arrived; return whether it is to be sent again (rule 4)."""
        if self._ledger is not None:
            is_end = self.is_cancelled or self._given_up or index in self._cancelled_jobs
            if is_end or submission_id not in self._withdrawn_ids:
                return False
        self._leave(index)
        self._again[index] = None
        return True

    def output_lost(self, index: int) -> bool:
        """Note that the output of a job is lost; return whether it is to be sent again (rule 3). Then it has no end."""
        if self.is_cancelled or index in self._cancelled_jobs or not self._losses.note(index):
            return False
        if self._ledger is not None and self._ledger.has_ended(index):
            self._ledger.reopen(index)
        self._leave(index)
        self._again[index] = None
        return True

    def end(self, index: int, end: E) -> bool:
        """Note the end of a job, which a journal knows already. False, and no effect, if it has one (rule 1)."""
        was_sent = self._leave(index)
        return was_sent if self._ledger is None else self._ledger.end(index, end)

    def _leave(self, index: int) -> bool:
        """Take a job out of the pool; return whether it was there."""
        self._arrived.discard(index)
        self._again.pop(index, None)
        submission_id = self._sent.pop(index, None)
        if submission_id is None:
            return False
        self._note_left(submission_id)
        return True

    def _note_left(self, submission_id: str) -> None:
        """Note that one job less is in the pool under an id (rule 5)."""
        self._sent_under[submission_id] -= 1
        if not self._sent_under[submission_id]:
            del self._sent_under[submission_id]
            if not self._held:
                self._withdrawn_ids.discard(submission_id)

    def _end_hold(self) -> None:
        self._held = False
        self._withdrawn_ids &= self._sent_under.keys()

    # ---- the driver, and the place of outputs ---------------------------------------------------------------------

    def cancel(self) -> list[int]:
        """Cancel all jobs. Return the jobs that waited to be sent again: they are not, and end as cancelled."""
        self.is_cancelled = True
        if self._ledger is not None:
            self._ledger.seal()
        return self.take_again()

    def cancel_job(self, index: int) -> bool:
        """Cancel one job. Return whether it was to be sent again: then it is not, and ends as cancelled."""
        self._cancelled_jobs.add(index)
        if index not in self._again:
            return False
        del self._again[index]
        return True

    def hold(self, submission_ids: Iterable[str]) -> bool:
        """Note that outputs cannot be written: jobs that the pool has not started are withdrawn from these ids. False,
        and no effect, if nothing more of the submission is wanted.
        """
        if self.is_cancelled:
            return False
        self._held = True
        self._withdrawn_ids.update(submission_ids)
        return True

    @property
    def is_held(self) -> bool:
        """Whether outputs cannot be written now: then nothing is sent again."""
        return self._held

    def release(self) -> None:
        """Note that outputs can be written again."""
        self._given_up = False
        self._end_hold()

    def give_up(self) -> list[int]:
        """Note that outputs could not be written for too long. Return what waited to be sent again, as `cancel`."""
        self._given_up = True
        self._end_hold()
        return self.take_again()
