"""`PoolMemory`: what limits, shares and estimates depend on, as one value that outlives a controller. No clock times:
seconds are relative to the moment of the value.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelpool.pool.values.specs.spec import ComponentKey, NodeId, Stage, UserId, WorkerId
from modelpool.pool.values.specs.wire_value import WireValue


@dataclass(frozen=True, slots=True)
class RememberedUser(WireValue):
    """The account of a user.

    paid_ahead    virtual seconds paid more than the pool's virtual time
    seconds       GPU-seconds used
    load_seconds  seconds that loading adds to a run, on average
    """

    user: UserId
    paid_ahead: float
    seconds: float
    load_seconds: float


@dataclass(frozen=True, slots=True)
class RememberedGroup(WireValue):
    """A group of nodes.

    starts           the latest seconds from a request to a worker that is up
    failures         starts that failed in a row, `crashes` of them because of a process
    blocked_seconds  for which no node may be requested; None: until the pool ends
    reason           why
    """

    name: str
    starts: tuple[float, ...] = ()
    failures: int = 0
    crashes: int = 0
    blocked_seconds: float | None = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RememberedSize(WireValue):
    """The latest ratios of measured to expected seconds of runs of one size class, of `members` tasks each."""

    size: int
    members: int
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RememberedRuns(WireValue):
    """Measured run times of a stage with these components on a kind of GPU: of all sizes, and of each."""

    stage: Stage
    components: tuple[ComponentKey, ...]
    gpu: str
    ratios: tuple[float, ...]
    sizes: tuple[RememberedSize, ...] = ()


@dataclass(frozen=True, slots=True)
class RememberedGangs(WireValue):
    """The latest ratios of measured to expected seconds on one GPU, of runs of a size class on `degree` GPUs."""

    stage: Stage
    components: tuple[ComponentKey, ...]
    gpu: str
    size: int
    degree: int
    ratios: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RememberedPatches(WireValue):
    """The latest seconds of a switch of patches on a device, besides moving bytes."""

    device_name: str
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RememberedCordon(WireValue):
    """An operator's cordon of a machine, or of a worker (`worker_id`), since `age_seconds`.

    left_seconds  until the runs there must have ended, as it is drained or restarted; None: it is only cordoned
    restarts      the worker is to be restarted, and not cordoned
    """

    node: NodeId
    worker_id: WorkerId
    age_seconds: float
    left_seconds: float | None = None
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class PoolMemory(WireValue):
    """What a controller hands to the next one.

    spent             money spent on nodes
    cost_per_hour     of all nodes now, requested ones included
    deadlines_met, deadlines_missed  jobs with a deadline
    """

    spent: float = 0.0
    cost_per_hour: float = 0.0
    deadlines_met: int = 0
    deadlines_missed: int = 0
    users: tuple[RememberedUser, ...] = ()
    groups: tuple[RememberedGroup, ...] = ()
    runs: tuple[RememberedRuns, ...] = ()
    patches: tuple[RememberedPatches, ...] = ()
    cordons: tuple[RememberedCordon, ...] = ()
    gangs: tuple[RememberedGangs, ...] = ()


def learned_only(memory: PoolMemory) -> PoolMemory:
    """Return what stays true when the pool has ended: what was measured, without money, shares and back-offs."""
    groups = tuple(RememberedGroup(group.name, group.starts) for group in memory.groups)
    return PoolMemory(groups=groups, runs=memory.runs, patches=memory.patches, gangs=memory.gangs)
