"""A worker's next task, sent before its run ends: reports in order, revocations answered once, and equal images."""

from __future__ import annotations

import asyncio
from itertools import islice

import numpy as np
import pytest

from modelpool.actors.control.fleet import InputsLost
from modelpool.actors.control.run_calls import poll_intervals
from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.graph.common.stage_request import UpscaleRequest
from modelpool.actors.request.image_fields import InputImage
from modelpool.actors.worker.wire.messages import StageSubmission, SubmissionId
from modelpool.pool.values.core.results import ImagePixels
from modelpool.pool.values.specs.spec import RunErrorKind, Stage, TaskId
from modelpool.scheduler.core.send_ahead import Calls
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.actors.control.test_controller import expected_image, request
from tests.actors.fake_fleet import ME, Desk, FakeRef, Sent, settle
from tests.actors.fakes import UPSCALER

AHEAD, ALONE = SchedulerConfig(send_ahead_seconds=60.0), SchedulerConfig(send_ahead_seconds=0.0)


async def with_next(desk: Desk) -> tuple[Sent, Sent]:
    """Run until the worker has an encoding and a next one that only one job needs; return both."""
    desk.state.starts.send_ahead.follower = lambda at: None  # else the other tasks of the first image are next
    await desk.open()
    await desk.submit(request("known", cfg=1.0), submission="before")
    await desk.run_dry()
    await desk.submit(request("one", cfg=1.0), submission="one")
    await desk.submit(request("two", cfg=1.0), submission="two")
    (running,), (queued,) = desk.fleet.running, desk.fleet.queued
    assert (running.request.task.stage, queued.request.task.stage) == (Stage.ENCODE, Stage.ENCODE)
    return running, queued


def shown(desk: Desk) -> list[TaskId]:
    return [step.task_id for step in desk.controller._dispatcher.running()]


@pytest.mark.parametrize("workers", [1, 2])
def test_images_are_the_same_with_one_task_and_with_two_on_a_worker(workers: int) -> None:
    async def images(config: SchedulerConfig) -> dict[int, bytes]:
        desk = await Desk(workers, config).open()
        wanted = [request(f"image {n % 3}", seed=n) for n in range(6)]
        await desk.submit(*wanted)
        ahead = 0
        while desk.fleet.running:
            ahead += len(desk.fleet.queued)
            await desk.finish(*desk.fleet.running)
        assert bool(ahead) == (config is AHEAD)
        found = {ended.index: ended.result.value.pixels_HWC.tobytes() for ended in await desk.hear()}
        assert found == {n: expected_image(one).pixels_HWC.tobytes() for n, one in enumerate(wanted)}
        return found

    assert asyncio.run(images(AHEAD)) == asyncio.run(images(ALONE))


def test_the_next_task_is_not_shown_as_running() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, queued = await with_next(desk)
        assert shown(desk) == [running.task_id]
        await desk.finish(running)
        assert shown(desk) == [queued.task_id]

    asyncio.run(talk())


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_next_task_counts_as_running_while_the_device_decodes(overlaps: bool) -> None:
    """Found in an audit: if the worker was lost then, nothing said so of that task."""

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        desk.fleet.overlaps_decode = overlaps
        desk.state.starts.send_ahead.follower = lambda at: None
        await desk.open()
        await desk.submit(request("known", cfg=1.0), submission="before")
        await desk.run_dry()
        await desk.submit(request("one", cfg=1.0), submission="one")
        while desk.fleet.running[0].request.task.stage is not Stage.DECODE:
            await desk.finish(desk.fleet.running[0])
        await desk.submit(request("two", cfg=1.0), submission="two")
        (decode,), (encode,) = desk.fleet.running, desk.fleet.queued
        assert shown(desk) == [decode.task_id, encode.task_id][: 1 + overlaps]
        desk.fleet.kill(decode.worker_id)
        await settle()
        await desk.run_dry()
        lost = {one.stage for ended in desk.ended for one in ended.tasks if one.lost}
        assert lost == {Stage.DECODE, *([Stage.ENCODE] if overlaps else [])}

    asyncio.run(talk())


def test_an_upscale_counts_as_running_while_the_device_decodes_another_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: it counted as a decode. One that reads a decoded image waits, as other decodes do."""
    monkeypatch.setattr(Calls, "join", lambda *args: False)

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        desk.fleet.overlaps_decode = True
        await desk.open()
        await desk.submit(request("known", cfg=1.0, upscale=UPSCALER), submission="before")
        await desk.run_dry()
        await desk.submit(request("one", cfg=1.0, upscale=UPSCALER), submission="one")
        while (decode := desk.fleet.running[0]).request.task.stage is not Stage.DECODE:
            await desk.finish(decode)
        (own,) = desk.fleet.queued
        assert (own.request.own, shown(desk)) == ((decode.request.run,), [decode.task_id])
        await desk.finish(decode, own)
        await desk.submit(request("two", cfg=1.0), submission="two")
        while (decode := desk.fleet.running[0]).request.task.stage is not Stage.DECODE:
            await desk.finish(decode)
        small, pixels = InputImage("a" * 64, 8, 8), FakeRef(ImagePixels(np.zeros((8, 8, 3), np.uint8)))
        stage, given = UpscaleRequest(small, request(upscale=UPSCALER).upscale), {input_image_id(small): pixels}
        await desk.controller.submit_stage(StageSubmission(ME, SubmissionId("three"), stage, given))
        await settle()
        (other,) = desk.fleet.queued
        assert shown(desk) == [decode.task_id, other.task_id]
        await desk.run_dry()

    asyncio.run(talk())


def test_a_cancelled_job_ends_before_the_run_in_front_of_it() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, _ = await with_next(desk)
        await desk.controller.cancel("me", "two")
        await settle()
        ended = {one.submission_id: one.outcome for one in await desk.hear()}
        assert ended["two"] is Outcome.CANCELLED
        assert desk.fleet.running == [running]
        await desk.run_dry()
        assert {one.submission_id: one.outcome for one in desk.ended}["one"] is Outcome.SUCCEEDED

    asyncio.run(talk())


def test_a_revocation_that_comes_too_late_stops_the_run() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, queued = await with_next(desk)

        async def too_late(*_: object) -> bool:
            return False

        desk.fleet.revoke = too_late
        await desk.controller.cancel("me", "two")
        await desk.finish(running)
        assert queued.stop_asked
        await desk.run_dry()
        assert {one.submission_id: one.outcome for one in desk.ended}["two"] is Outcome.CANCELLED

    asyncio.run(talk())


def test_a_run_that_says_itself_that_it_was_revoked_is_answered_once() -> None:
    """The report of a revoked run may be faster than the answer of the revocation."""

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, queued = await with_next(desk)
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def later(*_: object) -> bool:
            return await answer

        desk.fleet.revoke = later
        await desk.controller.cancel("me", "two")
        await desk.finish(running)
        desk.fleet.running.clear()
        for worker in desk.fleet.workers.values():
            worker.running.remove(queued)
        queued.report.set_result(None)
        await settle()
        answer.set_result(True)
        await settle()
        await desk.run_dry()
        assert {one.submission_id: one.outcome for one in desk.ended}["two"] is Outcome.CANCELLED

    asyncio.run(talk())


def test_a_revoked_call_may_fail_because_its_inputs_are_gone() -> None:
    """Nobody waits for it any more; the pool goes on."""

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, queued = await with_next(desk)
        worker = desk.fleet.workers[running.worker_id, running.incarnation]

        async def in_time(*_: object) -> bool:
            worker.queued.remove(queued)
            return True

        desk.fleet.revoke = in_time
        await desk.controller.cancel("me", "two")
        await settle()
        await desk.finish(running)
        queued.report.set_exception(InputsLost("gone"))
        await desk.run_dry()
        assert {one.submission_id: one.outcome for one in desk.ended}["one"] is Outcome.SUCCEEDED

    asyncio.run(talk())


def test_reports_are_handled_in_the_order_of_the_runs() -> None:
    """Also if the call of the first fails, which takes longer to notice."""

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, queued = await with_next(desk)
        handled: list[TaskId] = []
        inner = desk.state._run_ended
        desk.state._run_ended = lambda event: (handled.append(event.report.task_id), inner(event))[1]
        worker = desk.fleet.workers[running.worker_id, running.incarnation]
        worker.running, worker.queued = [queued], []
        desk.fleet.finish(queued)
        await settle()
        assert not handled
        worker.running.append(running)
        await desk.finish(running)
        assert handled[:2] == [running.task_id, queued.task_id]
        await desk.run_dry()
        assert [one.outcome for one in desk.ended] == [Outcome.SUCCEEDED] * 3

    asyncio.run(talk())


def test_a_run_behind_a_batch_is_reported_after_it() -> None:
    """The call of a batch takes longer to notice."""

    async def talk() -> None:
        desk = await Desk(config=SchedulerConfig(send_ahead_seconds=60.0, batch_limit=2)).open()
        await desk.submit(request("known", cfg=1.0), submission="before")
        await desk.run_dry()
        await desk.submit(request("p", seed=1, cfg=1.0), request("p", seed=2, cfg=1.0), submission="two")
        while len(desk.fleet.running) < 2:
            await desk.finish(*desk.fleet.running)
        await desk.submit(request("other", cfg=1.0), submission="other")
        batch, (queued,) = list(desk.fleet.running), desk.fleet.queued
        handled: list[TaskId] = []
        inner = desk.state._run_ended
        desk.state._run_ended = lambda event: (handled.append(event.report.task_id), inner(event))[1]
        worker = desk.fleet.workers[queued.worker_id, queued.incarnation]
        worker.running, worker.queued = [queued], []
        desk.fleet.finish(queued)
        await settle()
        assert not handled
        worker.running += batch
        await desk.finish(*batch)
        assert handled[:3] == [*(one.task_id for one in batch), queued.task_id]
        await desk.run_dry()
        assert [one.outcome for one in desk.ended] == [Outcome.SUCCEEDED] * 4

    asyncio.run(talk())


def test_a_worker_gets_its_next_task_before_drivers_hear_of_an_end() -> None:
    async def talk() -> None:
        desk = await Desk(config=ALONE).open()
        await desk.submit(request("one", cfg=1.0), submission="one")
        await desk.submit(request("two", cfg=1.0), submission="two")
        sent: list[int] = []
        resolved = desk.controller._dispatcher._on_resolved
        desk.controller._dispatcher._on_resolved = lambda end: (sent.append(len(desk.fleet.sent)), resolved(end))
        while not sent:
            before = len(desk.fleet.sent)
            await desk.finish(*desk.fleet.running)
        assert sent == [before + 1], "the end of the first job is told after the next start"
        assert [one.outcome for one in await desk.run_dry()] == [Outcome.SUCCEEDED] * 2

    asyncio.run(talk())


def test_a_worker_that_dies_loses_both_and_only_one_has_failed() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, queued = await with_next(desk)
        desk.fleet.kill(running.worker_id)
        await settle()
        await desk.clock.advance(10.0)
        tasks = desk.state.demand.tasks
        assert (tasks[running.task_id].failures, tasks[queued.task_id].failures) == (1, 0)
        await desk.run_dry()
        assert [one.outcome for one in desk.ended] == [Outcome.SUCCEEDED] * 3
        lost = {task.stage: task.lost for one in desk.ended if one.submission_id == "two" for task in one.tasks}
        assert lost[Stage.ENCODE] == ()

    asyncio.run(talk())


async def with_call(desk: Desk) -> tuple[Sent, list[Sent]]:
    """Run until the worker has queued runs that were sent in one call; return the running one and those."""
    desk.state.starts.send_ahead.follower = lambda at: None  # else the tasks of one image are
    await desk.open()
    for n in range(12):
        await desk.submit(request(f"text {n}", seed=n, cfg=1.0), submission=f"s{n}")
    while not desk.fleet.joined:
        await desk.finish(*desk.fleet.running)
    (running,) = desk.fleet.running
    return running, desk.fleet.joined[0]


def test_images_are_the_same_with_several_runs_in_a_call() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        await with_call(desk)
        ended = [*desk.ended, *await desk.run_dry()]
        found = {one.submission_id: one.result.value.pixels_HWC.tobytes() for one in ended}
        wanted = {f"s{n}": request(f"text {n}", seed=n, cfg=1.0) for n in range(12)}
        assert found == {name: expected_image(one).pixels_HWC.tobytes() for name, one in wanted.items()}

    asyncio.run(talk())


def test_a_call_that_fails_is_sent_again_run_by_run() -> None:
    """Then the run that cannot be sent fails alone."""

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, call = await with_call(desk)
        worker = desk.fleet.workers[running.worker_id, running.incarnation]
        worker.queued = [sent for sent in worker.queued if sent not in call]
        before = len(desk.fleet.sent)
        call[0].report.set_exception(InputsLost("an input of one of them is gone"))
        await settle()
        await desk.run_dry()
        again = [sent.request.run for sent in desk.fleet.sent[before:]]
        assert [run for run in again if run in {sent.request.run for sent in call}] == [s.request.run for s in call]
        assert [one.outcome for one in desk.ended] == [Outcome.SUCCEEDED] * 12

    asyncio.run(talk())


def test_a_cancelled_job_ends_from_the_middle_of_a_call() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        _, call = await with_call(desk)
        revoked = call[1]
        (job_id,) = desk.state.demand.tasks[revoked.task_id].demand
        await desk.controller.cancel("me", job_id.rpartition("-")[0])
        await settle()
        assert revoked not in desk.fleet.queued
        await desk.run_dry()
        assert sorted(one.outcome.name for one in desk.ended) == ["CANCELLED"] + ["SUCCEEDED"] * 11

    asyncio.run(talk())


def test_a_run_that_takes_long_does_not_keep_back_the_ends_of_its_call(monkeypatch) -> None:
    async def talk() -> None:
        monkeypatch.setattr("modelpool.actors.control.run_calls.OVERDUE_CALL_SECONDS", 0.01)
        desk = Desk(config=AHEAD)
        running, call = await with_call(desk)
        desk.fleet.finish(running)
        while desk.fleet.running[0] is not call[0]:
            await desk.finish(desk.fleet.running[0])
        await desk.finish(call[0])
        while call[0].task_id in desk.state.demand.tasks:
            await asyncio.sleep(0.01)
        assert shown(desk) == [call[1].task_id]
        await desk.run_dry()
        assert [one.outcome for one in desk.ended] == [Outcome.SUCCEEDED] * 12

    asyncio.run(talk())


def test_callers_get_their_turn_between_the_ends_of_a_call() -> None:
    """A submission waited while the controller ended all runs of a call, and sent new ones after each."""

    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, call = await with_call(desk)
        calls, turn, ended_in = desk.controller._dispatcher._calls, 0, {}
        end_run = calls._end_run

        def noting(report, *rest) -> None:
            ended_in[report.task_id] = turn
            end_run(report, *rest)

        calls._end_run = noting
        desk.fleet.finish(running)
        while any(not sent.report.done() for sent in call):
            desk.fleet.finish(desk.fleet.running[0])
        while len(ended_in) < 1 + len(call):
            turn += 1
            assert turn < 1000
            await asyncio.sleep(0)
        turns = [ended_in[sent.task_id] for sent in call]
        assert len(turns) > 1
        assert turns == sorted(set(turns)), "one end in a turn of the loop, in their order"
        await desk.run_dry()
        assert [one.outcome for one in desk.ended] == [Outcome.SUCCEEDED] * 12

    asyncio.run(talk())


def test_a_worker_that_dies_between_the_ends_of_a_call_loses_and_repeats_no_output() -> None:
    async def talk(turns: int) -> int:
        desk = Desk(config=AHEAD)
        await with_call(desk)
        while desk.fleet.running:
            desk.fleet.finish(desk.fleet.running[0])
        (worker_id, _), *_ = desk.fleet.workers
        for _ in range(turns):
            await asyncio.sleep(0)
        desk.fleet.kill(worker_id)
        left = len(desk.controller._dispatcher.workers[worker_id].runs)
        for _ in range(2):
            await settle()
            await desk.clock.advance(20.0)
            await desk.run_dry()
        await desk.hear()
        assert not desk.controller._queue.broken
        assert sorted(one.submission_id for one in desk.ended) == sorted(f"s{n}" for n in range(12))
        assert {one.outcome for one in desk.ended} == {Outcome.SUCCEEDED}
        return left

    left = [asyncio.run(talk(turns)) for turns in range(4, 16)]
    assert len(set(left)) > 3, "between several ends"


def test_a_call_that_takes_long_is_asked_for_ever_at_bounded_intervals() -> None:
    """The end of its next run is known some seconds later at most, however long the call takes."""
    assert list(islice(poll_intervals(0.5), 8)) == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0]


async def with_image(desk: Desk) -> tuple[Sent, list[Sent]]:
    """Run until the worker encodes the text of an image, and has its other tasks; return both."""
    await desk.open()
    await desk.submit(request("known", cfg=1.0), submission="before")
    await desk.run_dry()
    await desk.submit(request("one", cfg=1.0), submission="one")
    (running,) = desk.fleet.running
    assert [sent.request.task.stage for sent in desk.fleet.queued] == [Stage.SAMPLE, Stage.DECODE]
    return running, list(desk.fleet.queued)


def outcomes(desk: Desk) -> dict[str, Outcome]:
    return {one.submission_id: one.outcome for one in desk.ended}


def test_a_worker_computes_an_image_without_a_message_between_its_tasks() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, followers = await with_image(desk)
        line = [running, *followers]
        assert [sent.request.own for sent in line] == [(), (running.request.run,), (followers[0].request.run,)]
        assert [sent.inputs for sent in followers] == [(), ()]
        before = len(desk.fleet.sent)
        for sent in line:
            assert desk.fleet.running == [sent]
            await desk.finish(sent)
        assert len(desk.fleet.sent) == before
        (ended,) = [one for one in await desk.hear() if one.submission_id == "one"]
        expected = expected_image(request("one", cfg=1.0)).pixels_HWC
        assert ended.result.value.pixels_HWC.tobytes() == expected.tobytes()

    asyncio.run(talk())


@pytest.mark.parametrize("end", ["fails", "loses its inputs", "dies"])
def test_what_follows_a_failed_run_starts_after_the_next_one(end: str) -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, followers = await with_image(desk)
        match end:
            case "fails":
                desk.fleet.fail(running, RunErrorKind.FILE_UNAVAILABLE)
            case "loses its inputs":
                desk.fleet.blow_up(running, InputsLost("gone"))
            case "dies":
                desk.fleet.kill(running.worker_id)
        await settle()
        await desk.clock.advance(10.0)
        tasks = desk.state.demand.tasks
        assert [tasks[sent.task_id].failures for sent in followers] == [0, 0]
        await desk.run_dry()
        assert outcomes(desk)["one"] is Outcome.SUCCEEDED

    asyncio.run(talk())


def test_a_cancelled_image_ends_with_the_run_in_progress() -> None:
    async def talk() -> None:
        desk = Desk(config=AHEAD)
        running, _ = await with_image(desk)
        await desk.controller.cancel("me", "one")
        await settle()
        assert not desk.fleet.queued
        assert running.stop_asked
        await desk.finish(running)
        await desk.hear()
        assert outcomes(desk)["one"] is Outcome.CANCELLED
        assert not desk.state.demand.tasks

    asyncio.run(talk())
