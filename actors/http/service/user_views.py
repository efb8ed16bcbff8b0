"""The state and the metrics of a pool without what belongs to other users. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

from modelpool.actors.control.metrics.families import MetricFamily
from modelpool.actors.control.status import PoolStatus, WorkerStatus

#: label of metrics by user
_USER_LABEL = "user"


def status_for(status: PoolStatus, user: str, own_jobs: Set[str]) -> PoolStatus:
    """Return `status` with the waiting tasks, GPU-seconds, runs and submissions of `user` only, and the failures of
    `own_jobs`. Totals are of all users.
    """
    return replace(
        status,
        workers=tuple(_worker_for(worker, user) for worker in status.workers),
        waiting_by_user={name: tasks for name, tasks in status.waiting_by_user.items() if name == user},
        seconds_by_user={name: seconds for name, seconds in status.seconds_by_user.items() if name == user},
        failures=tuple(job for job in status.failures if job.job_id in own_jobs),
        submissions=tuple(each for each in status.submissions if each.user == user),
    )


def families_for(families: Iterable[MetricFamily], user: str) -> tuple[MetricFamily, ...]:
    """Return `families` without the samples of other users."""
    return tuple(_family_for(family, user) for family in families)


def _worker_for(worker: WorkerStatus, user: str) -> WorkerStatus:
    if worker.run is None or worker.run.user == user:
        return worker
    return replace(worker, run=replace(worker.run, job_id="", user="", model="", prompt=""))


def _family_for(family: MetricFamily, user: str) -> MetricFamily:
    if _USER_LABEL not in family.label_names:
        return family
    place = family.label_names.index(_USER_LABEL)
    return replace(
        family,
        samples=tuple(sample for sample in family.samples if sample.labels[place] == user),
        histograms=tuple(sample for sample in family.histograms if sample.labels[place] == user),
    )
