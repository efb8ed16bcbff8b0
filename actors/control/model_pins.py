"""`ModelPins`: the models of which users want all weights to stay on GPUs, by the names that they gave."""

from __future__ import annotations

from modelpool.actors.control.catalog_questions import WEIGHTS
from modelpool.actors.control.catalog_service import CatalogQueries
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.actors.control.job_queue import JobQueue
from modelpool.actors.control.opened_catalog import PinnableModel
from modelpool.actors.control.status import PinnedModel
from modelpool.actors.control.task_store import TaskStore
from modelpool.pool.values.core.errors import unknown_name
from modelpool.pool.values.specs.spec import file_name
from modelpool.scheduler.core.snapshot import Snapshot
from modelpool.scheduler.model.messages import PinComponents


class ModelPins:
    """The pinned models of a pool."""

    def __init__(self, catalog: CatalogQueries, tasks: TaskStore, dispatcher: Dispatcher, queue: JobQueue) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._dispatcher = dispatcher
        self._queue = queue
        #: the weights of pinned models, by the name that a user gave
        self.weights: dict[str, PinnableModel] = {}

    async def pin(self, models: tuple[str, ...], replicas: int) -> None:
        """Keep all weights of these models on so many workers each, from now on; 0 unpins them. Raises UserError if one
        of them is unknown, or is to be unpinned and is not pinned; nothing changes then."""
        if replicas > 0:
            found = {name: await self._catalog.ask(WEIGHTS, name) for name in models}
        else:
            unknown = next((name for name in models if name not in self.weights), None)
            if unknown is not None:
                raise unknown_name("pinned model", unknown, self.weights)
            found = {}
        self._tasks.catalog_address = self._catalog.files_address
        for name in models:
            before = self.weights.pop(name, None)
            after = found.get(name)
            if before is not None and (after is None or after.keys != before.keys):
                self._withdraw(before)
            if after is not None:
                self.weights[name] = after
                self._tasks.pin(after)
                self._queue.send_components(spec for _, spec in after.components)
                names = tuple(file_name(after.parts[key].sha256) for key in after.keys)
                self._dispatcher.post(PinComponents(self._dispatcher.now, after.keys, replicas, names))

    def status(self, snapshot: Snapshot) -> tuple[PinnedModel, ...]:
        """Return the pinned models, in the order in which they were pinned."""
        known = {pin.components: pin for pin in snapshot.pins}
        return tuple(
            PinnedModel(name, pin.replicas, pin.holders, pin.loading, pin.obstacle)
            for name, weights in self.weights.items()
            if (pin := known.get(weights.keys)) is not None
        )

    def _withdraw(self, weights: PinnableModel) -> None:
        """Unpin weights, unless another name pins the same."""
        if all(other.keys != weights.keys for other in self.weights.values()):
            self._dispatcher.post(PinComponents(self._dispatcher.now, weights.keys, 0))
            self._tasks.unpin(weights.keys)
