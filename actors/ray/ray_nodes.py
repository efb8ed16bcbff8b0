"""Reads nodes, drain notices, the autoscaler's report, the pools of the cluster and the ends of actors from Ray.

All private and unstable names of Ray that modelpool uses for this are in this module; `self_test` names the one that an
installed Ray lacks. Conversions are pure functions of Ray's messages, separate from the calls that fetch them. Calls to
the cluster's control service (GCS) run in threads of this module, never on the event loop, and have time limits.

Measured with Ray 2.60 on loopback: a poll takes 2 ms; a drain request is visible in the next poll.

Imports Ray at once: import this module after a session is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import ray.util.accelerators
from ray.core.generated import autoscaler_pb2, common_pb2, gcs_pb2

from modelpool.actors.control.cluster_view import (
    AutoscalerView,
    ClusterView,
    NodeEnd,
    NodeLaunch,
    NodeView,
    ResourceDemand,
)
from modelpool.actors.control.losses import Death
from modelpool.pool.values.specs.spec import NO_NODE, NodeId

_Value = TypeVar("_Value")

#: limits of one call to the control service, and of a connection to a raylet
CALL_SECONDS, CONNECT_SECONDS = 5.0, 0.5
#: dead nodes are part of the view for this long
DEAD_NODE_SECONDS = 3600.0
#: drained nodes that are remembered after their end
_DRAINED_REMEMBERED = 4096
#: calls to the control service that wait at the same time
_THREADS = 2

#: for failed launches: Ray 2.60 often leaves the reason out
_NO_REASON = "Ray gives no reason; its log monitor.log on the head node has it"

#: names on which this module depends: where, and which
_STATE_CALLS = ("get_actor_info", "actor_table", "_gen_actor_info", "get_draining_nodes")
_GCS_CALLS = ("get_all_node_info", "get_cluster_status", "drain_node")
_FIELDS: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    (
        gcs_pb2,
        "GcsNodeInfo",
        (
            "node_id", "state", "node_name", "node_manager_address", "node_manager_port", "node_type_name",
            "is_head_node", "labels", "resources_total", "end_time_ms", "death_info",
        ),
    ),
    (gcs_pb2, "ActorTableData", ("state", "node_id", "address", "death_cause")),
    (common_pb2, "NodeDeathInfo", ("reason", "reason_message")),
    (
        common_pb2,
        "ActorDeathCause",
        ("creation_task_failure_context", "runtime_env_failed_context", "actor_died_error_context", "oom_context"),
    ),
    (common_pb2, "ActorDiedErrorContext", ("reason", "error_message", "node_death_info")),
    (autoscaler_pb2, "GetClusterStatusReply", ("autoscaling_state", "cluster_resource_state")),
    (autoscaler_pb2, "ClusterResourceState", ("node_states", "pending_resource_requests")),
    (autoscaler_pb2, "NodeState", ("node_id", "available_resources", "total_resources")),
    (
        autoscaler_pb2,
        "AutoscalingState",
        (
            "autoscaler_state_version", "pending_instance_requests", "pending_instances", "failed_instance_requests",
            "infeasible_resource_requests",
        ),
    ),
)  # fmt: skip

#: of rows of Ray's table of actors
_ROW_KEYS = ("ActorClassName", "Name", "Address", "OwnerAddress")
#: class names of our actors in Ray's table
_CONTROLLER_CLASS, _WORKER_CLASS = "ControllerActor", "GpuWorkerActor"
#: between the name of a pool, which cannot contain it, and the rest of the name of one of its workers
NAME_SEPARATOR = ":"

_ENDS: Mapping[str, NodeEnd] = {
    "EXPECTED_TERMINATION": NodeEnd.EXPECTED,
    "UNEXPECTED_TERMINATION": NodeEnd.UNEXPECTED,
    "AUTOSCALER_DRAIN_PREEMPTED": NodeEnd.PREEMPTED,
    "AUTOSCALER_DRAIN_IDLE": NodeEnd.IDLE,
}
_DEATHS_OF_NODES: Mapping[NodeEnd, Death] = {
    NodeEnd.EXPECTED: Death.NODE_SHUT_DOWN,
    NodeEnd.PREEMPTED: Death.NODE_DRAINED,
    NodeEnd.IDLE: Death.NODE_DRAINED,
}
_DEATHS: Mapping[str, Death] = {
    "NODE_DIED": Death.NODE_DIED,
    "RAY_KILL": Death.ENDED_BY_RAY,
    "OWNER_DIED": Death.ENDED_BY_RAY,
    "OUT_OF_SCOPE": Death.ENDED_BY_RAY,
    "REF_DELETED": Death.ENDED_BY_RAY,
}
#: the type of a process's end is only part of the text of its record
_EXIT_TYPE = re.compile(r"Worker exit type: (\w+)")
_EXITED_BY_ITSELF = re.compile(r"Worker exits with an exit code -?\d+")
_DEATHS_OF_EXITS: Mapping[str, Death] = {
    "INTENDED_USER_EXIT": Death.EXITED,
    "USER_ERROR": Death.EXITED,
    "INTENDED_SYSTEM_EXIT": Death.ENDED_BY_RAY,
    "NODE_OUT_OF_MEMORY": Death.MEMORY_MONITOR,
}


@dataclass(frozen=True, slots=True)
class ActorReport:
    """An actor, as the control service knows it.

    node     its node; "" while it waits for one
    death    how it ended; None while it lives, or waits for a node
    message  the control service's sentence about its end
    """

    node: NodeId
    death: Death | None = None
    message: str = ""


def self_test() -> None:
    """Check that this Ray has all names that this module uses. Raises RuntimeError naming the missing one."""
    for name in _GCS_CALLS:
        _require(hasattr(ray._raylet.GcsClient, name) or hasattr(ray._raylet.InnerGcsClient, name), f"GcsClient.{name}")
    for name in _STATE_CALLS:
        _require(hasattr(ray._private.state.GlobalState, name), f"GlobalState.{name}")
    row = ray._private.state.GlobalState()._gen_actor_info(gcs_pb2.ActorTableData())
    for key in _ROW_KEYS:
        _require(key in row, f"{key} in rows of actors")
        if key.endswith("Address"):
            _require(row[key].keys() >= {"IPAddress", "Port"}, f"{key}.IPAddress and Port in rows of actors")
    for module, message, fields in _FIELDS:
        _require(hasattr(module, message), message)
        known = getattr(module, message).DESCRIPTOR.fields_by_name
        for field in fields:
            _require(field in known, f"{message}.{field}")
    reasons = common_pb2.NodeDeathInfo.Reason.keys()
    for reason in _ENDS:
        _require(reason in reasons, f"NodeDeathInfo.{reason}")
    reasons = common_pb2.ActorDiedErrorContext.Reason.keys()
    for reason in _DEATHS:
        _require(reason in reasons, f"ActorDiedErrorContext.{reason}")
    for name in ("DRAIN_NODE_REASON_PREEMPTION", "DRAIN_NODE_REASON_IDLE_TERMINATION"):
        _require(hasattr(autoscaler_pb2, name), name)


def _require(has: bool, name: str) -> None:
    if not has:
        raise RuntimeError(f"Ray {ray.__version__} lacks {name}, with which modelpool reads the state of the cluster")


class RayNodes:
    """The cluster that this process is connected to."""

    def __init__(self) -> None:
        """Raises RuntimeError if this Ray lacks a name that is needed."""
        self_test()
        self._threads = ThreadPoolExecutor(_THREADS, "ray nodes")
        #: nodes that were drained at some poll, oldest first
        self._drained: dict[NodeId, None] = {}
        #: the latest poll, or the one that is under way
        self._latest: asyncio.Task[ClusterView] | None = None
        #: when it was asked, in monotonic seconds: a view must not last longer because the wall clock was set back
        self._asked_at = 0.0

    async def poll(self) -> ClusterView:
        """Return the nodes, waiting demand and the autoscaler's report. Raises TimeoutError or Ray's errors if the
        control service does not answer."""
        view = await self._in_thread(read_cluster)
        self._note_drained(node.node_id for node in view.nodes if node.drain_deadline is not None)
        return view

    async def recent(self, max_age_seconds: float) -> ClusterView:
        """Return a view that is at most this old. Callers that ask at the same time share one poll."""
        latest = self._latest
        if latest is not None and latest.done() and (latest.cancelled() or latest.exception() is not None):
            latest = None
        if latest is None or (latest.done() and time.monotonic() - self._asked_at > max_age_seconds):
            self._asked_at = time.monotonic()
            latest = self._latest = asyncio.ensure_future(self.poll())
        return await asyncio.shield(latest)

    def was_draining(self, node_id: NodeId) -> bool:
        """Return whether a poll has found the node draining, even if it is gone now."""
        return node_id in self._drained

    async def actor(self, actor_id: str) -> ActorReport | None:
        """Return the control service's record of the actor with this id (hex); None if it has none."""
        return await self._in_thread(lambda: self._actor(actor_id))

    async def workers_by_pool(self) -> Mapping[str, int]:
        """See `ClusterNodes`."""
        rows = await self._in_thread(lambda: ray._private.state.state.actor_table(None, actor_state_name="ALIVE"))
        return pools_of(rows.values())

    async def drain(self, node_id: NodeId, deadline: float, reason: str) -> str:
        """Let Ray drain a node: it starts nothing new there, and the node counts as preempted when it ends. `deadline`
        is in Unix seconds. Returns "", or why Ray refuses."""

        def request() -> str:
            accepted, message = _gcs().drain_node(
                node_id,
                autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION,
                reason,
                int(deadline * 1000),
                timeout=CALL_SECONDS,
            )
            return "" if accepted else str(message)

        self._note_drained((node_id,))
        return await self._in_thread(request)

    def close(self) -> None:
        """End the threads; calls that wait are abandoned."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_drained(self, node_ids: Iterable[NodeId]) -> None:
        for node_id in node_ids:
            self._drained[node_id] = None
        for oldest in tuple(self._drained)[:-_DRAINED_REMEMBERED]:
            del self._drained[oldest]

    async def _in_thread(self, call: Callable[[], _Value]) -> _Value:
        loop = asyncio.get_running_loop()
        return await asyncio.wait_for(loop.run_in_executor(self._threads, call), 2 * CALL_SECONDS)

    def _actor(self, actor_id: str) -> ActorReport | None:
        record = ray._private.state.state.get_actor_info(ray.ActorID.from_hex(actor_id))
        return None if record is None else actor_report(gcs_pb2.ActorTableData.FromString(record))


def read_cluster() -> ClusterView:
    """Read the nodes, waiting demand and the autoscaler's report. Raises Ray's errors if the control service does not
    answer in time; waits, so event loops call `RayNodes.poll`."""
    gcs, now = _gcs(), time.time()
    infos = gcs.get_all_node_info(timeout=CALL_SECONDS).values()
    draining = _draining_nodes(gcs)
    status = autoscaler_pb2.GetClusterStatusReply.FromString(gcs.get_cluster_status(timeout_s=CALL_SECONDS))
    return cluster_view(infos, draining, status, now)


def _draining_nodes(gcs: Any) -> Mapping[str, int]:
    """Return the drained nodes, and when they end in milliseconds. The source is the client of the control service.
    Before Ray 2.60 the client lacks it, and the source is the table of the state, without a limit of time."""
    if hasattr(gcs, "get_draining_nodes"):
        found: Mapping[str, int] = gcs.get_draining_nodes(timeout=CALL_SECONDS)
    else:
        found = ray._private.state.state.get_draining_nodes()
    return found


def this_node() -> NodeId:
    """Return the node that this process is connected to."""
    return NodeId(ray.get_runtime_context().get_node_id())


def accelerator_types() -> frozenset[str]:
    """Return Ray's names of accelerator types, such as "H100"."""
    names = vars(ray.util.accelerators)
    return frozenset(value for name, value in names.items() if name.isupper() and isinstance(value, str))


async def raylet_answers(node: NodeView) -> bool:
    """Return whether a node's raylet accepts connections."""
    if not node.port:
        return node.alive
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(node.address, node.port), CONNECT_SECONDS)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def cluster_view(
    infos: Iterable[Any], draining: Mapping[str, int], status: autoscaler_pb2.GetClusterStatusReply, now: float
) -> ClusterView:
    """Convert Ray's records of nodes (GcsNodeInfo), deadlines by node (hex -> Unix milliseconds) and status. Nodes are
    ordered by name; those that died long ago are left out."""
    states = {state.node_id: state for state in status.cluster_resource_state.node_states}
    nodes = [
        _node_view(info, states.get(info.node_id), draining.get(info.node_id.hex()))
        for info in infos
        if info.state == gcs_pb2.GcsNodeInfo.ALIVE or info.end_time_ms / 1000 > now - DEAD_NODE_SECONDS
    ]
    requests = status.cluster_resource_state.pending_resource_requests
    return ClusterView(
        nodes=tuple(sorted(nodes, key=lambda node: (not node.is_head, node.name, node.node_id))),
        waiting=tuple(_demand(request.request, request.count) for request in requests),
        autoscaler=_autoscaler_view(status),
        at=now,
    )


def pools_of(actors: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of workers of each pool, by the pool's name, from rows of Ray's table of actors: the name of a
    worker that outlives its controller begins with the pool's; others belong to the controller that owns them.
    """
    actors = tuple(actors)
    controllers = {
        (actor["Address"]["IPAddress"], actor["Address"]["Port"]): actor["Name"]
        for actor in actors
        if actor["ActorClassName"] == _CONTROLLER_CLASS
    }
    workers = [actor for actor in actors if actor["ActorClassName"] == _WORKER_CLASS]
    pools: Counter[str] = Counter()
    for worker in workers:
        owner = worker["OwnerAddress"]["IPAddress"], worker["OwnerAddress"]["Port"]
        pool, is_named, _ = worker["Name"].partition(NAME_SEPARATOR)
        if is_named or owner in controllers:
            pools[pool if is_named else controllers[owner]] += 1
    return dict(pools)


def actor_report(record: gcs_pb2.ActorTableData) -> ActorReport:
    """Convert the control service's record of an actor."""
    if record.state not in (gcs_pb2.ActorTableData.ALIVE, gcs_pb2.ActorTableData.DEAD):
        return ActorReport(NO_NODE)  # the record of a pending actor names the node that looks for one
    node_id = record.node_id or record.address.node_id
    node = NodeId("" if node_id == ray.NodeID.nil().binary() else node_id.hex())
    if record.state == gcs_pb2.ActorTableData.ALIVE:
        return ActorReport(node)
    cause = record.death_cause
    match cause.WhichOneof("context"):
        case "oom_context":
            return ActorReport(node, Death.MEMORY_MONITOR, cause.oom_context.error_message)
        case "runtime_env_failed_context":
            return ActorReport(node, Death.START_FAILED, cause.runtime_env_failed_context.error_message)
        case "creation_task_failure_context":
            return ActorReport(node, Death.START_FAILED, cause.creation_task_failure_context.formatted_exception_string)
        case "actor_died_error_context":
            died = cause.actor_died_error_context
            death = _DEATHS.get(common_pb2.ActorDiedErrorContext.Reason.Name(died.reason), Death.PROCESS_ENDED)
            if death is Death.NODE_DIED:
                death = death_of_node(_node_end(died.node_death_info))
            elif death is Death.PROCESS_ENDED:
                death = _death_of_process(died.error_message)
            return ActorReport(node, death, died.error_message)
        case _:
            return ActorReport(node, Death.PROCESS_ENDED)


def _death_of_process(message: str) -> Death:
    """Return the death of a process by the text that Ray's node wrote about it."""
    found = _EXIT_TYPE.search(message)
    if found and found[1] in _DEATHS_OF_EXITS:
        return _DEATHS_OF_EXITS[found[1]]
    return Death.EXITED if _EXITED_BY_ITSELF.search(message) else Death.PROCESS_ENDED


def death_of_node(end: NodeEnd) -> Death:
    """Return the death of a worker after its node ended like this."""
    return _DEATHS_OF_NODES.get(end, Death.NODE_DIED)


def _gcs() -> Any:
    """Return this process's client of the control service."""
    return ray._private.worker.global_worker.gcs_client


def _node_view(info: Any, state: Any, deadline_ms: int | None) -> NodeView:
    alive = info.state == gcs_pb2.GcsNodeInfo.ALIVE
    return NodeView(
        node_id=NodeId(info.node_id.hex()),
        name=info.node_name,
        address=info.node_manager_address,
        port=info.node_manager_port,
        group=info.node_type_name,
        is_head=info.is_head_node,
        labels=_pairs(info.labels),
        total=_pairs(info.resources_total),
        free=_pairs(state.available_resources) if state is not None and alive else (),
        drain_deadline=None if deadline_ms is None or not alive else deadline_ms / 1000,
        end=None if alive else _node_end(info.death_info),
        end_reason="" if alive else info.death_info.reason_message,
    )


def _node_end(death_info: Any) -> NodeEnd:
    return _ENDS.get(common_pb2.NodeDeathInfo.Reason.Name(death_info.reason), NodeEnd.UNKNOWN)


def _autoscaler_view(status: autoscaler_pb2.GetClusterStatusReply) -> AutoscalerView | None:
    """Return the autoscaler's report; None if none has ever reported."""
    state = status.autoscaling_state
    if not status.HasField("autoscaling_state") or not state.autoscaler_state_version:
        return None
    requested = [
        NodeLaunch(launch.ray_node_type_name, launch.count, at=float(launch.request_ts))
        for launch in state.pending_instance_requests
    ]
    starting = [
        NodeLaunch(instance.ray_node_type_name, 1, details=instance.details) for instance in state.pending_instances
    ]
    failed = [
        NodeLaunch(
            launch.ray_node_type_name, launch.count, at=float(launch.failed_ts), failure=launch.reason or _NO_REASON
        )
        for launch in state.failed_instance_requests
    ]
    infeasible = tuple(_demand(request, 1) for request in state.infeasible_resource_requests)
    return AutoscalerView((*requested, *starting), tuple(failed), infeasible)


def _demand(request: Any, count: int) -> ResourceDemand:
    labels = {
        constraint.label_key: ",".join(constraint.label_values)
        for selector in request.label_selectors
        for constraint in selector.label_constraints
    }
    return ResourceDemand(_pairs(request.resources_bundle), _pairs(labels), count)


def _pairs(values: Mapping[str, _Value]) -> tuple[tuple[str, _Value], ...]:
    return tuple(sorted(values.items()))
