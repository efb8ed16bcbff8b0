"""What a pool's metrics become in Ray: increments, gauges and observations that Ray's own classes accept."""

from __future__ import annotations

from collections import Counter as Counted
from typing import Any

import pytest
from ray.util.metrics import Metric

from modelpool.actors.control.metrics.families import HistogramSample, MetricFamily, counter, gauge, histogram
from modelpool.actors.ray.ray_metrics import RayMetrics
from tests.actors.control.metrics.test_pool_metrics import request
from tests.actors.fake_fleet import Desk, dialogue

Records = list[tuple[str, float, dict[str, str]]]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    """What reaches Ray, after the checks of its classes."""
    found: Records = []
    record = Metric._record

    def noted(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
        record(self, value, tags)
        found.append((self.info["name"], value, dict(tags or {})))

    monkeypatch.setattr(Metric, "_record", noted)
    return found


def family_of(count: float) -> MetricFamily:
    return counter("modelpool_jobs_total", "Jobs.", {("failed",): count}, "outcome")


def test_a_counter_is_passed_on_by_its_increase(records: Records) -> None:
    metrics = RayMetrics("mine")
    for count in (0.0, 2.0, 2.0, 5.0, 1.0):  # at the end it has started again
        metrics.export([family_of(count)])
    tags = {"pool": "mine", "outcome": "failed"}
    assert records == [("modelpool_jobs", value, tags) for value in (2.0, 3.0, 1.0)]


def test_a_gauge_is_passed_on_each_time_since_ray_forgets_old_ones(records: Records) -> None:
    metrics = RayMetrics("mine")
    for value in (1.0, 1.0, 0.0):
        metrics.export([gauge("modelpool_results", "Results.", {(): value})])
    assert [value for _, value, _ in records] == [1.0, 1.0, 0.0]


def test_a_histogram_gets_as_many_observations_in_each_bucket_as_fell_into_it_since(records: Records) -> None:
    metrics = RayMetrics("mine")
    bounds = len(histogram("x", "x.", ()).bounds)
    for first, last in ((2, 0), (2, 0), (3, 1)):
        counts = (first, *(0,) * (bounds - 1), last)
        metrics.export([histogram("modelpool_job_seconds", "Jobs.", [HistogramSample((), counts, 1.0)])])
    values = [value for _, value, _ in records]
    assert Counted(values) == {0.0025: 3, 5400.0: 1}


def test_every_metric_of_a_pool_is_accepted(records: Records) -> None:
    families: list[tuple[MetricFamily, ...]] = []

    @dialogue
    async def talk() -> None:
        desk = await Desk(workers=1).open()
        await desk.submit(request())
        await desk.run_dry()
        families.append(await desk.controller.metrics())

    talk()
    RayMetrics("mine").export(families[0])
    names = {name for name, _, _ in records}
    assert {"modelpool_tasks", "modelpool_task_run_seconds", "modelpool_gpu_resident_bytes"} <= names
    assert not [name for name in names if name.endswith("_total")]
