"""The numbers that steer the scheduler core, with their reasons. Reads no file: that is the business of actors."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from modelpool.pool.core.errors import GIB, UnusableField, unknown_name, unusable_field
from modelpool.scheduler.tables.user_share import UserShare

#: new objects between two looks for garbage in cycles, for the process that the core runs in. It makes many objects and
#: few cycles, and holds so much that looking through it is a twentieth of its time with the interpreter's own number
CORE_GC_OBJECTS = 50_000
#: names in `scheduler.placement.registry.PLACEMENTS`
PLACEMENT_NAMES = ("soonest", "arrival_order", "least_loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How the core places, repeats and remembers.

    Raises UnusableField for a number outside what is allowed or not finite, and for a bool; UnknownName for another
    placement.
    """

    #: one of PLACEMENT_NAMES: what decides where tasks run
    placement: str = "soonest"
    #: runs of one task that may end badly before its jobs fail
    max_attempts: int = 3
    #: workers that one task may take down with it (by crashing them, or by hanging in them) before it is quarantined
    crash_limit: int = 2
    #: how long work that was quarantined is refused when it is asked for again; less when a larger worker comes up
    quarantine_seconds: float = 600.0
    #: longest that a run may take before it is asked to stop; None never asks
    run_timeout_seconds: float | None = None
    #: how long such a run, or one that nobody needs any more, may take to stop before its worker is started anew
    stop_grace_seconds: float = 120.0
    #: starts of later tasks on each worker that the oldest waiting task lets pass; after that it goes first. Jobs that
    #: were asked for together pass each other freely
    overtaking_limit: int = 64
    #: part of the GPUs' time that loads may take which serve who waited long while there is work for what is loaded;
    #: a task waits for its load's length over this before that. 0 never does, but for `overtaking_limit`
    switch_share: float = 0.05
    #: workers are told what to bring to their GPUs beside the runs that they are at (`scheduler.placement.preload`)
    upload_ahead: bool = True
    #: lines of waiting tasks, in order, that one placement looks at
    window: int = 32
    #: what users may have; UserId("*") stands for all that are not named, else they have weight 1 and no limit
    shares: tuple[UserShare, ...] = ()
    #: how far one user may get ahead of another whose jobs wait too, on each worker, because the weights that its jobs
    #: need are there: GPU-seconds of a user with weight 1. About what some loads take: less, and more time goes into
    #: loads; more, and others wait longer (docs/fairness.md has figures)
    share_window_seconds: float = 15.0
    #: a job with a deadline goes first so long before the work for it must begin. About a run's length: a worker that
    #: runs something else is not interrupted
    deadline_margin_seconds: float = 30.0
    #: a waiting job's priority grows by one each so many seconds, up to the highest that a live job was submitted with;
    #: None never: a priority means what it says, and lower ones may starve
    ageing_seconds: float | None = None
    #: tasks that go through a module at once, at most, where that takes less time for each. With 1 an image does not
    #: depend, not even in its last bits, on what else is asked for
    batch_limit: int = 1
    #: results kept for later jobs when no live job reads them: at most so many ...
    kept_results: int = 512
    #: ... with at most so many bytes together
    kept_result_bytes: int = 1 * GIB
    #: failed starts and losses of one worker, with no completed run in between, after which it is given up
    start_retry_limit: int = 5
    #: delay before the second restart in a row (the first is at once); doubles from there
    start_backoff_seconds: float = 1.0
    start_backoff_limit_seconds: float = 60.0
    #: time beside the upload that it takes to give a resident component other patches. An assumption: it need only be
    #: positive, so that equal bytes prefer equal patches
    patch_switch_seconds: float = 0.05
    #: lines of the story that are kept; None keeps all
    story_length: int | None = 20_000
    #: ids of ended jobs that are remembered, so that a second submission of one does nothing
    ended_jobs_remembered: int = 100_000

    def __post_init__(self) -> None:
        users = [share.user for share in self.shares]
        for user in users:
            if users.count(user) > 1:
                raise UnusableField(f"shares: found {user!r} {users.count(user)} times, expected each user once")
        if self.placement not in PLACEMENT_NAMES:
            raise unknown_name("placement", self.placement, PLACEMENT_NAMES)
        for field in fields(self):
            found = getattr(self, field.name)
            if not isinstance(found, int | float) or field.name in _SWITCHES:
                continue
            if isinstance(found, bool) or (isinstance(found, float) and not math.isfinite(found)):
                raise unusable_field(field.name, found, "a finite number")
            if found < _LEAST.get(field.name, 0):
                raise unusable_field(field.name, found, f"at least {_LEAST.get(field.name, 0)}")


#: true or false, not numbers
_SWITCHES = frozenset({"upload_ahead"})

_LEAST = {
    "max_attempts": 1,
    "crash_limit": 1,
    "run_timeout_seconds": 1,
    "ageing_seconds": 1,
    "overtaking_limit": 1,
    "window": 1,
    "batch_limit": 1,
    "start_retry_limit": 1,
}
