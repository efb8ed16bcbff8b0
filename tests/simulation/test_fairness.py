"""Shares over whole workloads in virtual time: seconds by weight, few loads for it, and nobody waits for long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.pool.values.specs.spec import JobId, UserId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.decisions.queue.shares import UserShare
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome, Submitted
from modelpool.scheduler.simulator.cluster import VirtualCluster
from modelpool.scheduler.simulator.machines import SimulatedGpu
from modelpool.scheduler.simulator.workloads.models import InventedModel

#: one model with all its parts fits, two do not
CAPACITY_BYTES = 9 * GIB
#: a model is loaded in 3.3 s; an image takes 1.5 s, or 2.5 s
LINK = 2.0 * GIB


def cluster(weights: dict[str, float], gpus: int, **config) -> VirtualCluster[SchedulerState]:
    """Workers that hold one model each; every user has a model of its own, the second's takes longer."""
    shares = tuple(UserShare(user=UserId(user), weight=weight) for user, weight in weights.items())
    state = SchedulerState(SchedulerConfig(story_length=100, shares=shares, **config))
    workers = [SimulatedGpu(WorkerId(f"gpu-{n}"), CAPACITY_BYTES, LINK) for n in range(gpus)]
    simulated = VirtualCluster(state, workers)
    simulated.start([spec for model in models(weights).values() for spec in model.components])
    return simulated


def models(users: dict[str, float]) -> dict[str, InventedModel]:
    return {user: InventedModel(user, step_seconds=0.05 * (1 + place % 2)) for place, user in enumerate(users)}


def submit(
    simulated: VirtualCluster[SchedulerState], model: InventedModel, count: int, at: float = 0.0, user: str = ""
) -> None:
    name = user or model.name
    for number in range(count):
        job = model.job(f"{name}-{number}", f"prompt {number} of {name}", number)
        simulated.post(Submitted(at, replace(job, user=UserId(name), batch=name)))


def seconds_until(simulated: VirtualCluster[SchedulerState], at: float) -> dict[str, float]:
    """GPU-seconds of runs that ended by then, loads included, by model."""
    found: dict[str, float] = {}
    for run in simulated.runs:
        seconds = run.load_seconds + run.run_seconds
        if run.started_at + seconds <= at:
            found[run.model] = found.get(run.model, 0.0) + seconds
    return found


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("weights", [{"ann": 2.0, "bob": 1.0}, {"ann": 1.0, "bob": 3.0}])
def test_seconds_of_users_who_always_wait_come_by_weight(weights: dict[str, float], gpus: int) -> None:
    simulated = cluster(weights, gpus)
    for model in models(weights).values():
        submit(simulated, model, 500)
    simulated.run()
    first_to_end = min(max(r.started_at for r in simulated.runs if r.model == user) for user in weights)
    seconds = seconds_until(simulated, 0.9 * first_to_end)
    assert seconds["ann"] / seconds["bob"] == pytest.approx(weights["ann"] / weights["bob"], rel=0.1)


def test_loads_stay_few_for_it() -> None:
    """One worker for two users with models that do not fit together, so that every turn is a load: a fifth of its time
    at most goes into them. Turns without a window would load for nearly every image."""
    loads = {}
    for window in (0.0, SchedulerConfig().share_window_seconds):
        simulated = cluster({"ann": 1.0, "bob": 1.0}, 1, share_window_seconds=window)
        for model in models({"ann": 1.0, "bob": 1.0}).values():
            submit(simulated, model, 150)
        simulated.run()
        loads[window] = simulated.totals.load_seconds / (simulated.totals.load_seconds + simulated.totals.run_seconds)
    assert loads[SchedulerConfig().share_window_seconds] < 0.2 < loads[0.0]


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("arrives", [3.0, 30.0, 77.0])
def test_a_single_job_is_not_held_up_by_a_stream_of_another_user(gpus: int, arrives: float) -> None:
    """The number of docs/explanation/fairness.md: while one other user waits, a job begins when that one has had its
    window on each worker, at the latest; with what runs at that time and the load that the job needs itself."""
    simulated = cluster({"ann": 1.0, "bob": 1.0}, gpus)
    both = models({"ann": 1.0, "bob": 1.0})
    submit(simulated, both["ann"], 400)
    submit(simulated, both["bob"], 1, arrives)
    simulated.run()
    assert simulated.outcomes[JobId("bob-0")] is Outcome.SUCCEEDED
    config, stages = SchedulerConfig(), 3
    longest_run_seconds, load_seconds, unshared_seconds = 1.0, 6.5 / 2.0, 2.5
    most = config.share_window_seconds + stages * longest_run_seconds + 2 * load_seconds + unshared_seconds
    assert simulated.latency_seconds[JobId("bob-0")] <= most


def missed(number: int) -> tuple[float, float | None]:
    """All deadlines are missed: each that passes lets a job from far behind go first."""
    return 0.0, 30.0 + 0.05 * number


def trickle(number: int) -> tuple[float, float | None]:
    """A long list, and every 4 s a job that has 12 s."""
    at = 4.0 * max(0, number - 160)
    return at, at + 12.0 if at else None


def without(number: int) -> tuple[float, float | None]:
    return 0.0, None


@pytest.mark.parametrize("times", [missed, trickle, without])
def test_jobs_that_went_first_for_their_deadlines_hold_up_nobody_later(
    times: Callable[[int], tuple[float, float | None]],
) -> None:
    """Each set the present to its own turn, far behind jobs of its user that still waited: a user who came later had
    turns after all of them. With 800 jobs, a job of 3 s took 523 s."""
    simulated = cluster({"ann": 1.0, "bob": 1.0}, 2)
    model = models({"ann": 1.0})["ann"]
    for number in range(200):
        at, deadline = times(number)
        job = model.job(f"ann-{number}", f"prompt {number}", number, deadline=deadline, user="ann", batch="ann")
        simulated.post(Submitted(at, job))
    for number in range(4):
        job = model.job(f"bob-{number}", f"prompt {number} of bob", number, user="bob", batch="bob")
        simulated.post(Submitted(20.0 + 25.0 * number, job))
    simulated.run()
    assert simulated.now > 130.0, "ann's jobs wait until the end"
    assert max(simulated.latency_seconds[JobId(f"bob-{number}")] for number in (1, 2, 3)) < 10.0


def test_one_user_alone_is_served_as_if_there_were_no_shares() -> None:
    """Whatever the name, and whatever the settings of shares: the same runs on the same workers at the same times."""
    runs = []
    for user, window in (("", 15.0), ("ann", 15.0), ("ann", 0.0)):
        simulated = cluster({}, 2, share_window_seconds=window)
        chosen = [InventedModel("one"), InventedModel("two", step_seconds=0.07)]
        simulated.start([spec for model in chosen for spec in model.components])
        for place, model in enumerate(chosen):
            for number in range(40):
                job = model.job(f"{model.name}-{number}", f"{model.name} {number}", number)
                simulated.post(Submitted(number * 0.5 + place, replace(job, user=UserId(user))))
        simulated.run()
        runs.append([(r.task_id, r.worker_id, r.started_at) for r in simulated.runs])
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("count", [10, 60])
def test_deadlines_that_can_be_met_are_met_beside_a_stream_of_others(count: int) -> None:
    simulated = cluster({"ann": 1.0, "bob": 1.0}, 2)
    both = models({"ann": 1.0, "bob": 1.0})
    submit(simulated, both["ann"], 400)
    for number in range(count):
        job = both["bob"].job(f"due-{number}", f"due {number}", number)
        simulated.post(Submitted(5.0, replace(job, user=UserId("bob"), deadline=200.0)))
    simulated.run()
    deadlines = simulated.core.demand.fair_queue.deadlines
    assert (deadlines.met, deadlines.missed) == (count, 0)
