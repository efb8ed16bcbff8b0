"""A user's share of the pool: a setting, enforced by `scheduler.decisions.queue.shares`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.specs.spec import UserId

#: the share of all users that are not named
EVERYBODY = UserId("*")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShare:
    """A user's share of the pool; `EVERYBODY` stands for users that are not named. Raises UnusableField.

    weight         GPU-seconds in proportion to other users with jobs that wait at the same time
    running_limit  maximum tasks on workers at once; None: no limit
    """

    user: UserId
    weight: float = 1.0
    running_limit: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.weight, bool) or not (math.isfinite(self.weight) and self.weight > 0):
            raise unusable_field("weight", self.weight, "a finite number above 0")
        limit = self.running_limit
        if limit is not None and (isinstance(limit, bool) or limit < 1):
            raise unusable_field("running_limit", limit, "a whole number from 1")
