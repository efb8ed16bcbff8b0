"""Runs that several workers share: their members, and the known ends of the members' runs. Decides nothing.

A gang exists from the start of its run until its last member has ended. One of its members stands for the run in the
tables (`lead`): the first, or another one once that has ended without a result.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from modelpool.pool.values.specs.spec import RunError, TaskId, UserId, WorkerId
from modelpool.scheduler.model.kept_states import KeptState
from modelpool.scheduler.model.messages import GangMember, LossCause


@dataclass(frozen=True, slots=True)
class GangFailure:
    """The end of one member without success; `cause` if it was lost."""

    worker_id: WorkerId
    error: RunError
    cause: LossCause | None = None


@dataclass(slots=True, eq=False)
class GangRun:
    """One run that several workers share.

    gang_id    unique among all of this core
    members    in the order of their ranks; the first has the result
    payer      the user who is charged
    lead       the member that stands for the run in the tables
    left       the members that have not ended
    first_step  of the state that it resumed from; 0: it began anew
    failures   ends without success, in the order in which they came
    kept       the state with the most steps that a member ended with
    is_broken  a member ended without success though nobody had asked the run to stop
    has_ended  its result exists, or its task was decided about: only ends of members are awaited
    asked_at   when the members that are left were asked to stop, or have no reason to continue; None before
    """

    gang_id: str
    task_id: TaskId
    attempt: int
    members: tuple[GangMember, ...]
    payer: UserId
    lead: WorkerId
    left: dict[WorkerId, None]
    first_step: int = 0
    failures: list[GangFailure] = field(default_factory=list)
    kept: KeptState | None = None
    is_broken: bool = False
    has_ended: bool = False
    asked_at: float | None = None

    @property
    def degree(self) -> int:
        """The number of workers that share the run."""
        return len(self.members)

    @property
    def worker_ids(self) -> tuple[WorkerId, ...]:
        """The members, in the order of their ranks."""
        return tuple([member.worker_id for member in self.members])

    def others(self, worker_id: WorkerId) -> list[WorkerId]:
        """The members besides `worker_id`."""
        return [member.worker_id for member in self.members if member.worker_id != worker_id]


@dataclass(frozen=True, slots=True)
class GangLoss:
    """A worker was lost while it took part in a gang."""

    gang: GangRun
    worker_id: WorkerId
    reason: str
    cause: LossCause
