"""Workers of a pool without groups: one for each GPU of the cluster, as machines join and leave."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, islice

from modelpool.actors.control.cluster_view import ClusterView
from modelpool.actors.control.dispatcher import Dispatcher
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.model.messages import WorkersWanted
from modelpool.scheduler.model.workers import Worker, WorkerState, WorkerTable


def workers_for_gpus(gpu_count: int, workers: Iterable[Worker]) -> tuple[WorkerId, ...]:
    """Return the ids of the workers for `gpu_count` GPUs that are not on drained machines; existing ones come first.

    Workers that are up stay, since each has a GPU: one that lost its GPU is down. Workers on drained machines are not
    counted, as their machines leave. Of the others, those that were given up go first when there are too many.
    """
    wanted = [worker for worker in workers if worker.wanted]
    leaving = [worker for worker in wanted if worker.drain_deadline is not None]
    up = [worker for worker in wanted if worker.live and worker.drain_deadline is None]
    others = [worker for worker in wanted if not worker.live]
    others.sort(key=lambda worker: worker.status is WorkerState.GIVEN_UP)
    kept = [*up, *others[: max(0, gpu_count - len(up))]]
    ids = [worker.worker_id for worker in (*leaving, *kept)]
    taken = {worker.worker_id for worker in workers}
    free = (name for number in count() if (name := WorkerId(f"gpu-{number}")) not in taken)
    return (*ids, *islice(free, max(0, gpu_count - len(kept))))


class WorkerPerGpu:
    """Keeps one worker for each GPU of the nodes that stay."""

    def __init__(self, table: WorkerTable, dispatcher: Dispatcher) -> None:
        self._table = table
        self._dispatcher = dispatcher

    def follow(self, view: ClusterView) -> None:
        """Want the workers for the GPUs of `view`."""
        gpu_count = sum(node.gpu_count for node in view.nodes if node.alive and node.drain_deadline is None)
        workers = self._table.workers.values()
        wanted = workers_for_gpus(gpu_count, workers)
        if set(wanted) != {worker.worker_id for worker in workers if worker.wanted}:
            self._dispatcher.post(WorkersWanted(self._dispatcher.now, wanted))
