"""Whose turn it is: shares by weight, what loads and wrong estimates do, limits, who pays for shared tasks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import JobSpec, RunCost, UserId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.user_account import NO_VIRTUAL_START
from modelpool.scheduler.model.user_share import EVERYBODY, UserShare
from tests.scheduler.world import DRAW, PAINT, Shell, alone, encode, image, sample

ANN, BOB = UserId("ann"), UserId("bob")


def shares(**weights: float) -> tuple[UserShare, ...]:
    return tuple(UserShare(user=UserId(user), weight=weight) for user, weight in weights.items())


def shell_with(share_window_seconds: float = 0.0, **more) -> Shell:
    """Everything fits on its one worker, so only turns decide; runs take what they say."""
    shell = Shell(SchedulerConfig(story_length=None, share_window_seconds=share_window_seconds, **more))
    shell.workers(gpu=64)
    return shell


def single(user: UserId, number: int, seconds: float = 10.0, **more) -> JobSpec:
    """A job of one task that nobody shares, with weights that are the user's own."""
    model = PAINT if user == ANN else DRAW
    task = sample(model=model, seed=number, run_seconds=seconds)
    task = replace(task, task_id=task.task_id + user)
    return replace(alone(f"{user}{number}", task), user=user, **more)


def order_of_starts(shell: Shell, count: int, cost: dict[UserId, RunCost] | None = None) -> list[str]:
    """The users with tasks that run, one after the other; each run costs what its user's runs cost."""
    started = []
    for _ in range(count):
        name = shell.on("gpu")
        if name is None:
            break
        user = ANN if name.endswith("ann") else BOB
        started.append(user)
        shell.finish("gpu", cost=(cost or {}).get(user, RunCost(run_seconds=10.0)))
    return started


def test_users_that_wait_at_once_take_turns_whoever_came_first() -> None:
    shell = shell_with()
    for user in (ANN, BOB):
        for number in range(6):
            shell.submit(single(user, number))
    started = order_of_starts(shell, 12)
    assert sorted(started[:6]) == sorted(started[6:]) == [ANN] * 3 + [BOB] * 3


def test_a_user_alone_goes_as_submitted_without_any_tag(shell: Shell) -> None:
    shell.workers(gpu=64)
    for number in range(4):
        shell.submit(single(ANN, number))
    order = []
    for _ in range(4):
        order.append(shell.on("gpu"))
        assert all(job.virtual_start == NO_VIRTUAL_START for job in shell.state.demand.jobs.values())
        shell.finish("gpu", cost=RunCost(run_seconds=7.0))
    assert order == [single(ANN, number).wanted for number in range(4)]


@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_gpu_seconds_come_by_weight(weight: float) -> None:
    shell = shell_with(shares=shares(ann=weight))
    for number in range(40):
        shell.submit(single(ANN, number))
        shell.submit(single(BOB, number))
    started = order_of_starts(shell, 40)
    assert started.count(ANN) / started.count(BOB) == pytest.approx(weight, rel=0.1)


def test_what_a_run_took_counts_and_not_what_was_thought_of_it() -> None:
    """Bob's runs take three times what they say: he gets a third of the runs, and as many seconds."""
    shell = shell_with()
    for number in range(60):
        shell.submit(single(ANN, number))
        shell.submit(single(BOB, number))
    cost = {ANN: RunCost(run_seconds=10.0), BOB: RunCost(run_seconds=30.0)}
    started = order_of_starts(shell, 60, cost)
    assert started.count(ANN) / started.count(BOB) == pytest.approx(3.0, rel=0.15)


def test_loads_are_paid_by_whose_run_caused_them() -> None:
    shell = shell_with()
    for number in range(60):
        shell.submit(single(ANN, number))
        shell.submit(single(BOB, number))
    cost = {ANN: RunCost(run_seconds=10.0), BOB: RunCost(load_seconds=10.0, run_seconds=10.0)}
    started = order_of_starts(shell, 60, cost)
    assert started.count(ANN) / started.count(BOB) == pytest.approx(2.0, rel=0.15)
    accounts = shell.state.demand.fair_queue.shares.accounts
    assert accounts[BOB].seconds == 20.0 * started.count(BOB)


def test_idle_time_is_no_credit_and_idle_gpus_cost_nothing_later() -> None:
    """Ann works alone for long; when Bob comes they share from then on: he has nothing to catch up, she no debt."""
    shell = shell_with()
    for number in range(20):
        shell.submit(single(ANN, number))
    order_of_starts(shell, 10)
    for number in range(10):
        shell.submit(single(BOB, number))
    started = order_of_starts(shell, 10)
    assert started.count(BOB) in (4, 5)


def test_who_comes_back_has_saved_nothing_up() -> None:
    """1. Ann and Bob share. 2. Ann goes, and Bob works on alone for long. 3. When Ann is back, they share as before."""
    shell = shell_with()
    for number in range(30):
        shell.submit(single(BOB, number))
    shell.submit(single(ANN, 0))
    started = order_of_starts(shell, 12)
    assert ANN in started
    for number in range(1, 11):
        shell.submit(single(ANN, number))
    started = order_of_starts(shell, 12)
    assert 5 <= started.count(ANN) <= 7


def test_a_newcomer_does_not_wait_for_what_was_submitted_before() -> None:
    shell = shell_with()
    for number in range(30):
        shell.submit(single(ANN, number))
    shell.submit(single(BOB, 0))
    assert BOB in order_of_starts(shell, 3), "Bob's only job is behind thirty of Ann's"


def test_priorities_come_before_shares() -> None:
    shell = shell_with()
    shell.submit(single(ANN, 99))  # keeps the worker busy meanwhile
    for number in range(4):
        shell.submit(single(ANN, number, priority=1))
        shell.submit(single(BOB, number))
    started = order_of_starts(shell, 9)
    assert started[1:5] == [ANN] * 4


def test_a_high_priority_job_does_not_wait_for_what_is_set_aside_for_low_ones() -> None:
    """1. Ann has many jobs of low priority, some of them with tags. 2. Bob has some of high priority. 3. Ann's one job
    of high priority takes its turn among those: the share of her low ones is behind it."""
    shell = shell_with()
    shell.submit(single(BOB, 99))
    for number in range(20):
        shell.submit(single(ANN, number))
    for number in range(4):
        shell.submit(single(BOB, number, priority=1))
    shell.submit(single(ANN, 50, priority=1))
    assert ANN in order_of_starts(shell, 4)[1:]


def test_tags_of_a_user_never_fall_and_stay_as_given() -> None:
    shell = shell_with()
    for number in range(12):
        shell.submit(single(ANN, number))
        shell.submit(single(BOB, number))
    seen: dict[str, float] = {}
    virtual = 0.0
    while shell.on("gpu") is not None:
        jobs = list(shell.state.demand.jobs.values())
        for job in jobs:
            if job.virtual_start < NO_VIRTUAL_START:
                assert seen.setdefault(job.name, job.virtual_start) == job.virtual_start
        for user in (ANN, BOB):
            tags = [job.virtual_start for job in jobs if job.spec.user == user]
            assert all(earlier <= later for earlier, later in pairwise(tags))
        assert shell.state.demand.fair_queue.shares.virtual_seconds >= virtual
        virtual = shell.state.demand.fair_queue.shares.virtual_seconds
        shell.finish("gpu", cost=RunCost(run_seconds=3.0 + len(seen) % 5))


def test_within_its_window_a_user_goes_on_with_what_is_loaded() -> None:
    """A worker has room for one of the two models: with a window, turns come in runs, and there are fewer loads."""
    loads = {}
    for window in (0.0, 60.0):
        shell = Shell(SchedulerConfig(story_length=None, share_window_seconds=window, switch_share=0.0))
        shell.workers(gpu=18)
        for number in range(24):
            shell.submit(single(ANN, number))
            shell.submit(single(BOB, number))
        started = order_of_starts(shell, 48)
        assert abs(started[:36].count(ANN) - started[:36].count(BOB)) * 10.0 <= 2 * 60.0 + 10.0
        loads[window] = sum(one != other for one, other in pairwise(started))
    assert loads[60.0] * 2 < loads[0.0]


# ---- what is shared --------------------------------------------------------------------------------------------------


def test_who_asked_first_pays_for_what_others_want_too(shell: Shell) -> None:
    """1. Ann and Bob want the same text. 2. Ann pays. 3. Had she cancelled before, Bob would have."""
    shell.workers(gpu=64)
    shell.submit(replace(image("a", seed=1), user=ANN))
    shell.submit(replace(image("b", seed=2), user=BOB))
    shell.finish("gpu", cost=RunCost(run_seconds=4.0))
    accounts = shell.state.demand.fair_queue.shares.accounts
    assert (accounts[ANN].seconds, accounts[BOB].seconds) == (4.0, 0.0)


def test_when_the_first_no_longer_wants_it_the_next_pays(shell: Shell) -> None:
    shell.workers(gpu=64)
    shell.submit(replace(alone("busy", sample(seed=9)), user=ANN))
    shell.submit(replace(image("a", seed=1), user=ANN))
    shell.submit(replace(image("b", seed=2), user=BOB))
    shell.cancel("a")
    shell.finish("gpu")
    assert shell.on("gpu") == encode("cat").task_id
    shell.finish("gpu", cost=RunCost(run_seconds=4.0))
    assert shell.state.demand.fair_queue.shares.accounts[BOB].seconds == 4.0


def test_a_shared_task_stands_where_the_first_turn_is() -> None:
    """Ann's many jobs come first and want the text that Bob's one job wants: it does not wait for her turn."""
    shell = shell_with()
    shell.submit(single(ANN, 99))
    for number in range(12):
        shell.submit(single(ANN, number))
    text = encode("owl")
    shell.submit(replace(alone("late", text), user=ANN))
    shell.submit(replace(alone("mine", text), user=BOB))
    for _ in range(3):
        shell.finish("gpu", cost=RunCost(run_seconds=10.0))
        if shell.outcome("mine") is not None:
            break
    assert shell.outcome("mine") is not None or shell.on("gpu") == text.task_id


# ---- limits ----------------------------------------------------------------------------------------------------------


def limited(limit: int) -> SchedulerConfig:
    return SchedulerConfig(story_length=None, shares=(UserShare(user=ANN, running_limit=limit),))


@pytest.mark.parametrize("limit", [1, 2])
def test_a_user_never_has_more_tasks_on_workers_than_the_limit(limit: int) -> None:
    shell = Shell(limited(limit))
    shell.workers(one=64, two=64, three=64)
    for number in range(6):
        shell.submit(single(ANN, number))
    for _ in range(6):
        running = list(shell.running)
        assert len(running) <= limit
        if not running:
            break
        assert len(running) == min(limit, len(shell.state.demand.jobs)), "a worker stays idle below the limit"
        shell.finish(running[0])
    assert not shell.state.demand.jobs


def test_others_use_what_the_limit_leaves() -> None:
    shell = Shell(limited(1))
    shell.workers(one=64, two=64)
    shell.submit(single(ANN, 0))
    shell.submit(single(ANN, 1))
    shell.submit(single(BOB, 0))
    assert {name[-3:] for name in (shell.on("one"), shell.on("two")) if name} == {"ann", "bob"}


def test_under_a_limit_images_are_finished_before_others_begin() -> None:
    """An image's next stage is ready when its last one ends: it is before the first stages of later images."""
    shell = Shell(limited(1))
    shell.workers(one=64)
    for number, prompt in enumerate(("cat", "dog")):
        shell.submit(replace(image(f"p{number}", prompt=prompt, seed=number), user=ANN))
    order = []
    while (name := shell.on("one")) is not None:
        order.append(name)
        shell.finish("one")
    assert [name[0] for name in order] == ["e", "s", "d", "e", "s", "d"]


def test_the_first_in_order_may_start_under_a_limit_not_the_first_that_came() -> None:
    """One of Ann's may start next, and one is chosen; then another comes that is before it."""
    shell = Shell(limited(1))
    shell.workers(one=64)
    shell.submit(single(BOB, 0))
    shell.submit(single(ANN, 0))
    shell.submit(single(ANN, 1, priority=1))
    shell.finish("one")
    assert shell.on("one") == single(ANN, 1).wanted


def test_everybody_is_who_is_not_named() -> None:
    config = SchedulerConfig(
        story_length=None, shares=(UserShare(user=EVERYBODY, running_limit=1), UserShare(user=ANN))
    )
    shell = Shell(config)
    shell.workers(one=64, two=64, three=64)
    for number in range(2):
        shell.submit(single(ANN, number))
        shell.submit(single(BOB, number))
    users = [name[-3:] for name in map(shell.on, ("one", "two", "three")) if name]
    assert sorted(users) == ["ann", "ann", "bob"]


@pytest.mark.parametrize(
    "wrong",
    [{"weight": 0.0}, {"weight": float("inf")}, {"weight": True}, {"running_limit": 0}, {"running_limit": True}],
)
def test_a_share_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UnusableField, match=next(iter(wrong))):
        UserShare(user=ANN, **wrong)


def test_a_user_has_one_share() -> None:
    with pytest.raises(UnusableField, match="expected each user once"):
        SchedulerConfig(shares=(UserShare(user=ANN), UserShare(user=ANN, weight=2.0)))


# ---- ageing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ageing_seconds", [None, 20.0])
def test_low_priorities_starve_unless_priorities_age(ageing_seconds: float | None) -> None:
    """There is always work of higher priority. Without ageing a low one never runs: that is what a priority means here.
    With it the low one has come level after a number of steps, and is the oldest then."""
    shell = shell_with(ageing_seconds=ageing_seconds)
    shell.submit(single(BOB, 0, priority=2))
    shell.submit(single(BOB, 1, priority=2))
    shell.submit(single(ANN, 0, priority=0))
    started = []
    for number in range(2, 12):
        started.append(str(shell.on("gpu")))
        shell.submit(single(BOB, number, priority=2))
        shell.tick(9.0)
        shell.finish("gpu", cost=RunCost(run_seconds=10.0))
    assert any(name.endswith("ann") for name in started) == (ageing_seconds is not None)
