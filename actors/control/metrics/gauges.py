"""Gauges of a pool, and the counters that the core keeps itself, computed from a snapshot of the core on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from modelpool.actors.control.metrics.families import BoundedLabels, MetricFamily, counter, gauge, labelled
from modelpool.scheduler.core.snapshot import ScalingSnapshot, Snapshot, WorkerSnapshot

#: the label of jobs without a user; an empty label is none at all
NO_NAME = "anonymous"
_ORDERS = ("cordoned", "draining", "drained", "restarting")
_WORKER_STATES = ("starting", "idle", "busy", "given_up", "drained")


class PoolGauges:
    """Converts snapshots; remembers only which users and models have labels of their own."""

    def __init__(self) -> None:
        self._users, self._models = BoundedLabels(), BoundedLabels()

    def families(
        self,
        now: Snapshot,
        waiting_by_user: Mapping[str, Mapping[str, int]],
        waiting_by_model: Mapping[str, Mapping[str, int]],
        parked_jobs: int,
    ) -> tuple[MetricFamily, ...]:
        """Return the metrics of a snapshot.

        waiting_by_user   user -> stage -> tasks that have not started, including tasks of parked jobs
        waiting_by_model  model -> stage -> such tasks that are in the core
        parked_jobs       jobs that wait outside of the core for their turn
        """
        up = [worker for worker in now.workers if worker.residency is not None]
        running = Counter(task.stage for task in now.running)
        return (
            gauge(
                "modelpool_tasks",
                "Tasks that have not ended, by stage and state; blocked ones wait for a result.",
                {
                    (stage, state): count
                    for state, counts in (("ready", now.ready), ("blocked", now.blocked), ("running", running))
                    for stage, count in ((stage, counts.get(stage, 0)) for stage in now.ready)
                },
                "stage",
                "state",
            ),
            gauge(
                "modelpool_user_waiting_tasks",
                "Tasks that have not started, by user; parked jobs included.",
                _by_label(waiting_by_user, self._users),
                "user",
            ),
            gauge(
                "modelpool_model_waiting_tasks",
                "Tasks that have not started, by the model of their first component; without parked jobs.",
                _by_label(waiting_by_model, self._models),
                "model",
            ),
            gauge(
                "modelpool_jobs",
                "Jobs that have not ended; stopping ones were cancelled, parked ones wait for their turn.",
                {
                    ("active",): now.jobs_live - now.jobs_stopping,
                    ("stopping",): now.jobs_stopping,
                    ("parked",): parked_jobs,
                },
                "state",
            ),
            *_fleet_families(now),
            *_gpu_families(up),
            counter(
                "modelpool_user_gpu_seconds_total",
                "GPU time that users were charged for, loads included.",
                {
                    (label,): seconds
                    for label, seconds in labelled(
                        ((user or NO_NAME, seconds) for user, seconds in now.seconds_by_user.items()), self._users
                    ).items()
                },
                "user",
            ),
            counter(
                "modelpool_deadlines_total",
                "Jobs with a deadline that ended, by whether they met it.",
                {("met",): now.deadlines_met, ("missed",): now.deadlines_missed},
                "result",
            ),
            gauge("modelpool_results", "Results of tasks that are kept for tasks to come.", {(): now.results_held}),
            *(() if now.scaling is None else _scaling_families(now.scaling)),
        )


def _fleet_families(now: Snapshot) -> tuple[MetricFamily, ...]:
    states = Counter(worker.status for worker in now.workers)
    return (
        gauge(
            "modelpool_workers",
            "Workers, by state.",
            {(state,): states.get(state, 0) for state in _WORKER_STATES},
            "state",
        ),
        gauge(
            "modelpool_workers_out_of_use",
            "Workers that an operator has taken out of use, by order.",
            {(order,): sum(worker.order == order for worker in now.workers) for order in _ORDERS},
            "order",
        ),
        gauge(
            "modelpool_nodes_out_of_use",
            "Nodes that an operator has cordoned or drained.",
            {
                (state,): sum(is_drained == (state == "drained") for _, is_drained in now.cordoned_nodes)
                for state in ("cordoned", "drained")
            },
            "state",
        ),
    )


def _gpu_families(up: list[WorkerSnapshot]) -> tuple[MetricFamily, ...]:
    capacity: dict[tuple[str, ...], float] = {}
    resident: dict[tuple[str, ...], float] = {}
    free: dict[tuple[str, ...], float] = {}
    busy: dict[tuple[str, ...], float] = {}
    for worker in up:
        assert worker.residency is not None, "only workers that are up"
        labels = (str(worker.worker_id), worker.node)
        capacity[labels] = worker.residency.capacity_bytes
        resident[labels] = worker.residency.used_bytes
        free[labels] = worker.residency.capacity_bytes - worker.residency.used_bytes
        busy[labels] = worker.status == "busy"
    names = ("worker", "node")
    return (
        gauge("modelpool_gpu_capacity_bytes", "Memory that a worker may use.", capacity, *names),
        gauge("modelpool_gpu_resident_bytes", "Weights on the GPU of a worker.", resident, *names),
        gauge("modelpool_gpu_free_bytes", "Memory of a worker without weights.", free, *names),
        gauge("modelpool_gpu_busy", "Whether a worker has a task: 1 or 0.", busy, *names),
    )


def _scaling_families(now: ScalingSnapshot) -> tuple[MetricFamily, ...]:
    groups = {(group.name,): group for group in now.groups}
    return (
        gauge(
            "modelpool_nodes",
            "Nodes that exist or are requested, by group.",
            {labels: group.nodes for labels, group in groups.items()},
            "group",
        ),
        gauge(
            "modelpool_nodes_max",
            "The most nodes that a group may have.",
            {labels: group.max_nodes for labels, group in groups.items()},
            "group",
        ),
        gauge(
            "modelpool_node_start_seconds",
            "Time from the request of a node to its worker, as learned.",
            {labels: group.start_seconds for labels, group in groups.items()},
            "group",
        ),
        gauge(
            "modelpool_group_blocked",
            "Whether a group backs off after a failure: 1 or 0.",
            {labels: group.blocked_seconds > 0 for labels, group in groups.items()},
            "group",
        ),
        counter(
            "modelpool_cost_total",
            "Money that nodes have cost, in the unit of price_per_hour.",
            {(): now.spent},
        ),
        gauge("modelpool_cost_per_hour", "What the present nodes cost per hour.", {(): now.cost_per_hour}),
    )


def _by_label(counts: Mapping[str, Mapping[str, int]], labels: BoundedLabels) -> dict[tuple[str, ...], float]:
    sums = labelled(((name or NO_NAME, sum(stages.values())) for name, stages in counts.items()), labels)
    return {(label,): count for label, count in sums.items()}
