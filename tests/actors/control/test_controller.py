"""The controller around the real core: dialogues with a fleet and a clock that the test holds in its hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from modelpool.actors.control.connection import UnknownDriver
from modelpool.actors.control.drivers import SILENCE_SECONDS
from modelpool.actors.control.job_queue import PoolBroken
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.stage_request import InputLatent, StageRequest
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import StageSubmission, StateSaved, Submission, SubmissionId
from modelpool.pool.values.core.errors import AdapterMismatch, DoesNotFit, UnknownName
from modelpool.pool.values.core.stage_params import Latent
from modelpool.pool.values.specs.spec import JobId, OomStep, RunErrorKind, Stage, TaskId, WorkerId
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import (
    Command,
    Event,
    Outcome,
    RunEnded,
    RunTask,
    ScheduleTick,
    Submitted,
    Tick,
)
from tests.actors.fake_fleet import ME, Desk, FakeRef, dialogue, settle
from tests.actors.fakes import FAIL, FakeCatalog, image_of, text_of


def request(prompt: str = "a red circle", **fields) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": prompt, "seed": 1, "steps": 3, **fields})


def expected_image(wanted: GenerateRequest):
    _, cut = build_graph(wanted, JobId("x"), FakeCatalog())
    return image_of(cut.works, cut.job.tasks)


def stages(desk: Desk) -> list[Stage]:
    return [sent.request.task.stage for sent in desk.fleet.sent]


@dialogue
async def test_a_image_goes_through_its_stages_and_its_reference_reaches_the_driver() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    (ended,) = await desk.run_dry()
    assert stages(desk) == [Stage.ENCODE, Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]
    assert ended.outcome is Outcome.SUCCEEDED
    assert ended.result is desk.fleet.sent[-1].ref
    assert (desk.fleet.sent[-1].ref.value.pixels_HWC == expected_image(request()).pixels_HWC).all()
    assert ended.recipe is not None
    assert (ended.recipe.prompt, ended.recipe.schedule, ended.recipe.width) == ("a red circle", "normal", 64)
    assert [task.stage for task in ended.tasks] == stages(desk)
    assert not any(task.shared for task in ended.tasks)


@dialogue
async def test_a_drained_pool_finishes_what_runs_and_starts_nothing() -> None:
    desk = await Desk(workers=1).open()
    await desk.submit(request(), request(seed=2))
    draining = asyncio.ensure_future(desk.controller.drain(3600.0))
    await settle()
    assert not draining.done()
    (running,) = desk.fleet.running
    await desk.finish(running)
    assert draining.done()
    assert await draining == 0
    assert not desk.fleet.running
    assert await desk.controller.drain(3600.0) == 0


@dialogue
async def test_draining_ends_with_its_time() -> None:
    desk = await Desk(workers=1).open()
    await desk.submit(request())
    assert await desk.controller.drain(0.0) == 1


@dialogue
async def test_equal_work_is_run_once_and_counted_once() -> None:
    desk = await Desk(workers=2).open()
    await desk.submit(*(request(seed=seed) for seed in range(3)))
    ended = await desk.run_dry()
    assert stages(desk).count(Stage.ENCODE) == 2  # the prompt and the negative prompt
    encodes = [task for job in ended for task in job.tasks if task.stage is Stage.ENCODE]
    assert len(encodes) == 6
    assert sum(not task.shared for task in encodes) == 2


def texts_started(desk: Desk) -> list[tuple[bool, int]]:
    """Note the texts that start with each job that the core takes from now on, and whether others follow it."""
    told: list[tuple[bool, int]] = []
    handled = desk.controller._dispatcher._on_handled

    def watched(event: Event, commands: Sequence[Command]) -> None:
        started = [command for command in commands if isinstance(command, RunTask)]
        if isinstance(event, Submitted):
            told.append((event.others_follow, sum(1 + len(each.batch_mates) for each in started)))
        else:
            assert len(told) in (0, 5) or not started, "nothing starts between two jobs of a pack"
        handled(event, commands)

    desk.controller._dispatcher._on_handled = watched
    return told


@dialogue
async def test_texts_of_one_submission_share_a_pass() -> None:
    """All jobs are known before the first text starts."""
    desk = await Desk(config=SchedulerConfig(joins=False)).open()
    told = texts_started(desk)
    await desk.submit(*(request(f"circle {number}", batch=8) for number in range(5)))
    assert told == [(True, 0)] * 4 + [(False, 6)], "with the negative prompt"
    ends = await desk.run_dry()
    assert [ended.error for ended in ends] == [None] * 5


@dialogue
async def test_texts_of_one_submission_share_a_pass_where_jobs_bring_new_components() -> None:
    """Found: the sizes of a LoRA that the core did not know came between two jobs, and let the texts before start."""
    desk = await Desk(config=SchedulerConfig(joins=False)).open()
    told = texts_started(desk)
    loras = [[], [("light", 0.5)], [], [("light", 0.7)], [("thick", 0.0)]]
    await desk.submit(*(request(f"circle {n}", batch=8, loras=used) for n, used in enumerate(loras)))
    assert told == [(True, 0)] * 4 + [(False, 6)]
    assert [ended.error for ended in await desk.run_dry()] == [None] * 5


@dialogue
async def test_texts_of_one_submission_share_a_pass_where_runs_of_its_jobs_resume() -> None:
    """Found in a review: the core heard of a saved state between two jobs, and the texts before started without the
    later ones. The core still knows the states."""
    desk = await Desk(config=SchedulerConfig(joins=False)).open()
    saved_runs: list[TaskId] = []

    async def found(graph: JobGraph) -> tuple[tuple[StateSaved, FakeRef], ...]:
        (sampling,) = [task.task_id for task in graph.job.tasks if task.stage is Stage.SAMPLE]
        saved_runs.append(sampling)
        saved = StateSaved(WorkerId(""), 0, sampling, 0, 0, 1, 3, 16)
        return ((saved, FakeRef()),) if len(saved_runs) in (1, 3) else ()

    desk.controller._states.found = found
    told = texts_started(desk)
    await desk.submit(*(request(f"circle {number}", batch=8) for number in range(5)))
    assert told == [(True, 0)] * 5
    assert {run.together for run in desk.fleet.running} == {6}, "with the negative prompt"
    kept = {task_id for task_id, task in desk.state.demand.tasks.items() if task.kept is not None}
    assert kept == {saved_runs[0], saved_runs[2]}


@dialogue
async def test_runs_of_one_submission_resume_where_their_texts_are_there() -> None:
    """Found in a review: samplings that wait for no text started with the last job, and the core, which heard of their
    saved states behind it, let them start from the first step."""
    desk = await Desk(config=SchedulerConfig(joins=False)).open()
    await desk.submit(request("circle", seed=1))
    await desk.run_dry()

    async def found(graph: JobGraph) -> tuple[tuple[StateSaved, FakeRef], ...]:
        (sampling,) = [task.task_id for task in graph.job.tasks if task.stage is Stage.SAMPLE]
        return ((StateSaved(WorkerId(""), 0, sampling, 0, 0, 1, 3, 16), FakeRef()),)

    desk.controller._states.found = found
    handled, resumed = desk.controller._dispatcher._on_handled, dict[TaskId, bool]()

    def watched(event: Event, commands: Sequence[Command]) -> None:
        runs = [command for command in commands if isinstance(command, RunTask)]
        resumed.update((run.task_id, run.resume) for run in runs if run.task_id.startswith("sample"))
        handled(event, commands)

    desk.controller._dispatcher._on_handled = watched
    await desk.submit(*(request("circle", seed=seed) for seed in (2, 3)))
    await desk.submit(request("circle", seed=4))
    assert resumed
    assert all(resumed.values())


@dialogue
async def test_jobs_start_with_the_last_one_of_their_pack_in_whatever_order_they_were_checked() -> None:
    """Found: the job with the largest index counted as the last one, and those behind it waited for the next event."""
    desk = await Desk().open()
    for index in (3, 1, 2):
        await desk.controller.check_each(Submission(ME, SubmissionId("s"), index, (request(seed=index),)))
    await desk.controller.queue_checked(ME, SubmissionId("s"), frozenset())
    await settle()
    assert desk.fleet.running
    assert not desk.state.others_follow
    assert sorted(ended.index for ended in await desk.run_dry()) == [1, 2, 3]


@dialogue
async def test_a_lora_of_the_diffusion_model_shares_the_texts_of_jobs_without_it() -> None:
    desk = await Desk().open()
    await desk.submit(request(), request(loras=[("light", 0.8)]), request(loras=[("light", 0.0)]))
    ended = await desk.run_dry()
    assert stages(desk).count(Stage.ENCODE) == 2
    assert stages(desk).count(Stage.SAMPLE) == 2  # strength 0 is no LoRA
    assert [len(job.recipe.loras) for job in sorted(ended, key=lambda job: job.index)] == [0, 1, 0]


@dialogue
async def test_without_guidance_no_negative_prompt_is_encoded() -> None:
    desk = await Desk().open()
    await desk.submit(request(cfg=1.0))
    await desk.run_dry()
    assert stages(desk) == [Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]


@pytest.mark.parametrize("watch_first", [True, False])
def test_a_worker_that_dies_in_the_middle_is_replaced_and_the_image_is_the_same(watch_first: bool) -> None:
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(request())
        while desk.fleet.running[0].request.task.stage is not Stage.SAMPLE:
            await desk.finish(*desk.fleet.running)
        desk.fleet.kill("gpu-0", watch_first)
        await settle()
        (again,) = desk.fleet.running
        assert (again.incarnation, again.request.attempt, again.request.task.stage) == (2, 2, Stage.SAMPLE)
        (ended,) = await desk.run_dry()
        assert (ended.result.value.pixels_HWC == expected_image(request()).pixels_HWC).all()
        status = await desk.controller.status()
        assert status.restarts == 1
        assert "killed by the test" in status.workers[0].trouble
        lost = {task.stage: task.lost for task in ended.tasks}
        (reason,) = lost.pop(Stage.SAMPLE)
        assert reason.startswith("gpu-0: ")
        assert "killed by the test" in reason
        assert not any(lost.values())
        assert {task.device for task in ended.tasks} == {status.workers[0].device}

    asyncio.run(talk())


@dialogue
async def test_withdrawing_a_submission_cancels_what_has_no_running_task() -> None:
    desk = await Desk(workers=2).open()
    await desk.submit(*(request(prompt=f"p{i}") for i in range(6)))
    started = {desk.controller._tasks.first_job(run.task_id) for run in desk.fleet.running}
    await desk.controller.cancel(ME, SubmissionId("s"), withdraw=True)
    ended = await desk.run_dry()
    succeeded = {job.job_id for job in ended if job.outcome is Outcome.SUCCEEDED}
    assert succeeded == started
    assert [job.outcome for job in ended if job.job_id not in started] == [Outcome.CANCELLED] * (6 - len(started))
    await desk.submit(request(prompt="new"), submission="again")
    assert [job.outcome for job in await desk.run_dry()][-1] is Outcome.SUCCEEDED


@dialogue
async def test_a_report_that_comes_after_the_news_of_its_workers_death_counts_for_nothing() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    first = desk.fleet.running[0]
    desk.fleet.finish_and_die(first)
    await settle()
    assert [(s.task_id, s.request.attempt) for s in desk.fleet.running] == [(first.task_id, 2)]
    (ended,) = await desk.run_dry()
    assert ended.outcome is Outcome.SUCCEEDED
    assert len(desk.controller._tasks) == desk.state.snapshot().results_held


@dialogue
async def test_a_late_report_does_not_hide_that_the_next_attempt_runs() -> None:
    """1. A run ends and its worker dies; the death is told first. 2. The task runs again and nobody wants it any more.
    3. The late report of the first attempt must not make the controller forget the second, which still ends."""
    desk = await Desk().open()
    await desk.submit(request())
    desk.fleet.finish_and_die(desk.fleet.running[0])
    await settle()
    await desk.controller.cancel(ME, SubmissionId("s"))
    (ended,) = await desk.run_dry()
    assert ended.outcome is Outcome.CANCELLED
    await desk.submit(request(), submission="next")
    assert (await desk.run_dry())[-1].outcome is Outcome.SUCCEEDED


@dialogue
async def test_the_death_of_an_idle_worker_is_noticed() -> None:
    desk = await Desk().open()
    desk.fleet.kill("gpu-0")
    await settle()
    assert list(desk.fleet.workers) == [("gpu-0", 2)]
    await desk.submit(request())
    (ended,) = await desk.run_dry()
    assert ended.outcome is Outcome.SUCCEEDED


@dialogue
async def test_workers_that_do_not_start_are_given_up_and_jobs_are_told_why() -> None:
    desk = Desk(config=SchedulerConfig(start_retry_limit=2, start_backoff_seconds=5.0))
    desk.fleet.starts_by_itself = False
    await desk.open()
    await desk.submit(request())
    for _ in range(2):
        await desk.clock.advance(6.0)
        (starting,) = desk.fleet.starting.values()
        starting.set_exception(RuntimeError("no such device"))
        await settle()
    await desk.pass_time(40.0)
    assert not desk.fleet.starting
    (ended,) = await desk.hear()
    assert ended.outcome is Outcome.FAILED
    assert ended.error.kind is RunErrorKind.WORKER_LOST
    status = await desk.controller.wait_ready(0.0)
    assert (status.workers[0].state, status.workers[0].trouble) == ("given_up", "RuntimeError: no such device")


@dialogue
async def test_a_worker_is_started_again_after_the_delay_that_the_core_names_and_not_before() -> None:
    desk = Desk(config=SchedulerConfig(start_backoff_seconds=5.0))
    desk.fleet.starts_by_itself = False
    await desk.open()
    for expected_start in (0.0, 0.0, 5.0):
        await desk.clock.advance(expected_start - 0.01 if expected_start else 0.0)
        assert bool(desk.fleet.starting) == (expected_start == 0.0)
        await desk.clock.advance(0.02)
        (starting,) = desk.fleet.starting.values()
        starting.set_exception(RuntimeError("not yet"))
        await settle()


@dialogue
async def test_a_failing_job_says_why_and_sinks_no_other() -> None:
    desk = await Desk(workers=2).open()
    await desk.submit(request(FAIL), request("a green square"))
    failed, succeeded = sorted(await desk.run_dry(), key=lambda job: job.index)
    assert failed.outcome is Outcome.FAILED
    assert failed.error.kind is RunErrorKind.INTERNAL
    assert "the engine was asked to fail" in failed.error.message
    assert "Traceback" in failed.error.traceback_text
    assert failed.result is None
    assert succeeded.outcome is Outcome.SUCCEEDED


@dialogue
async def test_a_call_that_fails_in_an_unforeseen_way_fails_its_job_only() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    desk.fleet.blow_up(desk.fleet.running[0], ValueError("cannot be unpickled"))
    await settle()
    (ended,) = await desk.hear()
    assert ended.outcome is Outcome.FAILED
    assert "cannot be unpickled" in ended.error.message
    await desk.submit(request(), submission="again")
    assert (await desk.run_dry())[-1].outcome is Outcome.SUCCEEDED


@dialogue
async def test_after_running_out_of_memory_the_next_attempt_starts_with_an_empty_gpu() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    first = desk.fleet.running[0]
    desk.fleet.fail(first, RunErrorKind.OUT_OF_VRAM)
    await settle()
    second = desk.fleet.running[0]
    assert (second.task_id, second.request.attempt) == (first.task_id, 2)
    assert [first.request.fresh, second.request.fresh] == [False, True]
    assert (await desk.run_dry())[0].outcome is Outcome.SUCCEEDED
    assert not any(sent.request.fresh for sent in desk.fleet.sent[2:])


@dialogue
async def test_a_poison_task_is_quarantined_and_all_other_work_is_done() -> None:
    """Whoever samples `poison` runs out of memory, on every worker and in a new process; the others draw on."""
    desk = await Desk(workers=2).open()
    good = [request(f"a circle, {n}") for n in range(6)]
    await desk.submit(*good[:2], request("poison"), *good[2:])
    for _ in range(200):
        if not desk.fleet.running:
            break
        sent = desk.fleet.running[0]
        poisoned = sent.request.task.stage is Stage.SAMPLE and "poison" in text_of(sent.inputs[0].value)
        if poisoned:
            desk.fleet.fail(sent, RunErrorKind.OUT_OF_VRAM)
            await settle()
        else:
            await desk.finish(sent)
    ended = await desk.hear()
    assert [job.outcome for job in sorted(ended, key=lambda job: job.index)].count(Outcome.SUCCEEDED) == 6
    (failed,) = [job for job in ended if job.outcome is Outcome.FAILED]
    assert failed.index == 2
    assert failed.error.kind is RunErrorKind.OUT_OF_VRAM
    assert failed.error.oom_steps == (OomStep.OTHER_WORKER, OomStep.RECYCLE, OomStep.QUARANTINE)
    for part in ("gpu-0", "gpu-1", "quarantined", "attempt 3", "another worker", "recycle the process", "smaller"):
        assert part in failed.error.message
    attempts = [sent.request for sent in desk.fleet.sent if sent.request.attempt > 1]
    assert [attempt.fresh for attempt in attempts] == [True, True]
    assert len({sent.incarnation for sent in desk.fleet.sent}) == 2, "one process was started anew, once"
    await desk.submit(request("poison", seed=1), submission="again")
    (again,) = [job for job in await desk.run_dry() if job.submission_id == "again"]
    assert "is refused" in again.error.message


@dialogue
async def test_a_worker_that_says_it_is_over_is_replaced_and_its_task_runs_again() -> None:
    """The report may come before or after the end of the watch: both mean the same (one was INTERNAL, and final)."""
    for watch_first in (True, False):
        desk = await Desk().open()
        await desk.submit(request())
        first = desk.fleet.running[0]
        worker = desk.fleet.workers[first.worker_id, first.incarnation]
        if watch_first:
            worker.gone.set_result("it was closed")
            await settle()
        else:
            desk.fleet.fail(first, RunErrorKind.WORKER_LOST)
            await settle()
        assert (first.worker_id, first.incarnation) in desk.fleet.ended
        assert (desk.fleet.running[0].task_id, desk.fleet.running[0].incarnation) == (first.task_id, 2)
        assert (await desk.run_dry())[0].outcome is Outcome.SUCCEEDED


@dialogue
async def test_a_run_that_hangs_is_asked_to_stop_and_then_its_worker_is_ended() -> None:
    desk = await Desk(config=SchedulerConfig(run_timeout_seconds=60.0, stop_grace_seconds=5.0)).open()
    await desk.submit(request())
    hanging = desk.fleet.running[0]
    await desk.pass_time(61.0)
    assert hanging.stop_asked
    await desk.clock.advance(6.0)
    assert (hanging.worker_id, hanging.incarnation) in desk.fleet.ended
    assert desk.fleet.running[0].incarnation == 2
    (ended,) = await desk.run_dry()
    assert ended.outcome is Outcome.SUCCEEDED
    assert len(desk.controller._tasks) == desk.state.snapshot().results_held


@pytest.mark.parametrize("ends", ["cancelled", "quarantined"])
def test_nothing_is_remembered_of_a_run_that_hung_when_nobody_wants_it_any_more(ends: str) -> None:
    """Found in a review: no test noticed when the entries of hung runs stayed after their worker was ended."""

    async def talk() -> None:
        config = SchedulerConfig(run_timeout_seconds=60.0, stop_grace_seconds=5.0, crash_limit=1)
        desk = await Desk(config=config).open()
        await desk.submit(request())
        hanging = desk.fleet.running[0]
        if ends == "cancelled":
            await desk.controller.cancel(ME, SubmissionId("s"))
        await desk.pass_time(61.0)
        await desk.clock.advance(6.0)
        assert (hanging.worker_id, hanging.incarnation) in desk.fleet.ended
        (ended,) = await desk.run_dry()
        assert ended.outcome is (Outcome.CANCELLED if ends == "cancelled" else Outcome.FAILED)
        assert len(desk.controller._tasks) == desk.state.snapshot().results_held == 0

    asyncio.run(talk())


@dialogue
async def test_an_input_that_was_lost_is_made_again() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    while desk.fleet.running[0].request.task.stage is not Stage.DECODE:
        await desk.finish(*desk.fleet.running)
    desk.fleet.running[0].inputs[0].lost = True
    (ended,) = await desk.run_dry()
    assert ended.outcome is Outcome.SUCCEEDED
    assert stages(desk).count(Stage.SAMPLE) == 2
    assert (ended.result.value.pixels_HWC == expected_image(request()).pixels_HWC).all()


@dialogue
async def test_cancelling_stops_what_runs_and_starts_nothing_that_waits() -> None:
    desk = await Desk().open()
    await desk.submit(*(request(seed=seed) for seed in range(5)))
    await desk.finish(*desk.fleet.running)
    running = desk.fleet.running[0]
    await desk.controller.cancel(ME, SubmissionId("s"))
    await desk.controller.cancel(ME, SubmissionId("s"))
    await settle()
    assert running.stop_asked
    assert desk.fleet.running == [running]
    ended = await desk.run_dry()
    assert sorted(job.index for job in ended) == [0, 1, 2, 3, 4]
    assert {job.outcome for job in ended} == {Outcome.CANCELLED}
    assert desk.fleet.sent[-1] is running


@dialogue
async def test_a_submission_cancelled_while_it_is_checked_never_runs() -> None:
    desk = await Desk().open()
    submitting = asyncio.ensure_future(desk.submit(request(seed=1), request(seed=2)))
    await asyncio.sleep(0)  # the catalog is asked, and has not answered
    await desk.controller.cancel(ME, SubmissionId("s"))
    await submitting
    assert desk.fleet.sent == []
    assert [job.outcome for job in await desk.hear()] == [Outcome.CANCELLED] * 2
    assert desk.controller._drivers.known[ME].submissions == {}


@dialogue
async def test_one_job_that_is_cancelled_between_its_check_and_its_queueing_never_runs() -> None:
    desk = await Desk().open()
    wanted = tuple(request(f"a {number}", seed=number) for number in range(4))
    submission_id = SubmissionId("s")
    checking = asyncio.ensure_future(desk.controller.check_each(Submission(ME, submission_id, 0, wanted)))
    await asyncio.sleep(0)
    await desk.controller.cancel_jobs(ME, submission_id, (0,))
    await checking
    await desk.controller.cancel_jobs(ME, submission_id, (1, 1))
    await desk.controller.queue_checked(ME, submission_id, frozenset({3}))
    await settle()
    await desk.controller.cancel_jobs(ME, submission_id, (0, 1))
    ended = await desk.run_dry()
    outcomes = [(end.index, end.outcome) for end in ended]
    assert outcomes == [(0, Outcome.CANCELLED), (1, Outcome.CANCELLED), (2, Outcome.SUCCEEDED)]
    assert desk.controller._drivers.known[ME].submissions == {}


@dialogue
async def test_cancelling_leaves_other_submissions_alone() -> None:
    desk = await Desk().open()
    await desk.submit(request(seed=1), submission="mine")
    await desk.submit(request(seed=2), submission="other")
    await desk.controller.cancel(ME, SubmissionId("mine"))
    outcomes = {job.submission_id: job.outcome for job in await desk.run_dry()}
    assert outcomes == {"mine": Outcome.CANCELLED, "other": Outcome.SUCCEEDED}


@pytest.mark.parametrize("workers_up", [True, False])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (request(model="shaps"), UnknownName, "did you mean 'shapes'"),
        (request(loras=["lihgt"]), UnknownName, "did you mean 'light'"),
        (request(loras=["alien"]), AdapterMismatch, "0 of 12 keys"),
        (request(width=16384, height=16384), DoesNotFit, "65.0 MiB of device memory, the budget is 64.0 MiB"),
    ],
)
def test_one_bad_request_and_nothing_of_the_submission_is_queued(bad, error, message, workers_up) -> None:
    async def talk() -> None:
        desk = Desk()
        desk.fleet.starts_by_itself = workers_up
        await desk.open()
        with pytest.raises(error, match=message):
            await desk.submit(request(), bad)
        await settle()
        assert desk.fleet.sent == []
        assert (await desk.controller.status()).jobs["live"] == 0

    asyncio.run(talk())


@dialogue
async def test_an_error_names_the_request_among_several() -> None:
    desk = await Desk().open()
    with pytest.raises(UnknownName, match=r"^request 257: unknown model"):
        await desk.submit(request(), request(model="none"), first_index=256)
    with pytest.raises(UnknownName, match=r"^unknown model"):
        await desk.submit(request(model="none"))


@dialogue
async def test_a_held_part_waits_for_the_rest_of_its_submission() -> None:
    desk = await Desk().open()
    await desk.submit(request(seed=1), hold=True)
    assert desk.fleet.sent == []
    await desk.submit(request(seed=2), first_index=1)
    assert sorted(job.index for job in await desk.run_dry()) == [0, 1]


@dialogue
async def test_a_held_part_whose_rest_is_refused_never_runs() -> None:
    desk = await Desk().open()
    await desk.submit(request(seed=1), hold=True)
    with pytest.raises(UnknownName):
        await desk.submit(request(model="none"), first_index=1)
    await desk.controller.cancel(ME, SubmissionId("s"))
    (ended,) = await desk.run_dry()
    assert ended.outcome is Outcome.CANCELLED
    assert desk.fleet.sent == []


@dialogue
async def test_asking_for_recipes_queues_nothing_and_answers_for_each() -> None:
    desk = await Desk().open()
    good, bad = await desk.controller.recipes((request(), request(model="none")))
    assert good.model == "shapes"
    assert isinstance(bad, UnknownName)
    assert desk.fleet.sent == []


@dialogue
async def test_progress_is_told_of_the_run_that_goes_on_and_of_no_other() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    while desk.fleet.running[0].request.task.stage is not Stage.SAMPLE:
        await desk.finish(*desk.fleet.running)
    sample = desk.fleet.running[0]
    await desk.tell_step(sample, 2, 3)
    (running,) = (await desk.controller.events(ME, desk.cursor, 0.0)).running
    assert (running.index, running.stage, running.worker, running.step, running.steps) == (
        0,
        Stage.SAMPLE,
        "gpu-0",
        2,
        3,
    )
    desk.fleet.kill("gpu-0")
    await settle()
    await desk.tell_step(sample, 3, 3)  # late news of the lost attempt
    (running,) = (await desk.controller.events(ME, desk.cursor, 0.0)).running
    assert (running.step, running.steps) == (0, 0)


@dialogue
async def test_steps_of_an_attempt_that_is_over_are_not_told_of_the_next() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    first = desk.fleet.running[0]
    desk.fleet.fail(first, RunErrorKind.OUT_OF_VRAM)
    await settle()
    assert desk.fleet.running[0].task_id == first.task_id
    await desk.tell_step(first, 1, 2)
    (running,) = (await desk.controller.events(ME, desk.cursor, 0.0)).running
    assert (running.step, running.steps) == (0, 0)


@dialogue
async def test_news_wait_until_there_is_something_to_tell() -> None:
    desk = await Desk().open()
    waiting = asyncio.ensure_future(desk.controller.events(ME, 0, 3600.0))
    await settle()
    assert not waiting.done()
    await desk.submit(request(FAIL))
    while desk.fleet.running:
        await desk.finish(*desk.fleet.running)
    news = await waiting
    while not news.ended:  # it was progress
        news = await desk.controller.events(ME, news.cursor, 3600.0)
    assert news.ended[0].outcome is Outcome.FAILED


@dialogue
async def test_news_that_did_not_arrive_are_told_again() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    while desk.fleet.running:
        await desk.finish(*desk.fleet.running)
    first = await desk.controller.events(ME, 0, 0.0)
    again = await desk.controller.events(ME, 0, 0.0)
    assert first.ended == again.ended
    assert len(first.ended) == 1
    assert (await desk.controller.events(ME, first.cursor, 0.0)).ended == ()


@dialogue
async def test_a_silent_driver_is_gone_and_its_jobs_are_cancelled() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    await desk.clock.advance(SILENCE_SECONDS * 2)
    await desk.finish(*desk.fleet.running)
    assert desk.fleet.running == []
    assert (await desk.controller.status()).jobs["live"] == 0
    with pytest.raises(UnknownDriver):
        await desk.controller.events(ME, 0, 0.0)


@dialogue
async def test_a_driver_that_waits_for_news_is_not_gone() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    waiting = asyncio.ensure_future(desk.controller.events(ME, 0, 3600.0))
    await settle()
    await desk.clock.advance(SILENCE_SECONDS * 10)
    assert desk.fleet.running
    assert not desk.fleet.running[0].stop_asked
    waiting.cancel()


@dialogue
async def test_a_driver_that_leaves_wants_nothing_any_more() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    await desk.controller.leave(ME)
    await desk.controller.leave(ME)
    await desk.finish(*desk.fleet.running)
    assert desk.fleet.running == []
    assert (await desk.controller.status()).jobs["live"] == 0


@dialogue
async def test_stages_can_be_asked_for_one_by_one_and_share_what_is_made() -> None:
    desk = await Desk().open()
    held: dict[TaskId, object] = {}
    for name, stage in zip("abc", (Stage.ENCODE, Stage.SAMPLE, Stage.DECODE), strict=True):
        await desk.controller.submit_stage(
            StageSubmission(ME, SubmissionId(name), StageRequest(stage, request()), held)
        )
        await settle()
        ended = await desk.run_dry()
        held[ended[-1].wanted] = ended[-1].result
    assert stages(desk) == [Stage.ENCODE, Stage.ENCODE, Stage.SAMPLE, Stage.DECODE]
    assert (ended[-1].result.value.pixels_HWC == expected_image(request()).pixels_HWC).all()


@dialogue
async def test_stages_asked_for_before_their_inputs_are_made_share_the_runs() -> None:
    desk = await Desk().open()
    for name, stage in zip("abc", (Stage.ENCODE, Stage.SAMPLE, Stage.DECODE), strict=True):
        await desk.controller.submit_stage(StageSubmission(ME, SubmissionId(name), StageRequest(stage, request()), {}))
    ended = await desk.run_dry()
    assert len(stages(desk)) == 4
    assert {job.outcome for job in ended} == {Outcome.SUCCEEDED}


@dialogue
async def test_a_latent_of_the_drivers_own_is_decoded() -> None:
    desk = await Desk().open()
    given = TaskId("given-1")
    import numpy as np

    mine = FakeRef(Latent(np.zeros((4, 8, 16), np.float32)))
    stage = StageRequest(Stage.DECODE, request(), latent=InputLatent(given, (8, 16)))
    await desk.controller.submit_stage(StageSubmission(ME, SubmissionId("a"), stage, {given: mine}))
    await settle()
    assert desk.fleet.running[0].inputs == (mine,)
    (ended,) = await desk.run_dry()
    assert ended.result.value.pixels_HWC.shape == (64, 128, 3)


class WaitingState(SchedulerState):
    """A core that wants to look again five seconds after anything was submitted."""

    ticks: list[float]

    def handle(self, event):
        if isinstance(event, Tick):
            self.ticks.append(event.at)
        return super().handle(event) + ([ScheduleTick(5.0)] if isinstance(event, Submitted) else [])


@dialogue
async def test_the_core_is_woken_once_after_the_time_that_it_named() -> None:
    state = WaitingState()
    state.ticks = []
    desk = await Desk(state=state).open()
    await desk.submit(request())
    await desk.clock.advance(4.9)
    assert state.ticks == []
    await desk.clock.advance(20.0)
    assert state.ticks == [5.0]


class NotingState(SchedulerState):
    """A core that remembers which runs it asked for."""

    asked: list[RunTask]

    def handle(self, event):
        commands = super().handle(event)
        self.asked += [command for command in commands if isinstance(command, RunTask)]
        return commands


@dialogue
async def test_what_the_core_says_of_a_run_reaches_the_worker() -> None:
    """Found in a review: no test noticed when the next needed components were not sent on. Two models do not fit one
    GPU."""
    state = NotingState()
    state.asked = []
    desk = await Desk(state=state).open()
    await desk.submit(*(request(f"{n}", model=("shapes", "forms")[n % 2]) for n in range(6)))
    desk.fleet.fail(desk.fleet.running[0], RunErrorKind.OUT_OF_VRAM)
    await settle()
    await desk.run_dry()
    told = [
        (r.task.task_id, r.attempt, r.fresh, r.needed_next, r.oom_steps) for r in (s.request for s in desk.fleet.sent)
    ]
    assert told == [(c.task_id, c.attempt, c.fresh, c.needed_next, c.oom_steps) for c in state.asked]
    for said in ("fresh", "needed_next", "oom_steps"):
        assert any(getattr(command, said) for command in state.asked), f"the core never said {said}"


class BrokenState(SchedulerState):
    """A core with a mistake in it."""

    def handle(self, event):
        if isinstance(event, RunEnded):
            raise AssertionError("two and two are five")
        return super().handle(event)


@dialogue
async def test_a_mistake_in_the_core_is_told_to_everyone_who_waits() -> None:
    desk = await Desk(state=BrokenState()).open()
    await desk.submit(request(seed=1), request(seed=2))
    await desk.finish(*desk.fleet.running)
    ended = await desk.hear()
    assert len(ended) == 2
    assert all("two and two are five" in job.error.message for job in ended)
    with pytest.raises(PoolBroken, match="two and two are five"):
        await desk.submit(request(), submission="later")


@dialogue
async def test_closing_ends_every_worker_once_and_asks_for_no_other() -> None:
    desk = await Desk(workers=3).open()
    await desk.submit(request())
    await desk.controller.close()
    await settle()
    assert sorted(desk.fleet.ended) == [("gpu-0", 1), ("gpu-1", 1), ("gpu-2", 1)]
    assert desk.fleet.workers == {}


@dialogue
async def test_nothing_is_remembered_of_jobs_that_ended_but_what_the_core_keeps() -> None:
    desk = await Desk(workers=2, config=SchedulerConfig(kept_results=1)).open()
    await desk.submit(*(request(seed=seed) for seed in range(4)), request(FAIL))
    await desk.run_dry()
    held = desk.state.snapshot().results_held
    assert held <= 1
    assert len(desk.controller._tasks) == held
    assert desk.controller._queue.jobs == {}
    assert desk.controller._drivers.known[ME].submissions == {}
