"""What a user may have of the pool: a setting. `scheduler.queue.shares` keeps to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelpool.pool.core.errors import unusable_field
from modelpool.pool.specs.spec import UserId

#: the share of all users that are not named
EVERYBODY = UserId("*")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShare:
    """What a user may have of the pool; `EVERYBODY` stands for users that are not named. Raises UnusableField.

    weight         GPU-seconds in proportion to those of others whose jobs wait at the same time
    running_limit  tasks on workers at once, at most; None for any number
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
