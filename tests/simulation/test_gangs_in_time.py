"""Runs that several simulated GPUs share: their times, the rest after a loss, and what the pool makes of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.gang_scheduling import simulate
from benchmarks.lab.studio import is_video, studio
from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import NodeId, Stage, WorkerId
from modelpool.scheduler.core.invariants import validate
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.gang_times import FORMING_SECONDS
from modelpool.scheduler.model.messages import Outcome, Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.hosts import SimulatedNode
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.sizes import VIDEO

MODEL = replace(VIDEO, degrees=(1, 2, 4))


def cluster(gpus: int = 4) -> VirtualCluster[SchedulerState]:
    """GPUs of one machine, with everything in its memory."""
    node = NodeId("box")
    found = [SimulatedGpu(WorkerId(f"gpu-{n}"), 80 * GIB, 50.0 * GIB, node=node) for n in range(gpus)]
    core = SchedulerState(SchedulerConfig(story_length=None))
    made = VirtualCluster(core, found, [SimulatedNode(node, 512 * GIB, 50.0 * GIB)])
    made.start(MODEL.components)
    return made


def test_a_run_on_four_gpus_takes_the_published_time_on_each() -> None:
    pool = cluster()
    pool.post(Submitted(5.0, MODEL.job("one", "p", 1, steps=40)))
    pool.run(validate)
    runs = [run for run in pool.runs if run.stage is Stage.SAMPLE]
    assert len(runs) == 4
    (seconds,) = {round(run.run_seconds, 3) for run in runs}
    assert 70.0 / seconds > 3.6
    assert pool.steps_computed == {runs[0].task_id: 40}, "each step counts once"


def test_forming_a_gang_has_its_price_before_each_run_and_is_no_part_of_learned_times() -> None:
    """The second run of the same workers was expected, and simulated, without: real ones form a group each time."""
    pool = cluster()
    for number, at in enumerate((5.0, 500.0, 1000.0)):
        pool.post(Submitted(at, MODEL.job(f"j{number}", f"p{number}", number, steps=40)))
    pool.run(validate)
    lasts = [run for run in pool.runs if run.stage is Stage.SAMPLE and run.started_at > 400.0]
    assert len({run.worker_id for run in lasts}) == 4
    assert len(lasts) == 8
    learned = pool.core.costs.gang_times.remembered()
    (ratio,) = {round(ratio, 4) for each in learned for ratio in each.ratios}
    (seconds,) = {round(run.ended_at - run.started_at, 6) for run in lasts}
    (task,) = [task for task in MODEL.job("again", "q", 9, steps=40).tasks if task.stage is Stage.SAMPLE]
    assert seconds == pytest.approx(FORMING_SECONDS + task.run_seconds * ratio, rel=1e-3)


def test_a_model_for_two_cards_reads_nothing_from_the_host_and_ends_when_it_was_expected() -> None:
    """Two cards of 24 GB with a bridge, and without one, where one card is as good: reading is most of a step."""
    model = replace(VIDEO, diffusion_bytes=33 * 10**9, activation_bytes=3 * GIB, step_seconds=0.1, degrees=(1, 2))
    node, found = NodeId("box"), {}
    for among in (100e9, 0.0):
        gpus = [SimulatedGpu(WorkerId(f"gpu-{n}"), 24 * GIB, 24.5e9, node=node) for n in range(2)]
        core = SchedulerState(SchedulerConfig(story_length=None))
        machine = SimulatedNode(node, 512 * GIB, 1e12)  # a run is learned without its disk
        pool = VirtualCluster(core, [replace(gpu, gang_link_bytes_per_second=among) for gpu in gpus], [machine])
        pool.start(model.components)
        for number, at in enumerate((5.0, 200.0)):
            pool.post(Submitted(at, model.job(f"j{number}", f"p{number}", number, steps=40)))
        expected: list[float] = []

        def note(state: SchedulerState, expected: list[float] = expected) -> None:
            validate(state)
            ends = [worker.expected_end for worker in state.worker_table.workers.values() if worker.gang is not None]
            expected += [end for end in ends if end is not None and end not in expected]

        pool.run(note)
        last = [run for run in pool.runs if run.stage is Stage.SAMPLE and run.started_at > 200.0]
        if among:
            assert expected[-1] == pytest.approx(last[-1].ended_at, rel=1e-3)
        found[among] = len(last), sum(run.streamed_bytes for run in last)
    assert found[100e9] == (2, 0)
    assert found[0.0][0] == 1
    assert found[0.0][1] > 0


def test_the_loss_of_a_member_costs_a_step_and_the_others_go_on() -> None:
    pool = cluster()
    pool.post(Submitted(5.0, MODEL.job("one", "p", 1, steps=40)))
    pool.lose(WorkerId("gpu-0"), 20.0)
    pool.run(validate)
    assert pool.outcomes == {"one": Outcome.SUCCEEDED}
    (steps,) = pool.steps_computed.values()
    assert 40 <= steps <= 41
    degrees = sorted({sum(other.started_at == run.started_at for other in pool.runs) for run in pool.runs})
    assert degrees[-1] == 4
    assert pool.latency_seconds["one"] < 60.0


def test_a_run_grows_when_gpus_are_idle_and_shrinks_when_others_wait() -> None:
    pool = cluster()
    for number in range(5):
        pool.post(Submitted(1.0, MODEL.job(f"first-{number}", f"p{number}", number, steps=40)))
    pool.post(Submitted(400.0, MODEL.job("alone", "q", 90, steps=400)))
    for number in range(3):
        pool.post(Submitted(430.0, MODEL.job(f"later-{number}", f"r{number}", 100 + number, steps=40)))
    pool.run(validate)
    assert set(pool.outcomes.values()) == {Outcome.SUCCEEDED}
    by_start: dict[tuple[str, float], int] = {}
    for run in pool.runs:
        if run.stage is Stage.SAMPLE:
            by_start[run.job_id, run.started_at] = by_start.get((run.job_id, run.started_at), 0) + 1
    of_one = [gpus for (job_id, _), gpus in sorted(by_start.items()) if job_id == "alone"]
    assert of_one[0] == 4
    assert min(of_one) < 4, "it made room for those that came"
    assert any(len({gpus for (other, _), gpus in by_start.items() if other == job_id}) > 1 for job_id, _ in by_start), (
        "the last of the first ones grew"
    )


@pytest.mark.nightly(usually="tests/simulation/test_gangs_in_time.py")
def test_videos_are_fast_on_an_idle_pool_and_throughput_stays_under_load() -> None:
    shared, alone = simulate("modelpool", 8, "0.2", 1), simulate("one GPU", 8, "0.2", 1)
    assert shared.video_seconds <= 0.2 * alone.video_seconds
    assert shared.image_seconds < alone.image_seconds
    shared, alone = simulate("modelpool", 8, "1.0", 1), simulate("one GPU", 8, "1.0", 1)
    assert shared.jobs_per_minute >= 0.99 * alone.jobs_per_minute


def test_the_studio_has_what_it_says() -> None:
    workload = studio(Random(1), 200, 8, 0.5)
    videos = [one.job for one in workload.jobs if is_video(one.job.job_id)]
    assert 10 <= len(videos) <= 30
    assert {task.degrees for job in videos for task in job.tasks if task.stage is Stage.SAMPLE} == {(1, 2, 4, 8)}
    assert all(one.job.deadline is not None and one.job.deadline > one.at for one in workload.jobs)
