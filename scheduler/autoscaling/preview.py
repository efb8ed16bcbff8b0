"""`ScalingPreview`: what would be requested and given up now, with the reasons, as a value for users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelpool.pool.values.core.errors import counted, format_bytes
from modelpool.scheduler.autoscaling.outlook import Fleet, GiveUpNode, GroupOutlook, PendingWork, RequestNodes
from modelpool.scheduler.model.node_groups import NodeGroup
from modelpool.scheduler.model.scaling_record import ScalingWhy


@dataclass(frozen=True, slots=True)
class WaitingLevel:
    """The tasks that wait and need more GPU memory than the previous level has.

    level_bytes  of the smallest GPUs that they run on, of those that exist or could; None: they fit on none
    gpu_seconds  of a GPU of the first group, loads included
    """

    level_bytes: int | None
    tasks: int
    gpu_seconds: float

    @property
    def words(self) -> str:
        """The level in a clause."""
        where = "fit on no GPU" if self.level_bytes is None else f"need a GPU with {format_bytes(self.level_bytes)}"
        verb = where if self.tasks != 1 else where.replace("need", "needs").replace("fit ", "fits ")
        return f"{counted(self.tasks, 'task')} of {self.gpu_seconds:.0f} GPU-seconds {verb}"


@dataclass(frozen=True, slots=True)
class GroupPreview:
    """One group of nodes.

    nodes      that exist or are requested; of them, `starting` have no worker yet, and `cordoned` are out of use
    change     nodes that would be requested now, or given up if below 0
    why        the reasons of that, as sentences; without a change, why none is requested
    """

    name: str
    nodes: int
    starting: int
    cordoned: int
    max_nodes: int
    price_per_hour: float
    start_seconds: float
    change: int
    why: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ScalingPreview:
    """What would be requested now.

    waiting      the work that waits, ascending by memory
    groups       in the order of the configuration; none: the pool has none
    end_seconds  until the waiting work has run on the nodes that exist; None if it never has
    held_back    why nodes are not given up though they may be; "" if nothing prevents it
    """

    waiting: tuple[WaitingLevel, ...]
    groups: tuple[GroupPreview, ...] = ()
    end_seconds: float | None = None
    held_back: str = ""


def group_previews(
    outlooks: Sequence[GroupOutlook],
    fleet: Fleet,
    decisions: Sequence[RequestNodes | GiveUpNode],
    obstacles: dict[str, str],
    backlog: PendingWork,
) -> tuple[GroupPreview, ...]:
    """Return what happens to each group. `obstacles` are why no node of a group may be requested now."""
    found = []
    for outlook in outlooks:
        group = outlook.group
        mine = [node for node in fleet.nodes if node.group == group.name]
        whys = [decision.why for decision in decisions if decision.why.group == group.name]
        others = [reason for each in decisions for name, reason in each.why.others if name == group.name]
        reasons = tuple(why.words for why in whys) or (_why_none(group, outlook, others, obstacles, backlog),)
        found.append(
            GroupPreview(
                name=group.name,
                nodes=len(mine),
                starting=sum(node.is_starting for node in mine),
                cordoned=sum(node.is_cordoned for node in mine),
                max_nodes=group.max_nodes,
                price_per_hour=group.price_per_hour,
                start_seconds=outlook.start_seconds,
                change=_change(whys),
                why=reasons,
            )
        )
    return tuple(found)


def _change(whys: Sequence[ScalingWhy]) -> int:
    return sum(why.nodes for why in whys)


def _why_none(
    group: NodeGroup, outlook: GroupOutlook, others: Sequence[str], obstacles: dict[str, str], backlog: PendingWork
) -> str:
    if not backlog.tasks:
        return "nothing waits"
    if others:
        return f"another group is better: {others[0]}"
    if outlook.gpu_bytes < max(work.level_bytes for work in backlog.levels) and len(backlog.levels) == 1:
        return "its GPUs have too little memory for what waits"
    if group.name in obstacles:
        return obstacles[group.name]
    return (
        f"the nodes there end the work soon: a node would have to start ({outlook.start_seconds:.0f} s) and load, and "
        "take over work for as long"
    )
