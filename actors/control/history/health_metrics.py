"""Metrics that the alert rules (`configs/prometheus`) need: long waits, tasks on hold, and the disk of the journal."""

from __future__ import annotations

from collections.abc import Sequence

from modelpool.actors.control.history.pool_history import PoolHistory
from modelpool.actors.control.metrics.families import MetricFamily, counter, gauge

#: how a reason begins why the outputs of one submission cannot be written, and how the last one ends if there are many;
#: others are of the journal
_OF_SUBMISSION, _MORE = "submission ", " submissions wait"


def health_families(
    history: PoolHistory, jobs_troubles: Sequence[str], controller_restarts: int | None, now: float
) -> tuple[MetricFamily, ...]:
    """Return the metrics at `now`, on the controller's clock. `jobs_troubles` are why detached jobs wait. While the
    number of restarts is unknown (None), it is left out: 0 would count as a counter that begins anew."""
    outputs = sum(each.startswith(_OF_SUBMISSION) or each.endswith(_MORE) for each in jobs_troubles)
    return (
        gauge(
            "modelpool_oldest_waiting_seconds",
            "Time for which the oldest task has waited that could start.",
            {(): history.waiting_seconds(now)},
        ),
        gauge(
            "modelpool_stalled_submission_seconds",
            "Longest time for which no run of a submission began or ended that has unfinished jobs and none running.",
            {(): history.stalled_seconds(now)},
        ),
        gauge(
            "modelpool_jobs_troubles",
            "Reasons why detached jobs wait: outputs of a submission that cannot be written, or the journal.",
            {("outputs",): outputs, ("journal",): len(jobs_troubles) - outputs},
            "of",
        ),
        gauge(
            "modelpool_history_troubled",
            "Whether events and costs are not written to the history: 1 or 0.",
            {(): bool(history.trouble)},
        ),
        counter(
            "modelpool_node_changes_total",
            "Nodes of the cluster that have joined or left since the start of this controller.",
            {(change,): count for change, count in history.node_changes.items()},
            "change",
        ),
        *_disk_families(history),
        *(
            ()
            if controller_restarts is None
            else (
                counter(
                    "modelpool_controller_restarts_total",
                    "Controllers of the pool that were replaced.",
                    {(): controller_restarts},
                ),
            )
        ),
    )


def _disk_families(history: PoolHistory) -> tuple[MetricFamily, ...]:
    disk = history.disk
    if disk is None:
        return ()
    return (
        gauge("modelpool_journal_disk_bytes", "Size of the disk of the journal.", {(): disk.total_bytes}),
        gauge("modelpool_journal_disk_free_bytes", "Room on the disk of the journal.", {(): disk.free_bytes}),
        gauge("modelpool_history_bytes", "Size of the history of events and costs.", {(): disk.history_bytes}),
    )
