"""`RayCluster`: the nodes and the use of GPUs of the cluster that this process is connected to, and the choice of a
node for an actor.

Imports Ray at once: import this module after a session is open. Uses one private function of Ray, `state.actors`, since
its public counterpart needs the dashboard; without it, only the names of other pools are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from modelpool.actors.control.cluster_nodes import ClusterNode, GpuUse, names_of
from modelpool.pool.core.errors import UserError
from modelpool.pool.specs.spec import NodeId

_Value = TypeVar("_Value")

#: Ray's resource of the head node
HEAD_RESOURCE = "node:__internal_head__"
#: how long an answer about the use of GPUs is repeated
FRESH_SECONDS = 2.0
#: limit of one call to Ray
CALL_SECONDS = 5.0
#: class names of our actors in Ray's table
CONTROLLER_CLASS, WORKER_CLASS = "ControllerActor", "GpuWorkerActor"
#: names of nodes that are remembered; more than any cluster has at a time
NAMES_KEPT = 10_000


class RayCluster:
    """See `Cluster`. Calls to Ray run in a thread, since they may take long and must not block the event loop; without
    Ray's control service they do not return. What cannot be read in `CALL_SECONDS` is unknown for now."""

    def __init__(self, gpus_per_worker: int = 1) -> None:
        """`gpus_per_worker` of the caller's pool; 0 if it needs none."""
        self._gpus_per_worker = gpus_per_worker
        self._names: dict[NodeId, str] = {}
        self._use: GpuUse | None = None
        self._read_at = -FRESH_SECONDS
        #: one thread: a call that does not return makes later ones wait, not more threads
        self._thread = ThreadPoolExecutor(1, "ray cluster")

    @property
    def names(self) -> Mapping[NodeId, str]:
        """See `Cluster`."""
        return self._names

    async def read_names(self, nodes: Iterable[NodeId]) -> None:
        """See `Cluster`."""
        if any(node and node not in self._names for node in nodes):
            found = names_of(await self._read(cluster_nodes) or ())
            for node_id, name in found.items():
                self._names.setdefault(node_id, name)  # a name that users have read stays
            while len(self._names) > NAMES_KEPT:
                del self._names[next(iter(self._names))]

    async def gpu_use(self) -> GpuUse | None:
        """See `Cluster`."""
        if not self._gpus_per_worker:
            return None
        if time.monotonic() - self._read_at >= FRESH_SECONDS:
            self._use = await self._read(_gpu_use)
            self._read_at = time.monotonic()
        return self._use

    async def _read(self, call: Callable[[], _Value]) -> _Value | None:
        """Call in the thread; None if there is no answer in time."""
        answer = asyncio.get_running_loop().run_in_executor(self._thread, call)
        try:
            return await asyncio.wait_for(answer, CALL_SECONDS)
        except TimeoutError:
            return None


def cluster_nodes() -> tuple[ClusterNode, ...]:
    """Return the nodes that are alive, the head first."""
    found = [
        ClusterNode(
            NodeId(node["NodeID"]),
            node.get("NodeName", ""),
            node.get("NodeManagerAddress", ""),
            HEAD_RESOURCE in node.get("Resources", {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return tuple(sorted(found, key=lambda node: not node.is_head))


def head_node() -> NodeId:
    """Return the head node. Raises UserError if the cluster has none that runs actors."""
    head = next((node.node_id for node in cluster_nodes() if node.is_head), None)
    if head is None:
        raise UserError(
            'controller = "head": the head node of this Ray cluster is not alive or runs no raylet; use "driver"'
        )
    return head


def this_node() -> NodeId:
    """Return the node that this process is connected to."""
    return NodeId(ray.get_runtime_context().get_node_id())


def on_node(node: NodeId) -> dict[str, Any]:
    """Return the options of an actor or task that runs on `node` or nowhere."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def _gpu_use() -> GpuUse:
    total, free = ray.cluster_resources().get("GPU", 0), ray.available_resources().get("GPU", 0)
    return GpuUse(int(total), int(free), pools_of(_actors()))


def _actors() -> Iterable[Mapping[str, Any]]:
    try:
        rows: Mapping[str, Mapping[str, Any]] = ray._private.state.actors(actor_state_name="ALIVE")
    except Exception:  # private: whatever it raises, only names are missing
        return ()
    return tuple(rows.values())


def pools_of(actors: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the number of workers of each pool, by the pool's name, from rows of Ray's table of actors: a worker
    belongs to the controller that owns it.
    """
    actors = tuple(actors)
    controllers = {
        (actor["Address"]["IPAddress"], actor["Address"]["Port"]): actor["Name"]
        for actor in actors
        if actor["ActorClassName"] == CONTROLLER_CLASS
    }
    owners = (
        (actor["OwnerAddress"]["IPAddress"], actor["OwnerAddress"]["Port"])
        for actor in actors
        if actor["ActorClassName"] == WORKER_CLASS
    )
    return dict(Counter(controllers[owner] for owner in owners if owner in controllers))
