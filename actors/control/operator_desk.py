"""`OperatorDesk`: takes the orders of operators: finds the node or the worker that they name, and tells the core."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from modelpool.actors.control.cluster_facts import names_of
from modelpool.actors.control.cluster_view import ClusterView, NodeView
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.fleet import Clock
from modelpool.actors.control.node_watch import ClusterNodes
from modelpool.actors.control.operator_orders import OperatorOrder, Order, OrderTaken
from modelpool.pool.values.core.errors import UnusableField, unusable_field
from modelpool.pool.values.specs.spec import NO_NODE, NO_WORKER, NodeId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.messages import Cordoned, DisruptionsAllowed, RestartRequested, Uncordoned
from modelpool.scheduler.model.workers import Worker, WorkerState

logger = logging.getLogger(__name__)

#: names that an error lists
MOST_NAMED = 16
#: interval of looking whether a maintenance window has begun or ended
WINDOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """What an order names: a node with its display name, or a worker."""

    name: str
    node: NodeId = NO_NODE
    worker_id: WorkerId = NO_WORKER


class OperatorDesk:
    """The orders of one pool."""

    def __init__(
        self,
        state: SchedulerState,
        dispatcher: Dispatcher,
        nodes: ClusterNodes | None,
        obstacle: Callable[[float], str] = lambda unix_seconds: "",
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`nodes` are the nodes of the cluster; None: only nodes with workers are known, by their ids. `obstacle` says
        why the pool may not be disrupted at a time; "" if it may."""
        self._state = state
        self._dispatcher = dispatcher
        self._nodes = nodes
        self._obstacle = obstacle
        self._unix_time = unix_time
        #: why the windows could not be read last; "" if they could
        self._windows_trouble = ""

    async def take(self, order: OperatorOrder) -> OrderTaken:
        """Begin to carry out an order. Raises UnusableField for a place that the pool does not have, and for an order
        that a limit forbids."""
        place = self._find(order, await self._known_nodes())
        workers = [worker for worker in self._state.worker_table.workers.values() if _is_at(worker, place)]
        warnings = self._warnings(order, place, workers)
        at = self._dispatcher.now
        match order.order:
            case Order.CORDON:
                self._dispatcher.post(Cordoned(at, place.node, place.worker_id))
            case Order.UNCORDON:
                self._dispatcher.post(Uncordoned(at, place.node, place.worker_id))
            case Order.DRAIN:
                self._dispatcher.post(Cordoned(at, place.node, place.worker_id, at + order.seconds))
            case Order.RESTART:
                self._dispatcher.post(RestartRequested(at, place.worker_id, at + order.seconds))
        return OrderTaken(
            order.order, place.name, bool(place.node), tuple(str(worker.worker_id) for worker in workers), warnings
        )

    def follow_cluster(self, view: ClusterView) -> None:
        """Withdraw the cordons of nodes that have left the cluster: one that joins again has another id."""
        alive = {node.node_id for node in view.nodes if node.alive}
        for node in [node for node in self._state.worker_table.cordons.nodes if node not in alive]:
            self._dispatcher.post(Uncordoned(self._dispatcher.now, node))

    async def keep_watching_windows(self, clock: Clock) -> None:
        """Tell the core when maintenance windows begin and end, until cancelled."""
        while True:
            obstacle = self._window_obstacle()
            if obstacle != self._state.worker_table.cordons.obstacle:
                self._dispatcher.post(DisruptionsAllowed(self._dispatcher.now, obstacle))
            await clock.sleep(WINDOW_SECONDS)

    def _window_obstacle(self) -> str:
        """Return why the pool may not be disrupted now; "" if it may. Windows that cannot be read are an obstacle: this
        machine may lack the database of time zones. That is logged once."""
        try:
            obstacle, trouble = self._obstacle(self._unix_time()), ""
        except Exception as failed:
            trouble = f"the maintenance windows cannot be read ({type(failed).__name__}: {failed})"
            obstacle = trouble
            if trouble != self._windows_trouble:
                logger.warning("nodes are not given up: %s", trouble)
        self._windows_trouble = trouble
        return obstacle

    async def _known_nodes(self) -> Sequence[NodeView]:
        """Return the nodes of the cluster that are alive; if they cannot be read, those with workers or a cordon."""
        if self._nodes is not None:
            try:
                return (await self._nodes.recent(0.0)).alive
            except Exception:  # the cluster does not answer: the pool knows the ids of its own nodes
                pass
        workers = self._state.worker_table.workers.values()
        ids = [worker.spec.node for worker in workers if worker.spec is not None and worker.spec.node]
        return tuple(NodeView(node) for node in dict.fromkeys((*ids, *self._state.worker_table.cordons.nodes)))

    def _find(self, order: OperatorOrder, nodes: Sequence[NodeView]) -> Place:
        """Return what an order names. Raises UnusableField."""
        named, kind = order.place, order.order
        workers = self._state.worker_table.workers
        is_worker = WorkerId(named) in workers or (kind is not Order.RESTART and self._is_cordoned(named))
        if kind is not Order.DRAIN and is_worker:
            return Place(named, worker_id=WorkerId(named))
        names = names_of(nodes)
        if kind is not Order.RESTART:
            found = _matching(named, nodes, names)
            if len(found) == 1:
                return Place(names[found[0].node_id] or str(found[0].node_id), found[0].node_id)
            if found:
                several = ", ".join(sorted(names[node.node_id] for node in found))
                raise unusable_field(kind.value, named, f"the name of one node: this may be {several}")
        known = [str(worker_id) for worker_id in workers] if kind is not Order.DRAIN else []
        expected = []
        if kind is not Order.RESTART:
            expected.append(f"a node ({_some(_described(node, names) for node in nodes)})")
        if kind is not Order.DRAIN:
            expected.append(f"a worker ({_some(known)})")
        raise unusable_field(kind.value, named, " or ".join(expected))

    def _is_cordoned(self, worker_id: str) -> bool:
        return WorkerId(worker_id) in self._state.worker_table.cordons.workers

    def _warnings(self, order: OperatorOrder, place: Place, workers: Sequence[Worker]) -> tuple[str, ...]:
        """Return what the operator should know. Raises UnusableField if the order must wait, or has no effect."""
        cordons, warnings = self._state.worker_table.cordons, []
        if order.order is Order.UNCORDON:
            if place.node not in cordons.nodes and place.worker_id not in cordons.workers:
                warnings.append(f"{place.name} was not cordoned")
            node = next((worker.spec.node for worker in workers if worker.spec is not None), NO_NODE)
            if place.worker_id and node in cordons.nodes:
                warnings.append(f"the node of {place.name} is cordoned too: it takes no tasks until that is uncordoned")
            return tuple(warnings)
        if order.order is Order.RESTART and not (workers[0].live and workers[0].wanted):
            doing = _why_not_restarted(workers[0])
            raise UnusableField(f"restart: {place.name} has no process that could be replaced; it {doing}")
        if order.order is not Order.CORDON:
            obstacle = self._window_obstacle() or self._limit(order, place)
            if obstacle and not order.is_forced:
                raise UnusableField(f"{order.order.value}: {obstacle}; --force does it all the same")
            if obstacle:
                warnings.append(f"forced: {obstacle}")
        if order.order is not Order.RESTART and not self._has_others(place):
            warnings.append("no other worker takes tasks: what waits, waits until this one is uncordoned")
        if place.node and not workers:
            warnings.append(f"no worker of this pool is on node {place.name}")
        return tuple(warnings)

    def _limit(self, order: OperatorOrder, place: Place) -> str:
        """Return why another node may not become unavailable; "" if it may."""
        most = self._state.config.max_unavailable_nodes
        if most is None or order.order is not Order.DRAIN:
            return ""
        others = self._state.unavailable_nodes() - {place.node}
        if len(others) < most:
            return ""
        return f"{len(others)} of at most {most} nodes are unavailable (max_unavailable)"

    def _has_others(self, place: Place) -> bool:
        workers = self._state.worker_table.workers.values()
        return any(worker.takes_tasks and worker.live for worker in workers if not _is_at(worker, place))


def _why_not_restarted(worker: Worker) -> str:
    if worker.live:
        return "leaves the pool"
    if worker.status is WorkerState.DRAINED:
        return "is ended: its node is drained"
    return f"is {worker.status.value.replace('_', ' ')}"


def _is_at(worker: Worker, place: Place) -> bool:
    if place.worker_id:
        return worker.worker_id == place.worker_id
    return worker.spec is not None and worker.spec.node == place.node


def _matching(named: str, nodes: Iterable[NodeView], names: dict[NodeId, str]) -> list[NodeView]:
    """Return the nodes with this name, id or address; or else all with ids that begin so."""
    nodes = tuple(nodes)
    exact = [node for node in nodes if named and named in (node.node_id, node.name, node.address, names[node.node_id])]
    return exact or [node for node in nodes if named and node.node_id.startswith(named)]


def _described(node: NodeView, names: dict[NodeId, str]) -> str:
    return " ".join(dict.fromkeys(part for part in (names[node.node_id], node.address) if part))


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f", and {len(listed) - MOST_NAMED} more" if len(listed) > MOST_NAMED else ""
    return (", ".join(listed[:MOST_NAMED]) or "there is none") + more
