"""Overtaking is bounded: counted from the story, by who was ready when somebody behind it started."""

from __future__ import annotations

from random import Random

import pytest

from pool.spec import TaskId
from scheduler.config import SchedulerConfig
from scheduler.simulation import VirtualCluster
from scheduler.state import SchedulerState
from scheduler.workload import all_at_once, poisson
from tests.simulation.worlds import gpus, mix


@pytest.mark.parametrize(("limit", "rate"), [(5, None), (5, 3.0), (40, None)])
def test_no_task_is_passed_over_more_often_than_the_limit(limit: int, rate: float | None) -> None:
    """All workers fit all tasks, so whoever starts passes over every ready task of an earlier job."""
    rng = Random(11)
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(overtaking_limit=limit, story_length=None)), gpus(4))
    what = mix(models=8)
    cluster.start(what.components)
    place: dict[str, tuple[int, int]] = {}
    arrivals = all_at_once(300) if rate is None else poisson(300, rate, rng)
    for number, submission in enumerate(what.submissions(arrivals, rng)):
        cluster.post(submission)
        for index, task in enumerate(submission.job.tasks):
            place.setdefault(task.task_id, (number, index))
    cluster.run()

    ready: dict[str, int] = {}
    most = 0
    for line in cluster.state.log.lines(set(place)):
        if line.after == "ready":
            ready[line.subject] = 0
        elif line.after == "running":
            del ready[TaskId(line.subject)]
            for other in ready:
                ready[other] += place[other] < place[line.subject]
            most = max([most, *ready.values()])
    assert 0 < most <= limit
    assert len(cluster.outcomes) == 300


def test_without_a_need_nobody_overtakes() -> None:
    """One model, no LoRA: tasks of one stage start as submitted."""
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), gpus(2))
    what = mix(models=1, loras=1)
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(50), Random(1)):
        cluster.post(submission)
    cluster.run()
    started = [
        line.subject for line in cluster.state.log.lines() if line.after == "running" and "sample" in line.subject
    ]
    assert len(started) == 50
    assert started == sorted(started, key=lambda name: int(name.split()[-2]))


def test_pictures_come_as_they_are_made_and_not_all_at_the_end() -> None:
    """Found with a batch on two workers: the first decode, which has to bring in the VAE, waited for all samples."""
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), gpus(2))
    what = mix(models=1, loras=1)
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(50), Random(1)):
        cluster.post(submission)
    cluster.run()
    running = [line.subject for line in cluster.state.log.lines() if line.after == "running"]
    first_decode = next(i for i, name in enumerate(running) if "decode" in name)
    assert sum("sample" in name for name in running[:first_decode]) <= 10
