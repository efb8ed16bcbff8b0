"""The metrics of a controller with a fleet that the test controls: each counts what happened, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from modelpool.actors.control.metrics.exposition import metrics_text
from modelpool.actors.control.metrics.families import (
    MOST_LABELS,
    OTHERS,
    BoundedLabels,
    Distribution,
    MetricFamily,
    MetricKind,
)
from modelpool.actors.control.metrics.pool_metrics import PoolMetrics
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import SubmissionId
from modelpool.pool.values.specs.resident import Residency
from modelpool.pool.values.specs.spec import Stage, TaskId, TaskReport, WorkerId, WorkerSpec
from modelpool.scheduler.decisions.queue.demand import Demand
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import EndWorker, RunEnded, RunTask, TaskRevoked, Tick, WorkerUp
from modelpool.scheduler.model.node_groups import NodeGroup
from tests.actors.fake_fleet import ME, Desk, dialogue, settle
from tests.actors.fakes import FAIL


def request(prompt: str = "a red circle", **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": prompt, "seed": 1, "steps": 3, **fields})


class Scrape:
    """The metrics of a pool as a Prometheus client library reads them."""

    def __init__(self, families: tuple[MetricFamily, ...]) -> None:
        self.text = metrics_text(families).decode()
        self.types = {family.name: family.type for family in text_string_to_metric_families(self.text)}
        self._samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._samples[name, tuple(sorted(labels.items()))]

    def has(self, name: str, **labels: str) -> bool:
        return (name, tuple(sorted(labels.items()))) in self._samples


async def scrape(desk: Desk) -> Scrape:
    return Scrape(await desk.controller.metrics())


@dialogue
async def test_a_job_is_counted_by_stage_and_outcome() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    during = await scrape(desk)
    assert during("modelpool_tasks", stage="encode", state="running") == 1
    assert during("modelpool_tasks", stage="decode", state="blocked") == 1
    assert during("modelpool_jobs", state="active") == 1
    assert during("modelpool_gpu_busy", worker="gpu-0", node="") == 1
    assert during("modelpool_model_waiting_tasks", model="shapes") == 3
    await desk.run_dry()
    after = await scrape(desk)
    assert after("modelpool_tasks_total", stage="encode", outcome="succeeded") == 2
    assert after("modelpool_tasks_total", stage="sample", outcome="succeeded") == 1
    assert after("modelpool_jobs_total", outcome="succeeded") == 1
    assert after("modelpool_jobs_submitted_total") == 1
    assert after("modelpool_job_seconds_count", outcome="succeeded") == 1
    for histogram in ("queue", "load", "run"):
        assert after(f"modelpool_task_{histogram}_seconds_count", stage="encode") == 2
    assert after("modelpool_jobs", state="active") == 0
    assert after("modelpool_gpu_busy", worker="gpu-0", node="") == 0
    assert not after.has("modelpool_model_waiting_tasks", model="shapes")


@dialogue
async def test_the_queue_time_is_that_before_the_start_and_the_busy_time_that_after_it() -> None:
    desk = await Desk(workers=1).open()
    await desk.submit(request(), request(prompt="another", seed=2, cfg=1.0))
    first = desk.fleet.running[0]
    await desk.clock.advance(7.0)
    assert (await scrape(desk))("modelpool_gpu_busy_seconds_total", worker="gpu-0") == 7.0  # also while it runs
    await desk.finish(first)
    during = await scrape(desk)
    assert during("modelpool_task_queue_seconds_sum", stage="encode") == 7.0  # 0 of the first, 7 of the second
    assert during("modelpool_task_queue_seconds_count", stage="encode") == 2
    await desk.run_dry()
    assert (await scrape(desk))("modelpool_gpu_busy_seconds_total", worker="gpu-0") == 7.0


def test_a_revoked_run_never_began() -> None:
    """Its worker is idle after the run before it; neither a queue time, a retry nor a loss is counted."""
    worker, one, two = WorkerId("gpu-0"), TaskId("one"), TaskId("two")
    task = SimpleNamespace(spec=SimpleNamespace(stage=Stage.ENCODE), queue_seconds=1.0)
    metrics = PoolMetrics(cast("Demand", SimpleNamespace(jobs={}, tasks={one: task, two: task})))
    metrics.note(WorkerUp(0.0, WorkerSpec(worker, 1, 1 << 30, 1e9)), [RunTask(worker, 1, one, 1)])
    metrics.note(Tick(1.0), [RunTask(worker, 1, two, 2, queued=True)])
    metrics.note(TaskRevoked(2.0, worker, 1, two, 2), [])
    metrics.note(RunEnded(3.0, TaskReport(one, 1, worker, 1, Residency(1 << 30))), [])
    metrics.note(Tick(9.0), [EndWorker(worker, 1)])
    after = Scrape(metrics.families(10.0))
    assert after("modelpool_task_queue_seconds_count", stage="encode") == 1
    assert after("modelpool_task_retries_total", stage="encode") == 0
    assert after("modelpool_tasks_total", stage="encode", outcome="worker_lost") == 0
    assert after("modelpool_worker_losses_total", cause="crash") == 0


def test_a_queued_run_begins_when_the_run_before_it_ends() -> None:
    worker, one, two = WorkerId("gpu-0"), TaskId("one"), TaskId("two")
    task = SimpleNamespace(spec=SimpleNamespace(stage=Stage.ENCODE), queue_seconds=1.0)
    metrics = PoolMetrics(cast("Demand", SimpleNamespace(jobs={}, tasks={one: task, two: task})))
    metrics.note(WorkerUp(0.0, WorkerSpec(worker, 1, 1 << 30, 1e9)), [RunTask(worker, 1, one, 1)])
    metrics.note(Tick(1.0), [RunTask(worker, 1, two, 1, queued=True)])
    metrics.note(RunEnded(3.0, TaskReport(one, 1, worker, 1, Residency(1 << 30))), [])
    metrics.note(RunEnded(5.0, TaskReport(two, 1, worker, 1, Residency(1 << 30))), [])
    after = Scrape(metrics.families(10.0))
    assert after("modelpool_task_queue_seconds_sum", stage="encode") == 1.0 + 3.0
    assert after("modelpool_gpu_busy_seconds_total", worker="gpu-0") == 5.0
    assert after("modelpool_tasks_total", stage="encode", outcome="succeeded") == 2


def test_a_run_that_follows_another_for_its_result_has_not_waited() -> None:
    worker, one, two = WorkerId("gpu-0"), TaskId("one"), TaskId("two")
    task = SimpleNamespace(spec=SimpleNamespace(stage=Stage.ENCODE), queue_seconds=0.0)
    metrics = PoolMetrics(cast("Demand", SimpleNamespace(jobs={}, tasks={one: task, two: task})))
    metrics.note(WorkerUp(0.0, WorkerSpec(worker, 1, 1 << 30, 1e9)), [RunTask(worker, 1, one, 1)])
    metrics.note(Tick(1.0), [RunTask(worker, 1, two, 1, queued=True, follows=(one,))])
    metrics.note(RunEnded(3.0, TaskReport(one, 1, worker, 1, Residency(1 << 30))), [])
    after = Scrape(metrics.families(3.0))
    assert after("modelpool_task_queue_seconds_sum", stage="encode") == 0.0
    assert after("modelpool_task_queue_seconds_count", stage="encode") == 2


@dialogue
async def test_bytes_that_come_and_go_are_counted_with_the_hits() -> None:
    desk = await Desk(workers=1).open()
    await desk.submit(request())
    await desk.run_dry()
    moved = sum(sent.report.result().cost.uploaded_bytes for sent in desk.fleet.sent)
    after = await scrape(desk)
    status = await desk.controller.status()
    assert after("modelpool_moved_bytes_total", path="host_to_gpu") == status.uploaded_bytes == moved > 0
    assert after("modelpool_gpu_resident_bytes", worker="gpu-0", node="") == status.workers[0].used_bytes > 0
    free = status.workers[0].capacity_bytes - status.workers[0].used_bytes
    assert after("modelpool_gpu_free_bytes", worker="gpu-0", node="") == free
    hits = sum(
        after("modelpool_residency_total", stage=stage, result="hit") for stage in ("encode", "sample", "decode")
    )
    assert hits == status.tasks_resident


@dialogue
async def test_a_lost_worker_its_run_and_the_retry_are_counted_once() -> None:
    desk = await Desk(workers=1).open()
    await desk.submit(request(cfg=1.0))
    desk.fleet.kill("gpu-0", True)
    await settle()
    await desk.run_dry()
    after = await scrape(desk)
    assert sum(after("modelpool_worker_losses_total", cause=cause) for cause in ("crash", "killed")) == 1
    assert after("modelpool_tasks_total", stage="encode", outcome="worker_lost") == 1
    assert after("modelpool_task_retries_total", stage="encode") == 1
    assert after("modelpool_worker_starts_total") == 2
    assert after("modelpool_jobs_total", outcome="succeeded") == 1


@dialogue
async def test_failures_and_cancellations_are_counted_by_kind() -> None:
    desk = await Desk(workers=1).open()
    await desk.submit(request(prompt=FAIL, cfg=1.0))
    await desk.run_dry()
    await desk.submit(request(prompt="later", cfg=1.0), submission="t")
    await desk.controller.cancel(ME, SubmissionId("t"))
    await desk.run_dry()
    after = await scrape(desk)
    assert after("modelpool_jobs_total", outcome="failed") == 1
    assert after("modelpool_jobs_total", outcome="cancelled") == 1
    assert after("modelpool_tasks_total", stage="encode", outcome="cancelled") == 1
    assert after("modelpool_tasks_total", stage="sample", outcome="internal") == 1


@dialogue
async def test_users_have_their_queues_and_groups_their_decisions() -> None:
    group = NodeGroup("a100", max_nodes=2, price_per_hour=3.6)
    desk = await Desk(workers=0, config=SchedulerConfig(groups=(group,))).open()
    await desk.submit(request(user="ann"), request(seed=2))
    before = await scrape(desk)
    assert before("modelpool_user_waiting_tasks", user="ann") == 4  # and both wait for its texts
    assert before("modelpool_user_waiting_tasks", user="anonymous") == 2
    await desk.clock.advance(5.0)
    await desk.run_dry()
    after = await scrape(desk)
    assert after("modelpool_scaling_nodes_total", group="a100", rule="no_worker", action="requested") == 1
    assert after("modelpool_nodes", group="a100") == 1
    assert after("modelpool_cost_per_hour") == 3.6
    assert 0.0 < after("modelpool_cost_total") <= 0.005


@dialogue
async def test_names_and_types_follow_the_conventions_of_prometheus() -> None:
    desk = await Desk(workers=1, config=SchedulerConfig(groups=(NodeGroup("a"),))).open()
    for family in await desk.controller.metrics():
        assert family.name.startswith("modelpool_")
        assert family.name.endswith("_total") == (family.kind is MetricKind.COUNTER), family.name
        assert family.text.endswith("."), family.name
        assert all(len(sample.labels) == len(family.label_names) for sample in (*family.samples, *family.histograms))
    assert (await scrape(desk)).types["modelpool_task_run_seconds"] == "histogram"


def test_the_buckets_contain_their_upper_limit_and_end_with_everything() -> None:
    seconds = Distribution()
    for value in (0.0, 0.005, 0.0051, 4000.0):
        seconds.observe(value)
    sample = seconds.sample("x")
    assert (sample.counts[0], sample.counts[1], sample.counts[-1]) == (2, 1, 1)
    assert sample.total == pytest.approx(4000.0101)


def test_labels_are_bounded_and_stay_what_they_are() -> None:
    labels = BoundedLabels(2)
    assert [labels.label(name) for name in ("a", "b", "c", "a", "d")] == ["a", "b", OTHERS, "a", OTHERS]
    assert BoundedLabels().label("x") == "x"
    assert MOST_LABELS <= 100
