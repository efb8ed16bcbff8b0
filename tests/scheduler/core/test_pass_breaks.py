"""A pass stops for the texts of requests that can join it, and for decodes, where no other worker is free, and only if
that pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.pool.values.specs.spec import JobId, JobSpec, RunCost, TaskId
from modelpool.scheduler.core.pass_breaks import MOST_LOST, SWITCH_SECONDS
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import RunLink, RunTask, StopTask
from tests.scheduler.world import DRAW, PAINT, Shell, alone, decode, encode, sample

GIVEN = TaskId("given:1")
LONG = 400.0


def request(name: str, prompt: str, priority: int = 0, rows: int = 4, model=PAINT) -> JobSpec:
    """Encode and sample of an image, in passes of `rows`."""
    first = encode(prompt)
    second = sample(first.task_id, seed=hash_of(name), run_seconds=LONG, batch_size=rows, model=model)
    return JobSpec(JobId(name), (first, second), second.task_id, priority=priority)


def hash_of(name: str) -> int:
    return sum(map(ord, name))


def pool(workers: int = 1, capacity: int = 64, **config: float | bool) -> Shell:
    """Workers that know how long their runs take, and hold all weights."""
    shell = Shell(SchedulerConfig(story_length=None, **config))  # type: ignore[arg-type]
    shell.workers(**dict.fromkeys("abcdef"[:workers], capacity))
    warm = [
        (sample(GIVEN, seed=1, run_seconds=LONG, batch_size=4), LONG),
        (encode("warm"), 1.0),
        (decode(GIVEN), 2.0),
    ]
    for number, (task, seconds) in enumerate(warm):
        shell.submit(alone(f"warm{number}", task, given=(GIVEN,)))
        (name,) = shell.running
        shell.finish(name, cost=RunCost(run_seconds=seconds))
    return shell


def begin(shell: Shell, name: str = "first", **settings) -> None:
    """Let a request sample, alone in its pass."""
    shell.submit(request(name, f"{name}'s", **settings))
    (name,) = shell.running
    shell.finish(name, cost=RunCost(run_seconds=1.0))


def stops(commands: list) -> list[TaskId]:
    return [command.task_id for command in commands if isinstance(command, StopTask) and command.keep_state]


def test_a_pass_stops_for_the_text_of_a_request_that_joins_it_then() -> None:
    shell = pool()
    begin(shell)
    shell.tick(LONG / 4)
    first = shell.on("a")
    assert stops(shell.submit(request("second", "second's"))) == [first]
    (encoding,) = [one for one in shell.stop_at("a", 2) if isinstance(one, RunTask)]
    assert encoding.task_id == encode("second's").task_id, "before the pass goes on"
    begun = [one for one in shell.finish("a", cost=RunCost(run_seconds=1.0)) if isinstance(one, RunTask)]
    assert [(one.task_id == first, one.resume, one.link) for one in begun] == [
        (True, True, RunLink.OPEN),
        (False, False, RunLink.ENTERS),
    ]


def test_a_pass_stops_for_the_decode_of_an_image_that_has_left_it() -> None:
    shell = pool()
    begin(shell)
    shell.tick(LONG / 4)
    first = shell.on("a")
    other = TaskId("given:2")
    assert stops(shell.submit(alone("ready", decode(other), given=(other,)))) == [first]
    (decoding,) = [one for one in shell.stop_at("a", 2) if isinstance(one, RunTask)]
    assert decoding.task_id == decode(other).task_id


def test_no_pass_stops_without_a_reason() -> None:
    wrong = []
    for reason, second, config, ran in [
        ("its sampling cannot join", request("second", "second's", model=DRAW), {}, LONG / 4),
        ("its sampling is no pass", request("second", "second's", rows=1), {}, LONG / 4),
        ("it has a lower priority", request("second", "second's", priority=-1), {}, LONG / 4),
        ("the pass ends soon", request("second", "second's"), {}, LONG - 1.0),
        ("preemption is off", request("second", "second's"), {"preemption": False}, LONG / 4),
        ("nothing joins", request("second", "second's"), {"joins": False}, LONG / 4),
        ("an encode alone completes nothing", alone("second", sample(GIVEN, seed=9)), {}, LONG / 4),
    ]:
        shell = pool(**config)
        begin(shell)
        shell.tick(ran)
        if stops(shell.submit(second)):
            wrong.append(reason)
    assert not wrong


def test_no_pass_stops_if_another_worker_takes_the_text() -> None:
    shell = pool(2)
    begin(shell)
    shell.tick(LONG / 4)
    assert not stops(shell.submit(request("second", "second's")))
    assert len(shell.running) == 2


def test_stops_take_a_bounded_part_of_the_time() -> None:
    """A pass that has just begun is stopped later, when what the stops cost takes a tenth of the time. The short tasks
    do not count: they have to run in any case."""
    shell = pool()
    begin(shell)
    first, began_at = shell.on("a"), shell.at
    shell.at -= 0.9  # a submission takes a second here
    assert not stops(shell.submit(request("second", "second's")))
    stopped = list[TaskId]()
    while not stopped:
        stopped = stops(shell.tick_comes())
    assert stopped == [first]
    assert shell.at - began_at == pytest.approx(SWITCH_SECONDS / MOST_LOST)


def test_a_stop_with_a_free_row_also_serves_texts_of_rows_that_become_free_later() -> None:
    """Found: each text ran in a stop of its own, after the row for it had become free, so that one GPU at 80% load made
    1.13 images per second of the 1.46 that came."""
    shell = pool()
    begin(shell, rows=2)
    running = shell.on("a")
    for number in range(4):
        shell.at -= 1.0
        assert not stops(shell.submit(request(f"more-{number}", f"more-{number}'s", rows=2))), "it has just begun"
    shell.tick_comes()
    shell.stop_at("a", 2)
    encoded = []
    while shell.on("a").startswith("e:"):
        encoded.append(shell.on("a"))
        shell.finish("a", cost=RunCost(run_seconds=1.0))
    assert len(encoded) == 3, "one for the free row, and as many as the pass has rows"
    assert shell.on("a") == running


def test_nothing_joins_a_pass_that_stops_now() -> None:
    """Found: a request took the row of an image that was done, and its decode stopped the pass at once: the others
    waited for the first step of the new row."""
    shell = pool()
    begin(shell, rows=2)
    first = shell.on("a")
    image = sample(GIVEN, seed=5, run_seconds=LONG, batch_size=2)
    shown = decode(image.task_id)
    shell.submit(JobSpec(JobId("image"), (image, shown), shown.task_id, given=(GIVEN,)))
    shell.submit(alone("waits", sample(GIVEN, seed=7, run_seconds=LONG, batch_size=2), given=(GIVEN,)))
    shell.tick(LONG / 4)
    commands = shell.finish("a", place=1)
    assert stops(commands) == [first]
    assert not [one for one in commands if isinstance(one, RunTask)]
    (decoding,) = [one for one in shell.stop_at("a", 2) if isinstance(one, RunTask)]
    assert decoding.task_id == shown.task_id
    begun = [one for one in shell.finish("a", cost=RunCost(run_seconds=2.0)) if isinstance(one, RunTask)]
    assert [(one.task_id == first, one.link) for one in begun] == [(True, RunLink.OPEN), (False, RunLink.ENTERS)]


def test_no_pass_stops_when_its_rows_could_not_go_on() -> None:
    """Another task goes first there: the rows and the new request would wait for it, and the stop would be in vain."""
    shell = pool()
    begin(shell)
    shell.submit(alone("other", sample(GIVEN, seed=9, model=DRAW), given=(GIVEN,)))
    shell.tick(LONG / 4)  # it has waited for longer than the share window
    assert not stops(shell.submit(request("second", "second's")))


def test_no_pass_stops_with_a_row_that_is_near_its_deadline() -> None:
    shell = pool()
    shell.submit(replace(request("first", "first's"), deadline=shell.at + LONG + 10.0))
    shell.finish("a", cost=RunCost(run_seconds=1.0))
    shell.tick(LONG / 4)
    assert not stops(shell.submit(request("second", "second's")))


def test_texts_that_fill_a_pass_go_before_it() -> None:
    """Before, the sampling that was ready began a pass of its own. Each text goes first once."""
    shell = pool()
    shell.submit(alone("running", sample(GIVEN, seed=9, model=DRAW), given=(GIVEN,)))
    for name in ("first", "second", "third"):
        shell.submit(request(name, f"{name}'s"))
    begun = []
    while "a" in shell.running and len(begun) < 6:
        begun += [one for one in shell.finish("a", cost=RunCost(run_seconds=1.0)) if isinstance(one, RunTask)]
    stages = [one.task_id.partition(":")[0] for one in begun]
    assert stages[:3] == ["e", "e", "e"], stages
    assert begun[3].batch_mates or begun[4].link is RunLink.ENTERS


def test_texts_of_one_pass_take_its_time_once() -> None:
    """Three texts of 0.6 of a sampling each are not worth a wait of the first one; in one pass of that length they
    are."""
    first_stages = {}
    for size in (1, 4):
        shell = pool()
        shell.submit(alone("running", sample(GIVEN, seed=9, model=DRAW), given=(GIVEN,)))
        ready = sample(GIVEN, seed=1, run_seconds=LONG, batch_size=4)
        shell.submit(alone("ready", ready, given=(GIVEN,)))
        for name in ("second", "third", "fourth"):
            text = encode(name, run_seconds=0.6 * LONG, batch_size=size)
            paint = sample(text.task_id, seed=hash_of(name), run_seconds=LONG, batch_size=4)
            shell.submit(JobSpec(JobId(name), (text, paint), paint.task_id))
        (begun, *_) = [one for one in shell.finish("a") if isinstance(one, RunTask)]
        first_stages[size] = begun.task_id[0], len(begun.batch_mates)
    assert first_stages == {1: ("s", 0), 4: ("e", 2)}
