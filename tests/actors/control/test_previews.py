"""The controller brings wishes for previews to runs, and the newest previews to the drivers that have them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelpool.actors.control.parked_jobs import JobPack
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import DriverEvents, JobPreview, PreviewMade, Submission, SubmissionId
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.previews import Preview, PreviewKind, PreviewWish
from modelpool.pool.values.specs.spec import JobId, Stage
from tests.actors.fake_fleet import ME, Desk, Sent, dialogue, settle
from tests.actors.fakes import FakeCatalog

WISH = PreviewWish(interval_seconds=0.25)
FOUND = FakeCatalog().tiny_decoders()


def request(**fields: object) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {"model": "shapes", "prompt": "a red circle", "seed": 1, "steps": 3, **fields}
    )


async def sampling(desk: Desk) -> Sent:
    """Let everything before the sampling end."""
    while desk.fleet.running[0].request.task.stage is not Stage.SAMPLE:
        await desk.finish(*desk.fleet.running)
    return desk.fleet.running[0]


async def made(desk: Desk, sent: Sent, step: int = 1, run: int | None = None) -> None:
    preview = Preview(step, 3, b"%d" % step)
    number = sent.request.run if run is None else run
    await desk.controller.preview_made(PreviewMade(sent.worker_id, sent.incarnation, sent.task_id, number, preview))


async def hear(desk: Desk) -> DriverEvents:
    return await desk.controller.events(ME, desk.cursor, 0.0)


@dialogue
async def test_without_a_wish_no_run_has_one_and_no_preview_is_passed_on() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    sent = await sampling(desk)
    assert sent.request.preview is None
    await made(desk, sent)
    assert (await hear(desk)).previews == ()
    assert desk.fleet.previews_asked == []


@dialogue
async def test_a_submission_with_a_wish_gets_the_newest_preview_of_its_run_once() -> None:
    desk = await Desk().open()
    await desk.controller.submit(Submission(ME, SubmissionId("s"), 0, (request(),), previews=WISH))
    await settle()
    sent = await sampling(desk)
    assert sent.request.preview == replace(WISH, tiny_decoders=FOUND)
    assert {each.request.preview for each in desk.fleet.sent if each is not sent} == {None}
    for step in (1, 2):
        await made(desk, sent, step)
    assert (await hear(desk)).previews == (JobPreview(SubmissionId("s"), 0, JobId("s-0"), Preview(2, 3, b"2")),)
    assert (await hear(desk)).previews == ()
    await made(desk, sent, run=99)  # of another run
    await desk.finish(sent)
    await made(desk, sent)  # late
    assert (await hear(desk)).previews == ()


@dialogue
async def test_a_wish_during_a_run_reaches_its_worker_and_ends_with_the_submission() -> None:
    desk = await Desk().open()
    await desk.submit(request())
    sent = await sampling(desk)
    wanted = replace(WISH, tiny_decoders=FOUND)
    for wish in (WISH, None):
        await desk.controller.want_previews(ME, SubmissionId("s"), wish)
    run = sent.request.run
    assert desk.fleet.previews_asked == [("gpu-0", run, wanted), ("gpu-0", run, None)]
    await desk.controller.want_previews(ME, SubmissionId("s"), WISH)
    await desk.run_dry()
    assert desk.controller._previews._wishes == {}
    await desk.controller.want_previews(ME, SubmissionId("s"), WISH)  # it is over
    assert desk.controller._previews._wishes == {}


@dialogue
async def test_a_wish_reaches_a_run_that_waits_on_its_worker() -> None:
    """It was sent without one, ahead of time: its previews were never made."""
    desk = await Desk().open()
    await desk.submit(*(request(seed=seed, prompt=f"a circle {seed}") for seed in range(6)))
    waiting: list[Sent] = []
    while not waiting:
        await desk.finish(desk.fleet.running[0])
        waiting = [sent for sent in desk.fleet.queued if sent.request.task.stage is Stage.SAMPLE]
    await desk.controller.want_previews(ME, SubmissionId("s"), WISH)
    assert waiting[0].request.run in {run for _, run, wish in desk.fleet.previews_asked if wish is not None}


@dialogue
async def test_a_request_may_name_the_kind_and_refuse() -> None:
    desk = await Desk().open()
    wanted = (request(preview="taesd"), request(seed=2, preview="none"))
    await desk.controller.submit(Submission(ME, SubmissionId("s"), 0, wanted, previews=WISH))
    await desk.run_dry()
    kinds = [sent.request.preview for sent in desk.fleet.sent if sent.request.task.stage is Stage.SAMPLE]
    assert kinds == [PreviewWish(PreviewKind.TAESD, 0.25, FOUND), None]


@dialogue
async def test_a_driver_that_does_not_listen_keeps_one_preview_of_a_job() -> None:
    desk = await Desk().open()
    await desk.submit(request(preview="auto"))
    sent = await sampling(desk)
    for step in range(1, 100):
        await made(desk, sent, step)
    events = desk.controller._drivers.known[ME].events
    assert [each.preview.step for each in events._previews.values()] == [99]


def test_previews_are_no_part_of_a_task_or_a_recipe() -> None:
    plain, previewed = (
        build_graph(request(**fields), JobId("x"), FakeCatalog()) for fields in ({}, {"preview": "taesd"})
    )
    assert plain[0] == previewed[0]
    assert plain[1].job == previewed[1].job


def test_a_packed_job_keeps_its_kind() -> None:
    async def packed() -> None:
        desk = await Desk().open()
        await desk.submit(request(preview="taesd"), request(seed=2, preview="taesd"))
        jobs = tuple(desk.controller._queue.jobs.values())
        pack = JobPack(jobs)
        pack.pack()
        assert [job.preview for job in pack.jobs()] == ["taesd", "taesd"]

    dialogue(packed)()


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnusableField, match="preview: found 'big', expected one of none, latent_rgb, taesd, auto"):
        GenerateRequest(model="shapes", prompt="", preview="big")
