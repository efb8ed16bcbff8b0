"""Configuration of the scheduler core, with the reason for each default. Reads no files: `actors.settings` does."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from modelpool.pool.values.core.errors import GIB, UnusableField, unknown_name, unusable_field
from modelpool.scheduler.model.node_groups import NO_LIMITS, AutoscalingConfig, NodeGroup, check_groups
from modelpool.scheduler.model.user_share import UserShare

#: allocations between two garbage collections (`gc.set_threshold`) of the process that the core runs in. It creates
#: many objects and few cycles: with the interpreter's default, collecting takes a twentieth of its time
CORE_GC_OBJECTS = 50_000
#: names in `scheduler.decisions.placement.registry.PLACEMENTS`
PLACEMENT_NAMES = ("soonest", "arrival_order", "least_loaded")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Parameters of placement, retries and memory of the core.

    Raises UnusableField for a number out of range or not finite, and for a bool; UnknownName for an unknown placement.
    """

    #: one of PLACEMENT_NAMES: the policy that assigns tasks to workers
    placement: str = "soonest"
    #: failed runs of one task before its jobs fail
    max_attempts: int = 3
    #: workers that one task may take down (by crashing or hanging) before it is quarantined
    crash_limit: int = 2
    #: how long quarantined work is refused when submitted again; shorter if a larger worker comes up
    quarantine_seconds: float = 600.0
    #: longest time of a run before it is asked to stop; None: no limit
    run_timeout_seconds: float | None = None
    #: how long such a run, or one that no job needs any more, may take to stop before its worker is restarted
    stop_grace_seconds: float = 120.0
    #: starts of later tasks on each worker that the oldest waiting task lets pass; after that it goes first. Jobs
    #: submitted together pass each other freely
    overtaking_limit: int = 64
    #: fraction of GPU time that may go to loads for tasks that waited long while there is work for loaded weights; a
    #: task waits its load time divided by this first. 0: never, apart from `overtaking_limit`
    switch_share: float = 0.05
    #: preload weights to GPUs during their runs (`scheduler.decisions.placement.preload`)
    upload_ahead: bool = True
    #: a worker is sent its next tasks this long before the end of its run, so that it need not wait for a message, and
    #: short ones up to this expected time in all (`scheduler.core.send_ahead`). About the time of some messages under
    #: load: what comes later in between is not considered. 0: never
    send_ahead_seconds: float = 0.05
    #: stop a run with its state, to resume it later, for a task of higher priority that would otherwise wait longer
    #: than `preemption_wait_seconds` and than the stop and the loads cost
    preemption: bool = True
    #: see there. Longer than the run of an image, so that only long runs (videos) are stopped
    preemption_wait_seconds: float = 30.0
    #: times that one task is stopped so at most
    preemption_limit: int = 3
    #: lines of waiting tasks, in order, that one placement considers
    window: int = 32
    #: shares of users; UserId("*") stands for all that are not named, by default weight 1 and no limit
    shares: tuple[UserShare, ...] = ()
    #: how far one user may get ahead of another with waiting jobs, on each worker, because the weights that its jobs
    #: need are loaded: GPU-seconds of a user with weight 1. About the time of a few loads: smaller values load more
    #: often, larger ones let others wait longer (figures: docs/explanation/fairness.md)
    share_window_seconds: float = 15.0
    #: a job with a deadline goes first this long before its work must begin. About the length of a run: a worker that
    #: runs something else is not interrupted
    deadline_margin_seconds: float = 30.0
    #: the priority of a waiting job grows by one per this many seconds, up to the highest priority of any live job at
    #: submission; None: never, so lower priorities may starve
    ageing_seconds: float | None = None
    #: maximum tasks per batch, where batching takes less time per task. With 1 an image does not depend on other
    #: requests, not even in its last bits
    batch_limit: int = 1
    #: tasks of a fixed batch size may join a running forward pass at a step, if it has a free row
    joins: bool = True
    #: results kept for later jobs when no live job reads them: at most this many ...
    kept_results: int = 512
    #: ... and at most this many bytes in total
    kept_result_bytes: int = 1 * GIB
    #: failed starts and losses of one worker, without a completed run in between, after which it is given up
    start_retry_limit: int = 5
    #: delay before the second restart in a row (the first is immediate); doubles from there
    start_backoff_seconds: float = 1.0
    start_backoff_limit_seconds: float = 60.0
    #: seconds, besides the upload, for giving a resident component other patches. An assumption: it need only be
    #: positive, to prefer equal patches among equal uploads
    patch_switch_seconds: float = 0.05
    #: entries of the story that are kept; None keeps all
    story_length: int | None = 20_000
    #: ids of ended jobs that are remembered, so that submitting one again has no effect
    ended_jobs_remembered: int = 100_000
    #: nodes that may be unavailable at a time because of drains and of scaling down: neither adds another one beyond;
    #: None: no limit
    max_unavailable_nodes: int | None = None
    #: nodes that may be requested; without any, the shell names all workers
    groups: tuple[NodeGroup, ...] = ()
    #: limits over all groups
    autoscaling: AutoscalingConfig = NO_LIMITS

    def __post_init__(self) -> None:
        users = [share.user for share in self.shares]
        for user in users:
            if users.count(user) > 1:
                raise UnusableField(f"shares: found {user!r} {users.count(user)} times, expected each user once")
        check_groups(self.groups, self.autoscaling)
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
            if found > _MOST.get(field.name, math.inf):
                raise unusable_field(field.name, found, f"at most {_MOST[field.name]}")


#: a minute of queued runs hides any message; what comes later in between would not be considered for longer than that
_MOST = {"send_ahead_seconds": 60.0}

#: booleans, not numbers
_SWITCHES = frozenset({"joins", "preemption", "upload_ahead"})

_LEAST = {
    "max_unavailable_nodes": 1,
    "max_attempts": 1,
    "crash_limit": 1,
    "run_timeout_seconds": 1,
    "ageing_seconds": 1,
    "overtaking_limit": 1,
    "window": 1,
    "batch_limit": 1,
    "start_retry_limit": 1,
}
