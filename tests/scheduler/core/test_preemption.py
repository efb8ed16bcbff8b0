"""A task of higher priority stops a long run of lower priority, and only that."""

from __future__ import annotations

from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, TaskId, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import RunTask, StopTask
from tests.scheduler.world import DRAW, PAINT, Shell, alone, encode, sample

GIVEN = TaskId("given:1")
LONG = 400.0


def pool(workers: int = 1, **config: float | bool) -> Shell:
    """Workers that know how long their runs take: PAINT runs are long, DRAW runs are short."""
    shell = Shell(SchedulerConfig(story_length=None, **config))  # type: ignore[arg-type]
    names = "abcdef"[:workers]
    shell.workers(**dict.fromkeys(names, 64))
    for seed, (model, seconds) in enumerate([(PAINT, LONG), (DRAW, 10.0)]):
        shell.submit(alone(f"warm{seed}", task(seed, model, seconds), given=(GIVEN,)))
        (name,) = shell.running
        shell.finish(name, cost=RunCost(run_seconds=seconds))
    return shell


def task(seed: int, model=PAINT, seconds: float = LONG):
    return sample(GIVEN, model=model, seed=seed, run_seconds=seconds)


def submit(shell: Shell, name: str, priority: int, model=PAINT, seconds: float = LONG) -> list[StopTask]:
    one = task(100 + len(shell.jobs), model, seconds)
    commands = shell.submit(alone(name, one, priority, (GIVEN,)))
    return [command for command in commands if isinstance(command, StopTask)]


def test_a_long_run_stops_for_a_higher_priority_and_resumes_after_it() -> None:
    shell = pool()
    submit(shell, "long", 0)
    long = shell.on("a")
    (stop,) = submit(shell, "urgent", 1, DRAW, 10.0)
    assert (stop.task_id, stop.keep_state) == (long, True)
    assert not submit(shell, "another", 1, DRAW, 10.0), "one stop serves both: the worker takes one after the other"
    (first,) = [c for c in shell.stop_at("a", 1) if isinstance(c, RunTask)]
    assert (first.task_id != long, first.resume) == (True, False)
    shell.finish("a")
    (last,) = [c for c in shell.finish("a") if isinstance(c, RunTask)]
    assert (last.task_id, last.resume) == (long, True)


def test_no_run_stops_without_a_reason() -> None:
    """For equal or lower priority, if it is short or ends soon, if another worker is soon free, or if it is off."""
    for reason, priority, model, seconds, config in [
        ("equal", 0, PAINT, LONG, {}),
        ("lower", -1, PAINT, LONG, {}),
        ("short", 1, DRAW, 10.0, {}),
        ("off", 1, PAINT, LONG, {"preemption": False}),
        ("patient", 1, PAINT, LONG, {"preemption_wait_seconds": LONG + 100}),
        ("limit", 1, PAINT, LONG, {"preemption_limit": 0}),
    ]:
        shell = pool(**config)
        submit(shell, "running", 0, model, seconds)
        assert not submit(shell, "waiting", priority, DRAW, 10.0), reason
    shell = pool()
    submit(shell, "running", 0)
    shell.tick(LONG - 10.0)
    assert not submit(shell, "waiting", 1, DRAW, 10.0), "it ends soon"
    shell = pool(2)
    submit(shell, "running", 0)
    submit(shell, "other", 0, DRAW, 10.0)
    assert len(shell.running) == 2
    assert not submit(shell, "waiting", 1, DRAW, 10.0), "the other is soon free"


def test_a_stage_without_steps_does_not_stop() -> None:
    shell = pool()
    shell.submit(alone("warm", encode("x", run_seconds=LONG)))
    shell.finish("a", cost=RunCost(run_seconds=LONG))
    shell.submit(alone("long", encode("y", run_seconds=LONG)))
    assert not submit(shell, "urgent", 1, DRAW, 10.0)


def test_the_lowest_priority_stops_first_then_the_longest() -> None:
    shell = pool(3)
    for name, priority in (("p", 1), ("q", 0), ("r", 0)):
        submit(shell, name, priority)
        shell.tick(20.0)
    workers = {shell.running[WorkerId(name)].command.task_id: name for name in shell.running}
    order = [workers[stop.task_id] for n in range(4) for stop in submit(shell, f"u{n}", 2, DRAW, 10.0)]
    begun = sorted(workers.items(), key=lambda item: item[0])
    names = [name for _, name in begun]
    assert order == [names[2], names[1], names[0]], "r began last, so it takes longest; p has a higher priority"


def test_a_task_is_stopped_so_often_at_most() -> None:
    shell = pool(preemption_limit=2)
    submit(shell, "long", 0)
    for number in range(2):
        assert submit(shell, f"urgent{number}", 1, DRAW, 10.0)
        shell.stop_at("a", 1)
        shell.finish("a")
        assert shell.running[WorkerId("a")].command.resume
    assert not submit(shell, "late", 1, DRAW, 10.0)


def test_a_run_that_was_asked_to_stop_for_its_timeout_is_not_asked_again() -> None:
    """Neither for a higher priority nor before its machine ends; its end still counts as a timeout."""
    shell = pool(run_timeout_seconds=LONG + 50.0, stop_grace_seconds=1000.0, crash_limit=1)
    submit(shell, "long", 0)
    while not shell.running[WorkerId("a")].members[0].stop_requested:
        shell.tick_comes()
    assert not submit(shell, "urgent", 1, DRAW, 10.0)
    assert not shell.pause("a")
    shell.finish("a", RunErrorKind.CANCELLED)
    assert "took longer than run_timeout_seconds" in shell.error("long").message
