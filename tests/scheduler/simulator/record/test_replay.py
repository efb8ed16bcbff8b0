"""A recorded log gives the same decisions again; where something is different, the first of it is told."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, UserId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import RunTask
from modelpool.scheduler.simulator.record.event_log import LogEntry, LogHeader
from modelpool.scheduler.simulator.record.replay import replay
from tests.scheduler.recorded import RecordedShell, busy_afternoon
from tests.scheduler.world import DRAW, PAINT, image


@pytest.fixture(scope="module")
def afternoon() -> RecordedShell:
    return busy_afternoon()


def test_the_same_events_give_the_same_commands(afternoon: RecordedShell) -> None:
    entries = afternoon.entries
    outcome = replay(LogHeader(afternoon.config), entries, check=True)
    assert outcome.same
    assert outcome.events == len(entries) == len(afternoon.lines) - 1
    assert outcome.commands == sum(len(entry.commands) for entry in entries)
    assert outcome.seconds == afternoon.state.at - entries[0].event.at


def random_afternoon(seed: int) -> RecordedShell:
    """Anything that can happen, in an order that the seed says."""
    rng, shell = random.Random(seed), RecordedShell()
    shell.workers(a=64, b=20, c=30)
    for number in range(80):
        live = [job for job in shell.jobs if job not in shell.resolved]
        match rng.choice(("submit", "submit", "finish", "finish", "finish", "fail", "lose", "up", "cancel", "forget")):
            case "submit":
                user, batch = UserId(rng.choice(("", "ann", "bob"))), rng.choice(("", "night"))
                model, patch = rng.choice((PAINT, DRAW)), rng.choice(("", "", "lora"))
                job = image(f"j{number}", rng.choice("xyz"), model, number, rng.randrange(2), patch)
                shell.submit(replace(job, user=user, batch=batch))
            case "finish" if shell.running:
                cost = RunCost(rng.random(), rng.random() * 9, rng.randrange(9), resident=rng.random() < 0.5)
                shell.finish(rng.choice(sorted(shell.running)), cost=cost)
            case "fail" if shell.running:
                kind = rng.choice((RunErrorKind.OUT_OF_VRAM, RunErrorKind.INPUT_LOST, RunErrorKind.INTERNAL))
                shell.finish(rng.choice(sorted(shell.running)), kind)
            case "lose" if shell.up:
                shell.lose(rng.choice(sorted(shell.up)))
            case "up" if shell.starting:
                shell.come_up(min(shell.starting)[0])
            case "cancel" if live:
                shell.cancel(rng.choice(live))
            case "forget" if shell.held:
                shell.lose_result(rng.choice(sorted(shell.held)))
    return shell


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_is_decided_again_the_same(seed: int) -> None:
    shell = random_afternoon(seed)
    outcome = replay(LogHeader(shell.config), shell.entries)
    assert outcome.same, outcome.difference or outcome.failure
    assert outcome.events > 40


def run_of(entries: list[LogEntry]) -> tuple[int, int, RunTask]:
    """Some start in the middle: which entry, which of its commands."""
    return next(
        (number, place, command)
        for number, entry in enumerate(entries[20:], start=20)
        for place, command in enumerate(entry.commands)
        if isinstance(command, RunTask)
    )


def test_the_first_different_command_is_told_with_what_led_there(afternoon: RecordedShell) -> None:
    entries = afternoon.entries
    number, place, run = run_of(entries)
    assert run.why is not None
    other = replace(run, attempt=run.attempt + 5, why=replace(run.why, passed=41))
    commands = (*entries[number].commands[:place], other, *entries[number].commands[place + 1 :])
    entries[number] = replace(entries[number], commands=commands)
    outcome = replay(LogHeader(afternoon.config), entries)
    difference = outcome.difference
    assert not outcome.same
    assert difference is not None
    assert (difference.recorded, difference.made) == (other, run)
    assert difference.line == entries[number].line == number + 2
    assert difference.fields == (
        f"attempt: {other.attempt} recorded, {run.attempt} replayed",
        f"why.passed: 41 recorded, {run.why.passed} replayed",
    )
    assert run.task_id in {line.subject for line in difference.story}
    assert outcome.events == number + 1


def test_a_command_too_many_or_too_few_is_a_difference(afternoon: RecordedShell) -> None:
    entries = afternoon.entries
    number, place, run = run_of(entries)
    short = replace(entries[number], commands=entries[number].commands[:place])
    difference = replay(LogHeader(afternoon.config), [*entries[:number], short]).difference
    assert difference is not None
    assert difference.recorded != difference.made
    long = replace(entries[number], commands=(*entries[number].commands, run))
    difference = replay(LogHeader(afternoon.config), [*entries[:number], long]).difference
    assert difference is not None
    assert (difference.recorded, difference.made) == (run, None)
    assert difference.fields == ("command: RunTask recorded, nothing replayed",)


def test_another_configuration_decides_otherwise(afternoon: RecordedShell) -> None:
    """The comparison is a real one: what the header says counts."""
    other = SchedulerConfig(story_length=None, placement="arrival_order")
    assert not replay(LogHeader(other), afternoon.entries).same


def test_an_event_that_the_core_fails_at_is_told(afternoon: RecordedShell, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log of a pool that broke ends with what it broke at."""
    entries = afternoon.entries
    last = entries[-1].event
    handle = SchedulerState.handle

    def fragile(state: SchedulerState, event: object) -> object:
        assert event != last, "planted"
        return handle(state, event)  # type: ignore[arg-type]

    monkeypatch.setattr(SchedulerState, "handle", fragile)
    outcome = replay(LogHeader(afternoon.config), entries)
    assert not outcome.same
    assert outcome.failure is not None
    assert outcome.failure.line == entries[-1].line
    assert "AssertionError: planted" in outcome.failure.traceback_text
