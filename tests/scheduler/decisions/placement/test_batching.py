"""Several tasks in one run, as the core decides it.

Proves: without the setting nothing is ever run together; with it, tasks alike are, in order, as many as pay by what was
measured and as cost no load; who goes before is not held up, other workers take their part, and limits of users hold;
what fails in a shared run is judged alone, and a task that takes workers down takes nobody along twice; a run goes on
while anybody wants it. `Shell` checks on the way that a mate moves no byte that the first task would not move alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.spec import (
    UNPATCHED,
    ExecutionMode,
    JobId,
    JobSpec,
    OomStep,
    RunCost,
    RunErrorKind,
    TaskId,
    TaskSpec,
    UserId,
    WorkerId,
)
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident
from modelpool.scheduler.decisions.queue.shares import UserShare
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Outcome, StopTask
from tests.scheduler.world import DRAW, PAINT, Shell, alone, decode, encode, sample

GIVEN = TaskId("given:text")
#: room for any number of tasks beside the weights
VAST = 1 << 20


def shell(limit: int = 4, **more: object) -> Shell:
    return Shell(SchedulerConfig(story_length=None, batch_limit=limit, **more))  # type: ignore[arg-type]


def seeds(*numbers: int, **more: object) -> list[TaskSpec]:
    return [sample(GIVEN, seed=number, **more) for number in numbers]  # type: ignore[arg-type]


def submit(world: Shell, tasks: list[TaskSpec], prefix: str = "j", **more: object) -> list[str]:
    names = [f"{prefix}{number}" for number in range(len(tasks))]
    for name, task in zip(names, tasks, strict=True):
        world.submit(alone(name, task, given=(GIVEN,), **more))  # type: ignore[arg-type]
    return names


def busy_first(world: Shell, name: str = "a") -> None:
    """Have the worker run something else meanwhile, so that tasks queue up."""
    world.submit(alone("first", sample(GIVEN, seed=999), given=(GIVEN,)))
    assert world.on(name) is not None


def together(world: Shell, name: str = "a") -> list[TaskId]:
    """The tasks of the run on the worker that have not ended."""
    run = world.running.get(WorkerId(name))
    return [] if run is None else [one.command.task_id for one in run.members]


def end_run(world: Shell, name: str = "a", each_seconds: float = 1.0) -> None:
    """Let every task of the run end well; each took its share."""
    for _ in range(len(together(world, name))):
        world.finish(name, cost=RunCost(run_seconds=each_seconds))


def wait(world: Shell, seconds: float) -> list[Command]:
    """Let time pass, with the ticks that were asked for."""
    until, commands = world.at + seconds, []
    while world.tick_due is not None and world.tick_due <= until:
        commands += world.tick_comes()
    world.at = until
    return commands


def ids(tasks: list[TaskSpec]) -> list[TaskId]:
    return [task.task_id for task in tasks]


# ---- what goes together --------------------------------------------------------------------------------------------


def test_nothing_runs_together_unless_it_is_asked_for() -> None:
    world = Shell()
    world.workers(a=VAST)
    busy_first(world)
    tasks = seeds(1, 2, 3)
    submit(world, tasks)
    world.finish("a")
    assert together(world) == [tasks[0].task_id]


def test_tasks_alike_run_together_in_order_and_end_each_by_itself() -> None:
    world = shell(limit=2)
    world.workers(a=VAST)
    busy_first(world)
    tasks = seeds(1, 2, 3)
    names = submit(world, tasks)
    world.finish("a")
    assert together(world) == ids(tasks[:2])
    world.finish("a", place=1)
    assert (world.outcome(names[1]), world.outcome(names[0])) == (Outcome.SUCCEEDED, None)
    assert together(world) == ids(tasks[:1]), "the worker is free when the last has ended"
    world.finish("a")
    assert together(world) == ids(tasks[2:])
    totals = world.state.worker_table.totals
    assert totals.runs == 3, "each task counts"


@pytest.mark.parametrize(
    "other",
    [
        sample(GIVEN, seed=2, model=DRAW),
        sample(GIVEN, seed=2, patch="x"),
        sample(GIVEN, seed=2, activation_bytes=5),
        sample(GIVEN, seed=2, run_seconds=20.0),
        replace(sample(GIVEN, seed=2), together="other sampler"),
        replace(sample(GIVEN, seed=2), together=""),
        encode("cat"),
        decode(GIVEN),
    ],
    ids=["other weights", "other patches", "other size", "longer", "other settings", "never", "encode", "decode"],
)
def test_tasks_unlike_do_not(other: TaskSpec) -> None:
    world = shell()
    world.workers(a=VAST)
    busy_first(world)
    submit(world, [*seeds(1), other])
    world.finish("a")
    assert len(together(world)) == 1


def test_encodes_and_decodes_go_together_too() -> None:
    world = shell(limit=2)
    world.workers(a=VAST)
    busy_first(world)
    world.submit(alone("x", encode("cat")))
    world.submit(alone("y", encode("dog")))
    world.finish("a")
    assert together(world) == [encode("cat").task_id, encode("dog").task_id]


@given(capacity=st.integers(30, 120), activation=st.integers(1, 20), limit=st.integers(2, 8), other=st.integers(0, 10))
def test_as_many_as_fit_beside_the_weights_that_stay(capacity: int, activation: int, limit: int, other: int) -> None:
    """`Shell` holds the plan for all against the plan for one; here, that no room is wasted either."""
    world = shell(limit)
    world.workers(a=capacity)
    world.submit(alone("first", sample(GIVEN, seed=999, activation_bytes=activation), given=(GIVEN,)))
    if not world.running:
        return  # not even one fits
    tasks = seeds(*range(12), activation_bytes=activation)
    submit(world, tasks)
    entries = [Resident(PAINT, 12, UNPATCHED, 0)] + ([Resident(DRAW, other, UNPATCHED, 0)] if other else [])
    used = sum(entry.resident_bytes for entry in entries)
    if used > capacity:
        return
    world.finish("a", residency=Residency(capacity, tuple(entries)), cost=RunCost(run_seconds=10.0))
    free = capacity - used - 2  # the scratch of a sample
    fitting = max(1, free // activation)
    assert len(together(world)) == (2 if fitting >= 2 else 1), "the smallest size that is not known is tried first"


# ---- what pays -----------------------------------------------------------------------------------------------------


def sizes_run(world: Shell, each_seconds: dict[int, float], runs: int) -> list[int]:
    """How many tasks each of so many runs had, when tasks of a run of n take `each_seconds[n]`."""
    found = []
    for _ in range(runs):
        count = len(together(world))
        found.append(count)
        end_run(world, each_seconds=each_seconds[count])
    return found


def many(limit: int = 8, count: int = 120) -> Shell:
    world = shell(limit)
    world.workers(a=VAST)
    busy_first(world)
    submit(world, seeds(*range(count)))
    world.finish("a", cost=RunCost(run_seconds=10.0))
    return world


def test_larger_runs_are_tried_until_they_no_longer_pay() -> None:
    found = sizes_run(many(), {1: 10.0, 2: 7.0, 4: 5.0, 8: 5.5}, 12)
    assert found[:6] == [2, 2, 4, 4, 8, 8]
    assert set(found[6:]) == {4}


def test_what_does_not_pay_at_all_is_left() -> None:
    found = sizes_run(many(), {1: 10.0, 2: 10.0, 4: 1.0, 8: 1.0}, 10)
    assert found == [2, 2, *[1] * 8], "larger ones are not even tried"


def test_sizes_learn_apart() -> None:
    """Small images gain, large ones do not."""
    world = many(limit=2)
    sizes_run(world, {1: 10.0, 2: 6.0}, 4)
    large = seeds(*range(500, 506), activation_bytes=64)
    submit(world, large, prefix="large")
    seen = []
    while together(world):
        names = together(world)
        if names[0] in ids(large):
            seen.append(len(names))
            end_run(world, each_seconds=10.0)
        else:
            assert len(names) == 2 or not world.state.demand.backlog
            end_run(world, each_seconds=6.0)
    assert seen[:2] == [2, 2]
    assert set(seen[2:]) == {1}


def test_a_run_that_memory_made_smaller_stays_so() -> None:
    world = many(limit=4)
    sizes_run(world, {1: 10.0, 2: 5.0}, 2)
    assert len(together(world)) == 4
    for _ in range(4):
        world.finish("a", cost=RunCost(run_seconds=5.0, batched=2, oom_steps=(OomStep.DIVIDE,)))
    assert set(sizes_run(world, {1: 10.0, 2: 5.0}, 4)) == {2}


# ---- who is not held up --------------------------------------------------------------------------------------------


def images(world: Shell, count: int) -> TaskId:
    """So many samples that become ready at once, with one encode, which is returned and runs already."""
    text = encode("cat")
    for number in range(count):
        task = sample(text.task_id, seed=number)
        world.submit(JobSpec(JobId(f"j{number}"), (text, task), task.task_id))
    return text.task_id


@pytest.mark.parametrize(("count", "sizes"), [(2, [1, 1]), (3, [1, 2]), (4, [2, 2])])
def test_workers_that_have_the_weights_take_their_part(count: int, sizes: list[int]) -> None:
    world = shell(limit=2)
    world.workers(a=VAST, b=VAST)
    submit(world, seeds(901, 902), prefix="warm")
    world.finish("a", cost=RunCost(run_seconds=10.0))
    world.finish("b", cost=RunCost(run_seconds=10.0))
    text = images(world, count)
    (name,) = [name for name in ("a", "b") if world.on(name) == text]
    world.finish(name)
    assert sorted(len(together(world, name)) for name in ("a", "b")) == sizes


def test_a_worker_that_is_soon_free_takes_its_part() -> None:
    """1. Both workers have the weights; one runs for a few seconds more. 2. Two tasks become ready at once. 3. The idle
    worker takes one of them: both in one run would take longer than the other worker needs for the second."""
    world = shell(limit=4)
    world.workers(a=VAST, b=VAST)
    submit(world, seeds(901, 902), prefix="warm")
    world.finish("a", cost=RunCost(run_seconds=10.0))
    world.finish("b", cost=RunCost(run_seconds=10.0))
    submit(world, seeds(903), prefix="long")
    (runs,) = world.running
    (idle,) = {"a", "b"} - {runs}
    assert images(world, 2) == world.on(idle)
    world.at += 4.0
    world.finish(idle)
    assert len(together(world, idle)) == 1


def test_mates_have_the_priority_of_the_first() -> None:
    world = shell(limit=4)
    world.workers(a=VAST)
    busy_first(world)
    high, low = seeds(1), seeds(3, 4)
    submit(world, low, "low")
    submit(world, high, "high", priority=1)
    world.finish("a")
    assert together(world) == ids(high)
    end_run(world)
    assert together(world) == ids(low)


def test_no_mates_while_a_higher_priority_waits_for_another_worker() -> None:
    """1. Each worker has one model. 2. A task of a higher priority waits for the worker that has its model and is soon
    free. 3. The other worker takes the lower ones, one at a time: it may be wanted any moment."""
    world = shell(limit=2)
    world.workers(a=VAST, b=VAST)
    for name, model in (("a", DRAW), ("b", PAINT)):
        world.submit(alone(f"warm {name}", sample(GIVEN, model=model, seed=900), given=(GIVEN,)))
        assert world.on(name) is not None
    world.finish("a", cost=RunCost(run_seconds=10.0))
    world.finish("b", cost=RunCost(run_seconds=10.0))
    world.submit(alone("long a", sample(GIVEN, model=DRAW, seed=901), given=(GIVEN,)))
    world.submit(alone("long b", sample(GIVEN, model=PAINT, seed=901), given=(GIVEN,)))
    submit(world, seeds(1, 2), "low")
    world.submit(alone("high", sample(GIVEN, model=DRAW, seed=1), given=(GIVEN,), priority=1))
    world.at = world.state.worker_table.workers[WorkerId("a")].expected_end - 1.0
    world.finish("b", cost=RunCost(run_seconds=10.0))
    assert together(world, "b") == ids(seeds(1))
    world.finish("a", cost=RunCost(run_seconds=10.0))
    assert together(world, "a") == [sample(GIVEN, model=DRAW, seed=1).task_id]


def test_no_mates_while_a_deadline_comes_near() -> None:
    world = shell(limit=2)
    world.workers(a=VAST)
    busy_first(world)
    for model in (PAINT, DRAW):
        job = alone(f"due {model}", sample(GIVEN, model=model, seed=1), given=(GIVEN,))
        world.submit(replace(job, deadline=world.at + 5.0))
    submit(world, seeds(2))
    world.finish("a")
    assert len(together(world)) == 1
    world.finish("a")
    assert len(together(world)) == 1


def test_what_is_run_in_parts_is_run_alone() -> None:
    """A worker without room for the whole run: parts of several would be no less work."""
    world = shell(limit=4)
    world.workers(a=40)
    world.submit(alone("first", sample(GIVEN, seed=999), given=(GIVEN,)))
    tasks = seeds(1, 2, activation_bytes=40, divisions=(ExecutionMode(9, batch=1, slowdown=1.5),))
    submit(world, tasks)
    world.finish("a")
    assert together(world) == ids(tasks[:1])


def test_limits_of_users_hold() -> None:
    world = shell(limit=4, shares=(UserShare(user=UserId("ann"), running_limit=1),))
    world.workers(a=VAST)
    busy_first(world)
    tasks = seeds(1, 2, 3)
    for number, task in enumerate(tasks):
        job = alone(f"j{number}", task, given=(GIVEN,))
        world.submit(replace(job, user=UserId("ann" if number < 2 else "bob")))
    world.finish("a")
    assert together(world) in ([tasks[0].task_id, tasks[2].task_id], [tasks[2].task_id, tasks[0].task_id])


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def two(limit: int = 2, **more: object) -> tuple[Shell, list[TaskSpec]]:
    world = shell(limit, **more)
    world.workers(a=VAST)
    busy_first(world)
    tasks = seeds(1, 2)
    submit(world, tasks)
    world.finish("a")
    assert together(world) == ids(tasks)
    return world, tasks


def test_a_mate_that_nobody_wants_is_asked_to_stop_and_the_other_goes_on() -> None:
    world, tasks = two()
    (asked,) = [c for c in world.cancel("j1") if isinstance(c, StopTask)]
    assert asked.task_id == tasks[1].task_id
    assert world.outcome("j1") is None
    world.finish("a")
    assert world.outcome("j0") is Outcome.SUCCEEDED
    world.finish("a")  # it ran to its end with the other
    assert world.outcome("j1") is Outcome.CANCELLED


@pytest.mark.parametrize("limit_seconds", [100.0, None])
def test_the_grace_of_one_that_stops_does_not_end_the_run_of_others(limit_seconds: float | None) -> None:
    world, _ = two(stop_grace_seconds=5.0, run_timeout_seconds=limit_seconds)
    world.cancel("j1")
    wait(world, 50.0)
    assert len(together(world)) == 2
    world.cancel("j0")
    wait(world, 6.0)
    assert world.on("a") is None, "now nobody wants it, and it does not stop"
    assert {world.outcome("j0"), world.outcome("j1")} == {Outcome.CANCELLED}


def test_a_run_of_two_may_take_twice_as_long() -> None:
    world, _ = two(run_timeout_seconds=100.0)
    assert not [c for c in wait(world, 150.0) if isinstance(c, StopTask)]
    assert len([c for c in wait(world, 60.0) if isinstance(c, StopTask)]) == 2


@pytest.mark.parametrize("kind", [RunErrorKind.BAD_INPUT, RunErrorKind.INTERNAL, RunErrorKind.INPUT_LOST])
def test_what_fails_in_a_shared_run_is_judged_alone(kind: RunErrorKind) -> None:
    """1. Both fail. 2. Each runs again by itself. 3. What fails then is its own."""
    world, tasks = two()
    world.finish("a", kind)
    world.finish("a", kind)
    assert (world.outcome("j0"), world.outcome("j1")) == (None, None)
    assert together(world) == [tasks[0].task_id]
    world.finish("a", RunErrorKind.BAD_INPUT)
    assert world.outcome("j0") is Outcome.FAILED
    assert together(world) == [tasks[1].task_id]
    world.finish("a")
    assert world.outcome("j1") is Outcome.SUCCEEDED


def test_who_failed_together_never_runs_with_others_again() -> None:
    world, tasks = two(limit=3)
    submit(world, seeds(3, 4), prefix="more")
    world.finish("a", RunErrorKind.INTERNAL)
    world.finish("a", RunErrorKind.INTERNAL)
    seen = []
    while together(world):
        names = together(world)
        seen.append(names)
        end_run(world)
    assert [names for names in seen if set(names) & set(ids(tasks))] == [[tasks[0].task_id], [tasks[1].task_id]]
    assert ids(seeds(3, 4)) in seen


def test_a_task_that_takes_workers_down_is_found_and_the_others_are_done() -> None:
    """1. A shared run takes the worker down. 2. Each of its tasks runs again, by itself, elsewhere or when the worker
    is back. 3. The one that does it again is quarantined; the others end well."""
    world = shell(limit=3, crash_limit=2, start_retry_limit=10)
    world.workers(a=VAST)
    busy_first(world)
    tasks = seeds(1, 2, 3)
    submit(world, tasks)
    world.finish("a", cost=RunCost(run_seconds=10.0))
    assert together(world) == ids(tasks[:2])
    poison = tasks[0].task_id
    world.lose("a")
    for _ in range(20):
        if world.starting:
            world.come_up("a", VAST)
        names = together(world)
        if not names:
            break
        assert len(names) == 1
        if names[0] == poison:
            world.lose("a")
        else:
            end_run(world)
    outcomes = [world.outcome(f"j{number}") for number in range(3)]
    assert outcomes == [Outcome.FAILED, Outcome.SUCCEEDED, Outcome.SUCCEEDED]
    assert "quarantined" in world.error("j0").message


def test_a_worker_that_says_it_is_over_loses_all_tasks_of_its_run() -> None:
    world, _ = two()
    world.finish("a", RunErrorKind.WORKER_LOST)
    assert world.on("a") is None
    world.come_up("a", VAST)
    end_run(world)
    end_run(world)
    assert [world.outcome("j0"), world.outcome("j1")] == [Outcome.SUCCEEDED] * 2


def test_a_failed_job_drops_its_other_task_of_a_lost_run() -> None:
    """Both encodes of one image run together; the loss of the worker is once too often for the job. Nobody is asked to
    stop lost runs."""
    world = shell(limit=2, max_attempts=1)
    world.workers(a=VAST)
    busy_first(world)
    first, second = encode("cat"), encode("dog")
    both = sample(first.task_id, second.task_id)
    world.submit(JobSpec(JobId("x"), (first, second, both), both.task_id))
    world.finish("a")
    assert together(world) == [first.task_id, second.task_id]
    commands = world.lose("a")
    assert world.outcome("x") is Outcome.FAILED
    assert not [c for c in commands if isinstance(c, StopTask)]


def test_old_reports_of_a_shared_run_are_dropped() -> None:
    world, _ = two()
    world.lose("a")
    world.come_up("a", VAST)
    (now,) = together(world)
    for report in world.old[-2:]:
        world.report(report)
    assert together(world) == [now]
