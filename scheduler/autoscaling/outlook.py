"""The input and output of scaling decisions, as values: waiting work, groups, nodes, decisions.

GPU-seconds are for a GPU of speed 1, loads included. Levels are memory sizes: work of a level runs on every GPU
with at least that much. All of it is of the size of the pool and of its cost classes, never of the number of tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from modelpool.scheduler.autoscaling.recent_work import RecentWork
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingWhy


@dataclass(frozen=True, slots=True)
class WaitingWork:
    """The tasks that wait, ready or not, and need more memory than the previous level has.

    level_bytes  the smallest GPU memory, of those that exist or could exist, that they run in; infinity if none
    seconds      GPU-seconds
    load_bytes   weights to load before the first of them runs on a new GPU: the average, weighted by seconds
    longest      GPU-seconds of the longest task
    arriving     GPU-seconds per second that keep coming without a deadline
    """

    level_bytes: float
    tasks: int
    seconds: float
    load_bytes: float
    longest: float
    arriving: float = 0.0


@dataclass(frozen=True, slots=True)
class DueWork:
    """The GPU-seconds that are due by a deadline, besides those due earlier."""

    deadline: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PendingWork:
    """All work that waits.

    levels        ascending by memory
    due           ascending by deadline; deadlines that are over are left out
    free_seconds  the part of the GPU-seconds without a deadline ahead
    """

    levels: tuple[WaitingWork, ...] = ()
    due: tuple[DueWork, ...] = ()
    free_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """GPU-seconds of all levels."""
        return sum(work.seconds for work in self.levels)

    @property
    def tasks(self) -> int:
        """Tasks of all levels."""
        return sum(work.tasks for work in self.levels)


@dataclass(frozen=True, slots=True)
class GroupOutlook:
    """A group, with what was learned about its nodes.

    gpu_bytes              memory of a GPU; infinity if unknown: its first worker tells
    speed                  of a GPU
    start_seconds          from the request to the worker being up
    load_bytes_per_second  of weights to one of its GPUs for the first time
    blocked_until          no request before: a start failed; infinity if it failed too often
    reason                 why it is blocked
    """

    group: NodeGroup
    gpu_bytes: float
    speed: float = 1.0
    start_seconds: float = 180.0
    load_bytes_per_second: float = 1e9
    blocked_until: float = -inf
    reason: str = ""

    @property
    def node_speed(self) -> float:
        """GPU-seconds that a node works off per second."""
        return self.speed * self.group.gpus_per_node

    def cold_seconds(self, load_bytes: float) -> float:
        """Seconds from the request of a node to its first run."""
        return self.start_seconds + load_bytes / self.load_bytes_per_second


@dataclass(frozen=True, slots=True)
class FleetNode:
    """A machine with workers, or a request for one.

    group           "" for workers that the shell named
    gpus            workers on it that take tasks
    free_at         when its GPUs should be free, on average; for a request when it should be up
    ends_at         when it will be gone; infinity if no notice came
    is_starting     it was never up
    is_overdue      it was never up, and much more time has passed than a start takes: it may be out of stock
    is_leaving      it was given up, and ends with its runs
    is_cordoned     an operator has taken workers of it out of use: it is neither capacity nor given up
    idle_gpus       of its GPUs, those that run nothing
    idle_since      since when all its GPUs are idle; None if one is not. For a request, since when it has no use
    reload_seconds  seconds to load again what its GPUs hold
    value_seconds   the same, for weights that are expected to be needed and are not held elsewhere
    is_kept         it holds pinned components that would be missing without it
    """

    name: str
    group: str
    gpus: int
    gpu_bytes: float
    speed: float
    free_at: float
    ends_at: float = inf
    is_starting: bool = False
    is_overdue: bool = False
    is_leaving: bool = False
    is_cordoned: bool = False
    idle_gpus: int = 0
    idle_since: float | None = None
    reload_seconds: float = 0.0
    value_seconds: float = 0.0
    is_kept: bool = False

    @property
    def capacity(self) -> float:
        """GPU-seconds that it works off per second."""
        return self.gpus * self.speed


@dataclass(frozen=True, slots=True)
class Fleet:
    """All nodes, the money spent on them so far, and the work of the recent past.

    pinned  workers that pinned components need, as pairs of memory and number
    may_end nodes that may be given up now though they are up: disruption limits; None: any number
    """

    nodes: tuple[FleetNode, ...] = ()
    spent: float = 0.0
    recent: tuple[RecentWork, ...] = ()
    pinned: tuple[tuple[float, int], ...] = ()
    may_end: int | None = None


@dataclass(frozen=True, slots=True)
class RequestNodes:
    """Request this many nodes of a group."""

    group: str
    nodes: int
    why: ScalingWhy


@dataclass(frozen=True, slots=True)
class GiveUpNode:
    """End all workers on this node, when their runs have ended; at once if `is_hard`."""

    node: str
    why: ScalingWhy
    is_hard: bool = False
