"""`RemoteCatalog`: the catalog of a controller on a node without the model files, as an actor on a node that has them.

Imports Ray at once: import this module after a session is open. Rules
1. If the catalog's node is lost, the next node that has the files takes over, and the question is asked again: answers
   depend on nothing but the files. When none is left, the nodes are searched again: others may have joined.
2. Measurements (`learn`) are sent in batches and may be lost with a node: they only improve estimates.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, TypeVarTuple, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from modelpool.actors.config.config import ModelsSection
from modelpool.actors.control.catalog_place import added_paths, existing, nodes_for_catalog, paths_of
from modelpool.actors.control.catalog_questions import LEARN_ALL, CatalogQuestion
from modelpool.actors.control.catalog_service import LEARN_BATCH, CatalogService
from modelpool.actors.control.cluster_facts import names_of
from modelpool.actors.control.cluster_view import NodeView
from modelpool.actors.control.opened_catalog import ListingCatalog
from modelpool.actors.ray.node_affinity import on_node
from modelpool.actors.ray.ray_nodes import read_cluster
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import NodeId, RunCost, TaskSpec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: nodes on which a question is asked before it fails
MOST_TRIES = 5
#: how long a node has to answer which files it has; it may have to start a process
PROBE_SECONDS = 60.0


class RemoteCatalog:
    """A `CatalogQueries`."""

    def __init__(
        self,
        open_catalog: Callable[[], ListingCatalog],
        nodes: Sequence[NodeId],
        find_nodes: Callable[[], Sequence[NodeId]],
        computed_by: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`nodes` have the files; the first runs the catalog. `find_nodes` searches them again, in another thread; it
        raises UserError if no node has the files. `computed_by` is for recipes.
        """
        self._computed_by = dict(computed_by)
        self._open_catalog = open_catalog
        self._nodes = list(nodes)
        self._find_nodes = find_nodes
        self._finding = asyncio.Lock()
        self._actor: ActorHandle[Any] | None = None
        self._measured: list[tuple[TaskSpec, RunCost]] = []

    @property
    def files_address(self) -> str:
        """See `CatalogQueries`. Not known here: the workers of that node serve the same files."""
        return ""

    def learn(self, task: TaskSpec, cost: RunCost) -> None:
        """See `CatalogQueries`."""
        self._measured.append((task, cost))
        if len(self._measured) >= LEARN_BATCH:
            self._send_measured()

    def close(self) -> None:
        """End the actor."""
        actor, self._actor, self._nodes = self._actor, None, []
        if actor is not None:
            ray.kill(actor)

    async def ask(self, question: CatalogQuestion[*Ts, T], *arguments: *Ts) -> T:
        """See `CatalogQueries`. Raises UserError after `MOST_TRIES`."""
        problem = ""
        for _ in range(MOST_TRIES):
            actor = await self._started()
            self._send_measured()
            try:
                return cast("T", await actor.ask.remote(question, *arguments))
            except RayTaskError as raised:
                raise raised.cause from None
            except RayError as lost:
                problem = " ".join(str(lost).split())
                if self._actor is actor:  # the first call that notices
                    self._actor = None
                    del self._nodes[:1]
        raise UserError(f"the catalog of the models was lost {MOST_TRIES} times in a row; the last time: {problem}")

    async def _started(self) -> ActorHandle[Any]:
        async with self._finding:
            if not self._nodes:
                self._nodes = list(await asyncio.to_thread(self._find_nodes))
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._create, self._nodes[0])
            return self._actor

    def _create(self, node: NodeId) -> ActorHandle[Any]:
        """Create the actor. Blocks while Ray's control service does not answer."""
        options = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
        actor_class: Any = ray.remote(CatalogService)
        placed = actor_class.options(**options, **on_node(node))
        actor: ActorHandle[Any] = placed.remote(self._open_catalog, computed_by=self._computed_by)
        return actor

    def _send_measured(self) -> None:
        measured, self._measured = self._measured, []
        if measured and self._actor is not None:
            self._actor.ask.remote(LEARN_ALL, measured)


def catalog_nodes(
    models: ModelsSection,
    controller: NodeId,
    driver: NodeId,
    nodes: Sequence[NodeView],
    environment: Mapping[str, Any] | None = None,
) -> tuple[NodeId, ...]:
    """Return the nodes that can run the catalog, best first: () if the controller's node can, since it has the files.
    Asks the other nodes only if the driver's node, on which this is called, is not the controller's or lacks files. If
    models were added to the driver's registry, its node is the best. `environment` is the runtime environment of tasks.

    Raises UserError if no node has the files.
    """
    added = added_paths(models)
    paths = (*paths_of(models), *added)
    if len(nodes) == 1 or not paths or (controller == driver and existing(paths) == frozenset(paths)):
        return ()
    found = dict.fromkeys((node.node_id for node in nodes), frozenset[Path]()) | _probed(paths, nodes, environment)
    preferred = (driver, controller) if added else (controller, driver)
    chosen = nodes_for_catalog(paths, found, preferred, names_of(nodes))
    return () if not chosen or chosen[0] == controller else chosen


def search_again(models: ModelsSection, here: NodeId) -> tuple[NodeId, ...]:
    """Return the nodes that can run the catalog of a controller on `here`, itself included. Raises UserError."""
    paths, nodes = paths_of(models), read_cluster().alive
    return nodes_for_catalog(paths, _probed(paths, nodes, None), (here,), names_of(nodes))


def _probed(
    paths: Sequence[Path], nodes: Sequence[NodeView], environment: Mapping[str, Any] | None
) -> dict[NodeId, frozenset[Path]]:
    """Ask every node which of `paths` it has. Nodes that do not answer are left out."""
    ask: Any = ray.remote(max_retries=0, runtime_env=environment)(existing)
    calls: dict[Any, NodeId] = {
        ask.options(**on_node(node.node_id)).remote(tuple(paths)): node.node_id for node in nodes
    }
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=PROBE_SECONDS)
    found = {}
    for ref in ready:
        try:
            found[calls[ref]] = ray.get(ref)
        except RayError:
            continue  # the node is gone, or cannot run our code; workers report the reason
    return found
