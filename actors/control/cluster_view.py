"""The nodes of the cluster and their notices at one moment, and what follows from them. Pure; `actors.ray.ray_nodes`
reads them from Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from modelpool.actors.control.history.event_rules import NodeChange
from modelpool.pool.values.core.errors import counted
from modelpool.pool.values.specs.spec import NodeId
from modelpool.scheduler.model.messages import NodeDraining
from modelpool.scheduler.model.node_groups import NodeGroup

GPU = "GPU"
#: Ray's resource of a node's own accelerator type, "accelerator_type:H100"
ACCELERATOR_PREFIX = "accelerator_type:"
#: notices of equal deadlines differ by less: clocks and rounding
_SAME_SECONDS = 1.0
#: the autoscaler's times are whole seconds, rounded down
_TICK = 1.0


class NodeEnd(Enum):
    """Why a node is gone, as Ray reports it."""

    UNKNOWN = "unknown"
    EXPECTED = "expected"  #: its raylet ended in order
    UNEXPECTED = "unexpected"  #: it no longer answers
    PREEMPTED = "preempted"  #: it ended after a drain request for a preemption
    IDLE = "idle"  #: the autoscaler ended it because it was idle


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, alive or recently dead.

    name            set by `ray start --node-name`; equal to `address` without it
    group           its node type in the autoscaler ("" without one)
    port            of its raylet, at `address`
    labels          Ray node labels
    total, free     Ray resources; `free` is empty if unknown
    drain_deadline  Unix seconds at which it may end; 0: no deadline; None: it is not draining
    end             why it is gone; None while it is alive
    """

    node_id: NodeId
    name: str = ""
    address: str = ""
    port: int = 0
    group: str = ""
    is_head: bool = False
    labels: tuple[tuple[str, str], ...] = ()
    total: tuple[tuple[str, float], ...] = ()
    free: tuple[tuple[str, float], ...] = ()
    drain_deadline: float | None = None
    end: NodeEnd | None = None
    end_reason: str = ""

    @property
    def alive(self) -> bool:
        """Whether it is part of the cluster."""
        return self.end is None

    @property
    def gpu_count(self) -> int:
        """Number of its GPUs, used or free."""
        return int(dict(self.total).get(GPU, 0))

    @property
    def free_gpus(self) -> int:
        """Number of its GPUs that nothing uses as a whole; 0 if unknown."""
        return int(dict(self.free).get(GPU, 0))

    @property
    def gpu_type(self) -> str:
        """Ray's accelerator type; "" if unknown."""
        named = dict(self.labels).get("ray.io/accelerator-type", "")
        found = (name.removeprefix(ACCELERATOR_PREFIX) for name, _ in self.total if name.startswith(ACCELERATOR_PREFIX))
        return named or next(found, "")


@dataclass(frozen=True, slots=True)
class ResourceDemand:
    """Requests for resources that wait for a node: `count` of this kind, with the labels that the node must have."""

    resources: tuple[tuple[str, float], ...]
    labels: tuple[tuple[str, str], ...] = ()
    count: int = 1


@dataclass(frozen=True, slots=True)
class NodeLaunch:
    """Nodes that the autoscaler requested.

    at       Unix seconds of the request, or of its failure; 0 for a node that is starting
    failure  why the request failed; "" while it is pending
    """

    group: str
    count: int
    details: str = ""
    at: float = 0.0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class AutoscalerView:
    """What Ray's autoscaler reports (version 2; version 1 reports nothing here)."""

    pending: tuple[NodeLaunch, ...] = ()
    failed: tuple[NodeLaunch, ...] = ()
    infeasible: tuple[ResourceDemand, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All nodes, the demand that waits for nodes, and the autoscaler's report (None if there is none).

    at  Unix seconds
    """

    nodes: tuple[NodeView, ...]
    waiting: tuple[ResourceDemand, ...] = ()
    autoscaler: AutoscalerView | None = None
    at: float = 0.0

    @property
    def alive(self) -> tuple[NodeView, ...]:
        """The nodes that are part of the cluster."""
        return tuple(node for node in self.nodes if node.alive)

    @property
    def head(self) -> NodeView | None:
        """The head node, even while it is drained; None if it runs no raylet or is gone."""
        return next((node for node in self.alive if node.is_head), None)

    def node(self, node_id: NodeId) -> NodeView | None:
        """Return the node with this id."""
        return next((node for node in self.nodes if node.node_id == node_id), None)

    def waits_for(self, resources: Mapping[str, float], labels: Mapping[str, str]) -> bool:
        """Return whether a request with these resources and labels waits for a node."""
        return any(
            dict(demand.resources) == dict(resources) and dict(demand.labels) == dict(labels) for demand in self.waiting
        )


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """A notice that a machine will end at `deadline`, in Unix seconds; 0 is no deadline."""

    node: NodeId
    deadline: float
    reason: str


def node_changes(view: ClusterView) -> dict[NodeId, NodeChange]:
    """Return the nodes of a cluster as a history knows them."""
    return {
        node.node_id: NodeChange(
            node.name or node.address or str(node.node_id),
            node.group,
            None if node.end is None else f"{node.end.value}{f': {node.end_reason}' if node.end_reason else ''}",
        )
        for node in view.nodes
    }


def drain_notices(view: ClusterView) -> tuple[DrainNotice, ...]:
    """Return the drain notices that Ray knows."""
    return tuple(
        DrainNotice(node.node_id, node.drain_deadline, "Ray drains its node")
        for node in view.nodes
        if node.alive and node.drain_deadline is not None
    )


def drain_events(
    known: Mapping[NodeId, float], notices: Iterable[DrainNotice], now: float, unix_now: float
) -> tuple[NodeDraining, ...]:
    """Return the events for notices that are new, changed or withdrawn, compared with the deadlines in `known`.

    `known` and the events use the core's clock, which shows `now` while the wall clock shows `unix_now`. A drain
    without a deadline ends as soon as the node is idle: its deadline is now, so that nothing new starts there.
    """
    current: dict[NodeId, NodeDraining] = {}
    for notice in notices:
        deadline = now + (notice.deadline - unix_now) if notice.deadline > 0.0 else known.get(notice.node, now)
        earlier = current.get(notice.node)
        if earlier is None or deadline < earlier.deadline:
            current[notice.node] = NodeDraining(now, notice.node, deadline, notice.reason)
    changed = [event for node, event in current.items() if abs(event.deadline - known.get(node, inf)) > _SAME_SECONDS]
    withdrawn = [NodeDraining(now, node, inf, "the notice was withdrawn") for node in known if node not in current]
    return (*changed, *withdrawn)


def start_obstacle(
    view: ClusterView, resources: Mapping[str, float], labels: Mapping[str, str], group: str = ""
) -> str:
    """Return why no node can take a worker with these needs at once; "" if one could."""
    labelled = [node for node in view.alive if _has_labels(node, labels)]
    if not labelled:
        wanted = ", ".join(f"{key}={value}" for key, value in labels.items())
        return _with_launches(f"no node has the labels {wanted}", view, group)
    fitting = [node for node in labelled if _fits(dict(node.total), resources)]
    if not fitting:
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
        return _with_launches(f"no node{' with these labels' if labels else ''} has {wanted}", view, group)
    usable = [node for node in fitting if node.drain_deadline is None]
    if not usable:
        return _with_launches("all nodes for it are draining", view, group)
    if not any(_fits(dict(node.free), resources) for node in usable):
        return _with_launches(f"the {_nodes(len(usable))} for it {_are(len(usable))} in use", view, group)
    return ""


def launch_failure(
    view: ClusterView, group: str, resources: Mapping[str, float], labels: Mapping[str, str], since: float
) -> str:
    """Return why the autoscaler cannot provide a node of `group` that was requested at `since` (Unix seconds): its
    latest launch failed (stock-out, quota), or no node type satisfies the demand; "" if it reports nothing against it.

    The autoscaler repeats failed launches at once; a repetition is no reason to wait for it.
    """
    if view.autoscaler is None:
        return ""
    failed = [launch for launch in view.autoscaler.failed if launch.group == group and launch.at >= since - _TICK]
    if failed:
        last = max(failed, key=lambda launch: launch.at)
        if not any(launch.group == group and launch.at < last.at for launch in view.autoscaler.pending):
            return f"the autoscaler could not launch it: {last.failure}"
    for demand in view.autoscaler.infeasible:
        if dict(demand.labels) == dict(labels) and dict(demand.resources) == dict(resources):
            return "no node type of the autoscaler has these resources and labels"
    return ""


def group_of(node: NodeView, groups: Sequence[NodeGroup]) -> str:
    """Return the group of a node: the most specific group with labels and resources that it has; "" if none."""
    fitting = [
        group
        for group in groups
        if _has_labels(node, dict(group.labels))
        and _fits(dict(node.total), {GPU: group.gpus_per_node, **dict(group.resources)})
        and (not group.gpu_type or node.gpu_type in ("", group.gpu_type))
    ]
    named = [group for group in fitting if group.name == node.group]
    best = named or sorted(fitting, key=lambda group: -len(group.labels) - len(group.resources))
    return best[0].name if best else ""


def _with_launches(obstacle: str, view: ClusterView, group: str) -> str:
    """Append what the autoscaler does about it."""
    if view.autoscaler is None:
        return obstacle
    pending = [launch for launch in view.autoscaler.pending if not group or launch.group == group]
    if pending:
        count = sum(launch.count for launch in pending)
        return f"{obstacle}; the autoscaler is launching {_nodes(count)}"
    failed = [launch for launch in view.autoscaler.failed if not group or launch.group == group]
    if failed:
        return f"{obstacle}; the last launch failed: {max(failed, key=lambda launch: launch.at).failure}"
    return obstacle


def _has_labels(node: NodeView, labels: Mapping[str, str]) -> bool:
    own = dict(node.labels)
    return all(own.get(key) == value for key, value in labels.items())


def _fits(available: Mapping[str, float], resources: Mapping[str, float]) -> bool:
    return all(available.get(name, 0.0) >= amount for name, amount in resources.items())


def _nodes(count: int) -> str:
    return counted(count, "node")


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
