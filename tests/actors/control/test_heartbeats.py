"""Workers that do not answer, in virtual time: when they are suspect, when lost, and what becomes of the task."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.control import controller as controller_module
from modelpool.actors.control.heartbeats import LEAST_BEATS, MOST_BEATS, SUSPECT_BEATS, Heartbeats, patience_seconds
from modelpool.actors.control.losses import Loss, loss_of_silent
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.worker_process import ProcessState
from modelpool.pool.values.specs.spec import WorkerId
from modelpool.scheduler.model.messages import LossCause
from tests.actors.fake_fleet import Desk, dialogue, settle
from tests.actors.fakes import CAPACITY_BYTES

BEAT = 3.0
ONE = WorkerId("gpu-0")


def request(seed: int = 1) -> GenerateRequest:
    return GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=3)


@given(st.floats(0.01, 100.0), st.none() | st.floats(0.0, 1e6))
def test_the_patience_is_the_length_of_the_run_within_bounds(interval: float, repeated: float | None) -> None:
    patience = patience_seconds(interval, repeated)
    assert LEAST_BEATS * interval <= patience <= MOST_BEATS * interval
    if repeated is None:
        assert patience == MOST_BEATS * interval
    elif LEAST_BEATS * interval <= repeated <= MOST_BEATS * interval:
        assert patience == repeated


def test_only_a_worker_that_sent_nothing_is_asked_and_only_once() -> None:
    beats: Heartbeats[str] = Heartbeats(BEAT, 0.0)
    beats.watch("busy")
    beats.watch("idle")
    for round_number in range(1, 10):
        beats.heard("busy")
        assert beats.beat(round_number * BEAT) == (["idle"] if round_number == 1 else [])
    assert beats.silent() == {"idle": 8 * BEAT}
    beats.heard("idle")
    assert beats.silent() == {}
    beats.forget("busy")
    assert beats.beat(30.0) == []
    assert beats.beat(33.0) == ["idle"]


def test_a_controller_that_was_stopped_itself_suspects_no_worker() -> None:
    """SIGSTOP of the controller, or a machine that slept: the answers wait to be read."""
    beats: Heartbeats[str] = Heartbeats(BEAT, 0.0)
    beats.watch("idle")
    beats.beat(BEAT)
    beats.beat(BEAT + 3600.0)
    assert beats.silent() == {"idle": SUSPECT_BEATS * BEAT}
    assert patience_seconds(BEAT, 0.0) > SUSPECT_BEATS * BEAT


def test_only_a_process_that_could_run_can_hang_because_of_its_task() -> None:
    causes = {state: loss_of_silent(state, 40.0).cause for state in (None, *ProcessState)}
    assert causes == {
        None: LossCause.NODE_LOST,
        ProcessState.RUNS: LossCause.CRASH,
        ProcessState.STOPPED: LossCause.KILLED,
        ProcessState.BLOCKED: LossCause.CRASH,
        ProcessState.GONE: LossCause.CRASH,
    }
    assert all("did not answer for 40 s" in loss_of_silent(state, 40.0).reason for state in (None, *ProcessState))


@dialogue
async def test_an_idle_worker_that_hangs_is_shown_and_then_replaced() -> None:
    desk = await Desk(heartbeat_seconds=BEAT).open()
    await desk.clock.advance(100 * BEAT)
    assert desk.fleet.ended == []
    desk.fleet.hung.add(ONE)
    await desk.clock.advance(5 * BEAT)
    (worker,) = (await desk.controller.status()).workers
    assert (worker.incarnation, worker.silent_seconds) == (1, 4 * BEAT)
    await desk.clock.advance((LEAST_BEATS - 4) * BEAT)
    desk.fleet.hung.clear()
    (worker,) = (await desk.controller.status()).workers
    assert desk.fleet.ended == [(ONE, 1)]
    assert (worker.state, worker.incarnation, worker.silent_seconds) == ("idle", 2, 0.0)
    assert worker.trouble == "silent for 30 s"


@dialogue
async def test_an_idle_worker_takes_memory_that_others_have_freed() -> None:
    """Found in a review: a worker took it at its next run only, and the core, which knew its first capacity, refused
    every task that needs more, so that there was none."""
    desk = await Desk(heartbeat_seconds=BEAT).open()
    desk.fleet.growing[ONE] = 4 * CAPACITY_BYTES
    await desk.clock.advance(2 * BEAT)
    assert desk.fleet.grown == [ONE]
    assert desk.state.worker_table.workers[ONE].capacity_bytes == 4 * CAPACITY_BYTES
    assert controller_module._largest_bytes(desk.controller._dispatcher, None) == 4 * CAPACITY_BYTES
    await desk.submit(request(seed=1))
    desk.fleet.growing[ONE] = 8 * CAPACITY_BYTES
    await desk.clock.advance(2 * BEAT)
    assert desk.fleet.grown == [ONE], "a run takes it by itself"


async def wait(desk: Desk, seconds: float) -> None:
    """Let time pass for a driver that listens."""
    end = desk.clock.now() + seconds
    while desk.clock.now() < end:
        await desk.clock.advance(min(BEAT, end - desk.clock.now()))
        await desk.hear()


async def hang(desk: Desk) -> float:
    """Let the one run hang; how long it takes until it is lost."""
    (run,) = desk.fleet.running
    desk.fleet.hung.add(ONE)
    began = desk.clock.now()
    while (run.worker_id, run.incarnation) not in desk.fleet.ended:
        await wait(desk, BEAT)
    desk.fleet.hung.clear()
    return desk.clock.now() - began


async def hang_in_known_work(desk: Desk) -> float:
    """As `hang`, for work of which a run takes 60 s."""
    await desk.submit(request())
    while desk.fleet.running:
        (run,) = desk.fleet.running
        await wait(desk, 60.0)
        desk.fleet.finish(run, run_seconds=60.0)
        await settle()
    await desk.submit(request(seed=2), submission="next")
    return await hang(desk)


@dialogue
async def test_a_run_that_hangs_is_lost_after_about_its_length_and_repeated() -> None:
    desk = await Desk(heartbeat_seconds=BEAT).open()
    seconds = await hang_in_known_work(desk)
    assert 60.0 <= seconds <= 60.0 + 4 * BEAT
    assert [run.incarnation for run in desk.fleet.running] == [2]
    assert [job.error for job in await desk.run_dry()] == [None, None]


@dialogue
async def test_a_task_whose_worker_was_stopped_from_outside_is_not_blamed() -> None:
    """It would be quarantined after two such losses otherwise."""
    desk = await Desk(heartbeat_seconds=BEAT).open()
    desk.fleet.silence = LossCause.KILLED
    await desk.submit(request())
    for _ in range(4):
        await hang(desk)
        await wait(desk, 60.0)
    assert [job.error for job in await desk.run_dry()] == [None]


@dialogue
async def test_a_task_that_hangs_its_workers_is_quarantined() -> None:
    desk = await Desk(heartbeat_seconds=BEAT).open()
    await desk.submit(request())
    for _ in range(2):
        await hang(desk)
    (job,) = await desk.hear()
    assert job.error is not None
    assert "quarantined" in job.error.message


@dialogue
async def test_a_start_that_hangs_fails_and_is_repeated() -> None:
    desk = Desk(heartbeat_seconds=BEAT)
    desk.fleet.starts_by_itself = False
    desk.fleet.hung.add(ONE)
    await desk.open()
    await desk.clock.advance((SUSPECT_BEATS + 3) * BEAT)
    (worker,) = (await desk.controller.status()).workers
    assert (worker.state, worker.silent_seconds) == ("starting", (SUSPECT_BEATS + 2) * BEAT)
    desk.fleet.starts_by_itself = True
    await desk.clock.advance((MOST_BEATS + 2) * BEAT)
    assert desk.fleet.ended == [(ONE, 1)]
    (worker,) = (await desk.controller.status()).workers
    assert (worker.state, worker.incarnation) == ("idle", 2)


@dialogue
async def test_a_start_without_a_process_waits_without_end() -> None:
    """For a node, say: there is nobody to ask."""
    desk = Desk(heartbeat_seconds=BEAT)
    desk.fleet.starts_by_itself = False
    desk.fleet.hung.add(ONE)
    desk.fleet.ping = lambda worker_id, incarnation: None  # type: ignore[method-assign]
    await desk.open()
    await desk.clock.advance(10 * MOST_BEATS * BEAT)
    assert desk.fleet.ended == []
    (worker,) = (await desk.controller.status()).workers
    assert worker.silent_seconds == 0.0


@dialogue
async def test_steps_of_a_run_are_answers() -> None:
    desk = await Desk(heartbeat_seconds=BEAT).open()
    await desk.submit(request())
    (run,) = desk.fleet.running
    await desk.clock.advance(2 * BEAT)
    asked = len(desk.fleet.asked)
    for step in range(1, 4):
        await desk.tell_step(run, step, 10)
        await desk.clock.advance(BEAT)
    assert len(desk.fleet.asked) == asked


@dialogue
async def test_a_worker_that_ends_while_the_cause_is_sought_is_reported_once() -> None:
    desk = await Desk(heartbeat_seconds=BEAT).open()
    found: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
    desk.fleet.why_silent = lambda *silent: found  # type: ignore[method-assign]
    desk.fleet.hung.add(ONE)
    await wait(desk, (LEAST_BEATS + 2) * BEAT)
    assert desk.fleet.ended == []
    desk.fleet.workers[ONE, 1].gone.set_result("killed")
    await settle()
    found.set_result(Loss("silent"))
    await settle()
    assert desk.fleet.ended == [(ONE, 1)]
    (worker,) = (await desk.controller.status()).workers
    assert (worker.incarnation, worker.trouble) == (2, "killed")
