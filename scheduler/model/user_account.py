"""Accounts and flows of users: the values that fair queueing keeps for each user."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelpool.pool.values.specs.spec import JobId, UserId
from modelpool.scheduler.model.user_share import UserShare

if TYPE_CHECKING:
    from modelpool.scheduler.model.jobs import Job

#: users without a name
ANONYMOUS = UserId("")


#: the virtual start time of a job that has none yet: after all that have one, in order of submission
NO_VIRTUAL_START = math.inf


@dataclass(slots=True, eq=False)
class UserFlow:
    """The live jobs of one user and one priority."""

    account: UserAccount
    priority: int
    #: not begun and without a virtual start time, as submitted
    unscheduled: dict[JobId, Job] = field(default_factory=dict)
    #: with a virtual start time, begun or not
    scheduled: dict[JobId, Job] = field(default_factory=dict)
    #: begun without a virtual start time
    begun: dict[JobId, Job] = field(default_factory=dict)
    #: virtual seconds reserved for tasks of `scheduled` jobs until they are charged
    reserved: float = 0.0
    #: the latest virtual start time that was assigned
    virtual_start: float = 0.0


@dataclass(slots=True, eq=False)
class UserAccount:
    """GPU time that one user has used and reserved."""

    share: UserShare
    #: virtual seconds that were used or forfeited
    paid: float = 0.0
    #: GPU-seconds that were used, for display
    seconds: float = 0.0
    #: seconds that loading adds to a run of this user, on average
    load_seconds: float = 0.0
    #: by priority; empty while it has no live job
    flows: dict[int, UserFlow] = field(default_factory=dict)
    #: number of live jobs
    live: int = 0

    def reserved_from(self, priority: int) -> float:
        """Virtual seconds reserved for jobs of this priority and higher ones."""
        return sum(flow.reserved for flow in self.flows.values() if flow.priority >= priority)
