"""`SubmissionList`: the submissions that a controller has queued jobs of, for users who look at the pool as a whole.

Counts only: it holds no jobs, and decides nothing. Submissions that have ended are forgotten when there are many.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from modelpool.actors.control.parked_jobs import QueuedJob
from modelpool.actors.control.status_values import SubmissionStatus
from modelpool.actors.worker.wire.messages import SubmissionId
from modelpool.pool.values.specs.spec import UserId
from modelpool.scheduler.model.messages import Outcome

#: submissions that a status names, and ended ones that are remembered
MOST_LISTED = 100
#: characters of a prompt
MOST_PROMPT = 240


@dataclass(slots=True)
class _Counts:
    user: UserId
    model: str
    prompt: str
    began_at: float
    jobs: int = 0
    ended: dict[Outcome, int] = field(default_factory=dict)

    @property
    def unfinished(self) -> int:
        return self.jobs - sum(self.ended.values())


class SubmissionList:
    """The submissions of all drivers, oldest first."""

    def __init__(self) -> None:
        self._active: OrderedDict[SubmissionId, _Counts] = OrderedDict()
        self._ended: OrderedDict[SubmissionId, _Counts] = OrderedDict()

    def queued(self, jobs: Sequence[QueuedJob], at: float) -> None:
        """Count jobs of one submission, which may have others already."""
        if not jobs:
            return
        first = jobs[0]
        counts = self._active.get(first.submission_id) or self._ended.pop(first.submission_id, None)
        if counts is None:
            prompt = "" if first.recipe is None else first.recipe.prompt
            model = "" if first.recipe is None else first.recipe.model
            counts = _Counts(first.graph.job.user, model, prompt[:MOST_PROMPT], at)
        self._active[first.submission_id] = counts
        counts.jobs += len(jobs)

    def ended(self, submission_id: SubmissionId, outcome: Outcome) -> None:
        """Count the end of a job; ignored if the submission is not known."""
        counts = self._active.get(submission_id)
        if counts is None:
            return
        counts.ended[outcome] = counts.ended.get(outcome, 0) + 1
        if counts.unfinished <= 0:
            del self._active[submission_id]
            self._ended[submission_id] = counts
            while len(self._ended) > MOST_LISTED:
                self._ended.popitem(last=False)

    def statuses(self, now: float) -> tuple[SubmissionStatus, ...]:
        """Return up to MOST_LISTED of them: active ones before ended ones, each newest first."""
        newest = [*reversed(self._active.items()), *reversed(self._ended.items())][:MOST_LISTED]
        return tuple(
            SubmissionStatus(
                id=submission_id,
                user=counts.user,
                model=counts.model,
                prompt=counts.prompt,
                jobs=counts.jobs,
                succeeded=counts.ended.get(Outcome.SUCCEEDED, 0),
                failed=counts.ended.get(Outcome.FAILED, 0),
                cancelled=counts.ended.get(Outcome.CANCELLED, 0),
                seconds=now - counts.began_at,
            )
            for submission_id, counts in newest
        )
