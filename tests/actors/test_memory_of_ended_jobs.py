"""Ended jobs take little memory in the controller and in the driver: under 1 KB each, beyond the kept records of the
latest."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from modelpool.actors.client import request_stream, result_queue
from modelpool.actors.client.client import ModelPool
from modelpool.actors.outputs.results import packed_list
from modelpool.actors.request.requests import GenerateRequest
from modelpool.scheduler.model.config import SchedulerConfig
from tests.actors.fake_fleet import Desk, dialogue
from tests.actors.fakes import FakeEngine
from tests.actors.loop_connection import LoopConnection

#: bytes for each ended job: recipe, request and tasks are 10 KB as objects
MOST_BYTES = 1000
FEW, MANY = 300, 700
#: requests that are submitted together
PART = 50
#: the kept records of the latest jobs take less than of the jobs that are measured
SHORT = SchedulerConfig(story_length=100, kept_results=8)


def requests(begin: int) -> list[GenerateRequest]:
    """The next part. They have one prompt: caches of prompts are no history of jobs."""
    return [
        GenerateRequest(model="shapes", prompt="a red circle", id=f"row {seed}", seed=seed, steps=1)
        for seed in range(begin, begin + PART)
    ]


def used_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def traced() -> Iterator[None]:
    """Memory is measured."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@dialogue
async def test_an_ended_job_takes_little_memory_in_the_controller() -> None:
    desk = await Desk(workers=2, config=SHORT).open()
    used: dict[int, int] = {}
    for begin in range(0, MANY, PART):
        await desk.submit(*requests(begin), submission="s", first_index=begin)
        await desk.run_dry()
        ended = begin + PART
        desk.ended.clear()
        desk.fleet.sent.clear()
        desk.fleet.joined.clear()
        for worker in desk.fleet.workers.values():
            worker.made.clear()
        used[ended] = used_bytes()
    assert sum(desk.state.demand.resolved.values()) == MANY
    assert (used[MANY] - used[FEW]) / (MANY - FEW) < MOST_BYTES


@pytest.mark.usefixtures("traced")
def test_an_ended_job_takes_little_memory_in_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is in this process, too, and keeps a short story."""
    monkeypatch.setattr(result_queue, "MOST_RETURNED", 20)
    monkeypatch.setattr(packed_list, "MOST_UNPACKED", 1)
    monkeypatch.setattr(request_stream, "AHEAD_JOBS", 0)
    used: dict[int, int] = {}

    def parts() -> Iterator[Sequence[GenerateRequest]]:
        for begin in range(0, MANY, PART):
            yield requests(begin)

    line = LoopConnection(2, FakeEngine, scheduler=SHORT)
    with ModelPool(line, line.end, None) as pool:
        jobs = pool.submit_stream(parts(), lambda place, answer: True)
        for ended, result in enumerate(jobs.results(), start=1):
            del result
            if ended in (FEW, MANY):
                used[ended] = used_bytes()
        assert jobs.wait().succeeded == MANY
        assert sum(each.tasks for each in jobs.summary().per_worker()) == len(jobs.summary().tasks) >= MANY
        assert jobs[0].request == requests(0)[0]
    assert (used[MANY] - used[FEW]) / (MANY - FEW) < MOST_BYTES
