"""Several tasks in one run, from the core's command to the drivers' results, with a fleet in the test's hand.

Proves: tasks that run together are sent together, and each driver gets its own image, the one that it gets without;
whatever happens to one task, to the worker or to an input, everybody has an outcome, and who could have had an image
has it.
"""

from __future__ import annotations

import pytest

from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import SubmissionId
from modelpool.pool.values.specs.spec import RunErrorKind, Stage
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Outcome
from tests.actors.control.test_controller import expected_image
from tests.actors.fake_fleet import ME, Desk, Sent, dialogue, settle

WANTED = [GenerateRequest(model="shapes", prompt="a red circle", seed=seed, steps=3) for seed in range(4)]


def sampling(desk: Desk) -> list[Sent]:
    """The samples that run."""
    return [sent for sent in desk.fleet.running if sent.request.task.stage is Stage.SAMPLE]


async def sampling_desk(**limits: object) -> Desk:
    """A desk with one worker that samples two of the images at once."""
    desk = await Desk(config=SchedulerConfig(batch_limit=2, **limits)).open()  # type: ignore[arg-type]
    for place, wanted in enumerate(WANTED):
        await desk.submit(wanted, submission=f"s{place}", first_index=place)
    while not sampling(desk):
        await desk.finish(*desk.fleet.running)
    assert len(sampling(desk)) == 2
    return desk


async def assert_all_are_made(desk: Desk) -> None:
    ended = {job.index: job for job in await desk.run_dry()}
    assert {job.outcome for job in ended.values()} == {Outcome.SUCCEEDED}
    for index, wanted in enumerate(WANTED):
        assert (ended[index].result.value.pixels_HWC == expected_image(wanted).pixels_HWC).all()


@dialogue
async def test_each_driver_gets_its_own_image() -> None:
    desk = await sampling_desk()
    first, second = sampling(desk)
    assert first.request.run != second.request.run
    assert first.request.work.seed != second.request.work.seed
    await assert_all_are_made(desk)
    stages = [stage for stage in Stage for sent in desk.fleet.sent if sent.request.task.stage is stage]
    assert (stages.count(Stage.SAMPLE), stages.count(Stage.DECODE)) == (4, 4), "each once"
    assert any(sent.together == 2 for sent in desk.fleet.sent if sent.request.task.stage is Stage.DECODE)


@dialogue
async def test_what_fails_in_a_shared_run_is_tried_alone() -> None:
    desk = await sampling_desk()
    for sent in sampling(desk):
        desk.fleet.fail(sent, RunErrorKind.INTERNAL)
    await settle()
    again = sampling(desk)
    assert [sent.together for sent in again] == [1]
    await assert_all_are_made(desk)


@pytest.mark.parametrize("watch_first", [True, False])
def test_a_worker_that_dies_in_a_shared_run_is_replaced(watch_first: bool) -> None:
    @dialogue
    async def talk() -> None:
        desk = await sampling_desk()
        desk.fleet.kill(sampling(desk)[0].worker_id, watch_first)
        await settle()
        assert all(sent.together == 1 for sent in sampling(desk))
        await assert_all_are_made(desk)

    talk()


@dialogue
async def test_an_input_that_is_gone_is_found_out_alone() -> None:
    """1. One of the texts of a shared run is gone. 2. Nobody said whose: both run again, alone. 3. Then it is made
    again for those that read it."""
    desk = await sampling_desk()
    sampling(desk)[0].inputs[0].lost = True
    for sent in sampling(desk):
        desk.fleet.finish(sent)
    await settle()
    assert all(sent.together == 1 for sent in desk.fleet.running)
    await assert_all_are_made(desk)


@dialogue
async def test_cancelling_one_stops_none_of_the_others() -> None:
    desk = await sampling_desk()
    await desk.controller.cancel(ME, SubmissionId("s0"))
    await settle()
    assert [sent.stop_asked for sent in sampling(desk)] == [True, False]
    ended = {job.index: job.outcome for job in await desk.run_dry()}
    assert ended == {0: Outcome.CANCELLED, 1: Outcome.SUCCEEDED, 2: Outcome.SUCCEEDED, 3: Outcome.SUCCEEDED}
