"""Records of each group of nodes: learned properties, failures and back-off. Knows no workers and no work."""

from __future__ import annotations

from math import inf

from modelpool.pool.values.specs.spec import WorkerId, WorkerSpec
from modelpool.scheduler.autoscaling.outlook import GroupOutlook
from modelpool.scheduler.model.estimates import Estimate
from modelpool.scheduler.model.gpu_kinds import kind_of
from modelpool.scheduler.model.node_groups import NodeGroup

#: delay before a group is tried again after a start that failed; doubles with each further one, up to a limit
BACKOFF_SECONDS = 30.0
BACKOFF_LIMIT_SECONDS = 900.0
#: of weights to a GPU of unknown kind
LINK_BYTES_PER_SECOND = 10e9


class GroupRecord:
    """One group."""

    def __init__(self, group: NodeGroup) -> None:
        self.group = group
        #: the device name of its workers; until one was up, as configured
        self.device_name = group.gpu_type
        #: least memory of a worker that was up; infinity if unknown
        self.gpu_bytes = float(group.gpu_bytes) or inf
        self.has_been_up = False
        kind = kind_of(group.gpu_type)
        self._load_bytes_per_second = LINK_BYTES_PER_SECOND if kind is None else kind.link_bytes_per_second
        self.starts = Estimate()
        #: the number of the next worker
        self._next_number = 0
        self.requests = 0
        #: starts that failed since the last one that succeeded; and how many of those because a process failed
        self.failures = 0
        self.crashes = 0
        self.blocked_until = -inf
        self.reason = ""

    @property
    def start_seconds(self) -> float:
        """From the request to the worker being up."""
        return self.group.start_seconds if self.starts.value is None else self.starts.value

    def new_request(self) -> list[WorkerId]:
        """The ids of the workers of a new node."""
        self.requests += 1
        first = self._next_number
        self._next_number += self.group.gpus_per_node
        return [WorkerId(self.group.worker_id(number)) for number in range(first, self._next_number)]

    def came_up(self, spec: WorkerSpec, seconds: float | None) -> None:
        """A worker is up, for the first time after `seconds`."""
        self.device_name = spec.device_name
        self.gpu_bytes = min(self.gpu_bytes, spec.capacity_bytes) if self.has_been_up else float(spec.capacity_bytes)
        self.has_been_up = True
        self._load_bytes_per_second = max(1.0, spec.link_bytes_per_second)
        if spec.storage_bytes_per_second > 0.0:
            self._load_bytes_per_second = min(self._load_bytes_per_second, spec.storage_bytes_per_second)
        if seconds is not None:
            self.starts.add(seconds)
        self.failures = self.crashes = 0
        self.blocked_until, self.reason = -inf, ""

    def start_failed(self, at: float, reason: str, is_crash: bool, crash_limit: int) -> None:
        """A node did not come, or its process failed: back off. After `crash_limit` failed processes in a row the group
        is not tried any more: the reason is with the software, not with the supply."""
        if at < self.blocked_until:
            return  # requested together with the one that failed before
        self.failures += 1
        self.crashes += is_crash
        if self.crashes >= crash_limit:
            self.blocked_until, self.reason = inf, f"{self.crashes} starts failed in a row, last: {reason}"
            return
        seconds = min(BACKOFF_LIMIT_SECONDS, BACKOFF_SECONDS * float(2 ** min(self.failures - 1, 30)))
        self.blocked_until, self.reason = at + seconds, f"backing off for {seconds:.0f} s: {reason}"

    def outlook(self, speed: float) -> GroupOutlook:
        """The group as a decision sees it."""
        return GroupOutlook(
            group=self.group,
            gpu_bytes=self.gpu_bytes,
            speed=speed,
            start_seconds=self.start_seconds,
            load_bytes_per_second=self._load_bytes_per_second,
            blocked_until=self.blocked_until,
            reason=self.reason,
        )
