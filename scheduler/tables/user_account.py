"""Accounts and flows of users: the values that fair queueing keeps for each user."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelpool.pool.specs.spec import JobId, UserId
from modelpool.scheduler.tables.user_share import UserShare

if TYPE_CHECKING:
    from modelpool.scheduler.tables.jobs import Job

#: whoever has no name
NOBODY = UserId("")


#: the tag of a job that has none yet: after all that have one, as submitted
NO_TAG = math.inf


@dataclass(slots=True, eq=False)
class Flow:
    """The live jobs of one user and one priority."""

    account: Account
    priority: int
    #: not begun and without a tag, as submitted
    untagged: dict[JobId, Job] = field(default_factory=dict)
    #: with a tag, begun or not
    tagged: dict[JobId, Job] = field(default_factory=dict)
    #: begun without a tag
    begun: dict[JobId, Job] = field(default_factory=dict)
    #: virtual seconds that are set aside for tasks of tagged jobs until they are paid
    reserved: float = 0.0
    #: the latest tag that was given
    tag: float = 0.0


@dataclass(slots=True, eq=False)
class Account:
    """What one user had, and has coming."""

    share: UserShare
    #: virtual seconds that were had, or forgone
    paid: float = 0.0
    #: GPU-seconds that were had, for people
    seconds: float = 0.0
    #: what loading adds to a run of this user, on average
    load_seconds: float = 0.0
    #: by priority; none while it has no live job
    flows: dict[int, Flow] = field(default_factory=dict)
    #: live jobs
    live: int = 0

    def reserved_from(self, priority: int) -> float:
        """Virtual seconds that are set aside for jobs of this priority and higher ones."""
        return sum(flow.reserved for flow in self.flows.values() if flow.priority >= priority)
