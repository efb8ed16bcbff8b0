"""Overtaking is bounded: counted from the story, by who was ready when somebody behind it started."""

from __future__ import annotations

from random import Random

import pytest

from modelpool.pool.values.specs.spec import JobId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.workloads.generators import all_at_once, poisson
from modelpool.scheduler.simulator.workloads.models import InventedModel
from tests.simulation.worlds import gpus, mix


@pytest.mark.parametrize(("limit", "rate"), [(1, None), (2, 3.0), (10, None)])
def test_the_oldest_task_is_passed_over_no_more_often_than_the_limit_by_each_worker(
    limit: int, rate: float | None
) -> None:
    """All workers fit all tasks, so whoever starts passes over the oldest that is ready, but for those who were passed
    over as often themselves. Without loads for who waited long, so that nothing but the limit lets them go."""
    rng = Random(11)
    config = SchedulerConfig(overtaking_limit=limit, switch_share=0.0, story_length=None)
    cluster = VirtualCluster(SchedulerState(config), gpus(4))
    what = mix(models=8)
    cluster.start(what.components)
    place: dict[str, tuple[int, int]] = {}
    arrivals = all_at_once(300) if rate is None else poisson(300, rate, rng)
    for number, submission in enumerate(what.submissions(arrivals, rng)):
        cluster.post(submission)
        for index, task in enumerate(submission.job.tasks):
            place.setdefault(task.task_id, (number, index))
    cluster.run()

    passed: dict[str, int] = {}
    most = 0
    for line in cluster.core.log.lines(set(place)):
        if line.after == "ready":
            passed[line.subject] = 0
        elif line.before == "ready":  # it runs, or is the next of a worker
            oldest = min(passed, key=lambda name: place[name])
            if passed[line.subject] < 4 * limit:  # else it goes first itself: a later stage of an older job came since
                passed[oldest] += oldest != line.subject
            most = max(most, passed[oldest])
            del passed[line.subject]
    assert 0 < most <= 4 * limit
    assert len(cluster.outcomes) == 300


def rarely_wanted(switch_share: float) -> tuple[float, float]:
    """Two models for one worker that holds one: more jobs for the first than it can do, and one for the second. Seconds
    that this one takes, and load seconds of all."""
    hot, cold = InventedModel("hot"), InventedModel("cold")
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(switch_share=switch_share)), gpus(1, 12))
    cluster.start((*hot.components, *cold.components))
    for number in range(200):
        cluster.post(Submitted(1.0 + number, hot.job(f"hot-{number}", f"prompt {number}", number)))
    cluster.post(Submitted(5.0, cold.job("cold", "prompt", 0)))
    cluster.run()
    return cluster.latency_seconds[JobId("cold")], cluster.totals.load_seconds


def test_who_waits_long_for_what_its_load_costs_goes_before_work_for_what_is_loaded() -> None:
    """Its loads take some seconds; it waits for about that over the share, and then is done with everything."""
    patient, cheap = rarely_wanted(0.0)
    prompt, dear = rarely_wanted(0.05)
    assert prompt < patient / 2
    assert dear < cheap + 10


def test_loads_for_who_waited_take_no_more_than_their_share() -> None:
    """Six models take turns in the queue, and all wait from the beginning: in order, nearly every job loads."""
    models = [InventedModel(f"model-{n}") for n in range(6)]

    def loads(switch_share: float, placement: str = "soonest") -> tuple[float, float, int]:
        config = SchedulerConfig(switch_share=switch_share, placement=placement)
        cluster = VirtualCluster(SchedulerState(config), gpus(1, 12))
        cluster.start([spec for model in models for spec in model.components])
        for number in range(240):
            job = models[number % 6].job(f"job-{number}", f"prompt {number}", number)
            cluster.post(Submitted(1.0, job))
        cluster.run()
        totals = cluster.totals
        moved_bytes = totals.uploaded_bytes + totals.preloaded_bytes
        return totals.load_seconds, cluster.now, moved_bytes

    least, _, _ = loads(0.0)
    shared, seconds, moved_bytes = loads(0.05)
    _, _, in_order_bytes = loads(0.05, "arrival_order")
    assert shared <= least + 0.07 * seconds
    assert in_order_bytes > 1.5 * moved_bytes


def test_without_a_need_nobody_overtakes() -> None:
    """One model, no LoRA: tasks of one stage start as submitted."""
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), gpus(2))
    what = mix(models=1, loras=1)
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(50), Random(1)):
        cluster.post(submission)
    cluster.run()
    started = [
        line.subject for line in cluster.core.log.lines() if line.after == "running" and "sample" in line.subject
    ]
    assert len(started) == 50
    assert started == sorted(started, key=lambda name: int(name.split()[-2]))


def test_images_come_as_they_are_made_and_not_all_at_the_end() -> None:
    """Found with a batch on two workers: the first decode, which has to bring in the VAE, waited for all samples."""
    cluster = VirtualCluster(SchedulerState(SchedulerConfig(story_length=None)), gpus(2))
    what = mix(models=1, loras=1)
    cluster.start(what.components)
    for submission in what.submissions(all_at_once(50), Random(1)):
        cluster.post(submission)
    cluster.run()
    running = [line.subject for line in cluster.core.log.lines() if line.after == "running"]
    first_decode = next(i for i, name in enumerate(running) if "decode" in name)
    assert sum("sample" in name for name in running[:first_decode]) <= 10
