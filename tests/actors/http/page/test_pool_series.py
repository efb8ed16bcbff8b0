"""The charts of the page: samples are means of what was noted, rates come from counters, and everything is bounded."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.control.status import PoolStatus, WorkerStatus
from modelpool.actors.http.page import live_view
from modelpool.actors.http.page.live_entries import pool_entry
from modelpool.actors.http.page.live_view import LiveView
from modelpool.actors.http.page.pool_series import MOST_SAMPLES, MOST_WORKERS, SAMPLE_SECONDS, PoolSeries
from modelpool.actors.http.service.services import Services
from modelpool.actors.outputs.results.outcomes import PoolLost
from modelpool.pool.values.specs.spec import Stage, WorkerId
from tests.actors.http.asgi import RefusingPool


def worker(name: str, state: str = "idle", used: int = 0) -> WorkerStatus:
    return WorkerStatus(WorkerId(name), state, "fake", 1, 100, used, (), None)


def pool(succeeded: int = 0, waiting: int = 0, *workers: WorkerStatus) -> PoolStatus:
    jobs = {"live": 0, "succeeded": succeeded}
    return PoolStatus(workers, {"sample": waiting, "decode": 0}, jobs, 0, 0, 0, 0, 0, 0)


def test_a_sample_is_the_mean_of_its_states_and_a_rate_is_of_the_counter() -> None:
    series = PoolSeries(10.0)
    up = (worker("gpu-0", "busy", 50), worker("gpu-1", "idle", 10))
    for second in range(11):
        busy = up if second % 2 else (replace(up[0], state="idle", used_bytes=30), up[1])
        series.note(pool(second * 2, second, *busy, worker("gpu-2", "starting")), 100.0 + second, 5000.0 + second)
    (sample,) = series.entries.values()
    assert (sample["at"], sample["waiting"], sample["rate"]) == (5010, 5.0, 120.0)
    assert sample["busy"] == 23  # of two workers that are up, one in 5 of 11 states
    assert sample["workers"] == {"gpu-0": [45, 39], "gpu-1": [0, 10], "gpu-2": [0, 0]}


def test_a_rate_is_unknown_after_a_gap_and_after_another_controller_has_begun_to_count() -> None:
    series = PoolSeries(10.0)
    for now, succeeded in ((0.0, 50), (10.0, 60), (20.0, 3), (30.0, 5), (500.0, 400), (510.0, 401)):
        series.note(pool(succeeded), now, now)
    assert [each["rate"] for each in series.entries.values()] == [60.0, None, 12.0, None, 6.0]


def test_samples_and_workers_are_bounded() -> None:
    series = PoolSeries(1.0)
    many = tuple(worker(f"gpu-{place}") for place in range(100))
    for now in range(MOST_SAMPLES + 50):
        series.note(pool(0, 0, *many), float(now), float(now))
    assert len(series.entries) == MOST_SAMPLES
    newest = series.entries[max(series.entries, key=int)]
    assert list(newest["workers"]) == [f"gpu-{place}" for place in range(MOST_WORKERS)]
    text = json.dumps(series.entries)
    assert len(text) < 100_000, "what a page receives at first"


class SampledPool(RefusingPool):
    """Counts the questions; every third is not answered."""

    def __init__(self) -> None:
        self.asked = 0

    def status(self) -> PoolStatus:
        self.asked += 1
        if self.asked % 3 == 0:
            raise PoolLost("gone")
        return pool(self.asked, 7)


def test_samples_are_taken_without_viewers_and_a_page_that_is_opened_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_view, "SAMPLE_SECONDS", 0.01)
    asked = SampledPool()

    async def scenario() -> dict[str, dict[str, object]]:
        live = LiveView(Services(asked, ServeSection(), tmp_path, b"s" * 32))
        live._series = PoolSeries(0.01)
        sampling = asyncio.create_task(live.keep_sampling())
        while asked.asked < 20:
            await asyncio.sleep(0.01)
        async with aclosing(live.changes("ann")) as texts:
            found: dict[str, dict[str, object]] = json.loads(await anext(texts))["set"]["samples"]
        sampling.cancel()
        return found

    samples = asyncio.run(scenario())
    assert len(samples) >= 5
    assert all(sample["waiting"] == 7 for sample in samples.values())


def test_the_pool_is_rarely_asked_without_viewers() -> None:
    assert SAMPLE_SECONDS >= 10


def test_the_page_counts_the_waiting_tasks_of_every_stage() -> None:
    """Also operations of workflows, which have no model."""
    status = replace(pool(), waiting={stage.value: 2 for stage in Stage})
    assert pool_entry(status, 0.0, None, "")["waiting"] == {"encode": 2, "sample": 2, "decode": 2, "operate": 2}
