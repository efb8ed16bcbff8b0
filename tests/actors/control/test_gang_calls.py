"""Parts of shared runs: each member gets its rank and where they meet, and every end comes back once."""

from __future__ import annotations

import asyncio

from modelpool.actors.worker.wire.messages import JobEnded, SubmissionId
from modelpool.pool.values.specs.spec import NodeId, RunErrorKind, Stage, WorkerId
from tests.actors.control.test_controller import request
from tests.actors.fake_fleet import ME, Desk, FakeRef, Sent, dialogue, settle


async def desk_of(workers: int = 2) -> Desk:
    """Workers on one machine, which sample a request together."""
    desk = Desk(workers=workers, epoch=7)
    desk.fleet.node = NodeId("n1")
    desk.controller._most_gpus = 8
    return await desk.open()


def numbers_of_gpus(ended: JobEnded) -> tuple[int, ...]:
    """As the summary of its sampling task tells them."""
    (numbers,) = [task.gpus for task in ended.tasks if task.gpus]
    return numbers


async def until_shared(desk: Desk) -> list[Sent]:
    """The parts of the first shared run."""
    while not (parts := [sent for sent in desk.fleet.running if sent.request.gang is not None]):
        await desk.finish(*desk.fleet.running)
    return parts


@dialogue
async def test_each_member_gets_its_rank_and_the_result_is_the_first_ones() -> None:
    desk = await desk_of()
    asked: list[WorkerId] = []
    address = desk.fleet.gang_address

    async def counted(worker_id: WorkerId, incarnation: int) -> str:
        asked.append(worker_id)
        return await address(worker_id, incarnation)

    desk.fleet.gang_address = counted  # type: ignore[method-assign]
    await desk.submit(request(cfg=3.0, gpus=2), request("other", cfg=3.0, gpus=2))
    for number in (1, 2):
        parts = await until_shared(desk)
        gangs = [sent.request.gang for sent in parts]
        assert [gang.rank for gang in gangs if gang] == [0, 1]
        assert len({(gang.gang_id, gang.members, gang.address) for gang in gangs if gang}) == 1
        assert gangs[0] is not None
        assert gangs[0].gang_id.startswith("7/"), "unique among all controllers"
        assert gangs[0].members == tuple(sent.worker_id for sent in parts)
        assert len({sent.inputs for sent in parts}) == 1
        await desk.finish(parts[1])
        assert parts[0].task_id in desk.state.demand.tasks, number
        await desk.finish(parts[0])
        decode = next(sent for sent in desk.fleet.running if sent.request.task.stage is Stage.DECODE)
        assert decode.inputs == (parts[0].ref,)
        await desk.finish(*desk.fleet.running)
    ended = await desk.run_dry()
    assert [one.error for one in ended] == [None, None]
    assert [numbers_of_gpus(one) for one in ended] == [(2,), (2,)]
    assert len(asked) == 1, "a worker is asked once where its gangs meet"
    assert not desk.controller._tasks._entries or all(
        not entry.running for entry in desk.controller._tasks._entries.values()
    )


@dialogue
async def test_a_member_is_lost_and_the_others_resume() -> None:
    desk = await desk_of(3)
    await desk.submit(request(cfg=3.0, gpus=2))
    parts = await until_shared(desk)
    desk.fleet.kill(parts[0].worker_id)
    await settle()
    assert parts[1].stop_asked
    desk.fleet.fail(parts[1], RunErrorKind.GANG_BROKEN)
    await settle()
    again = await until_shared(desk)
    assert {sent.request.attempt for sent in again} == {2}
    (ended,) = await desk.run_dry()
    assert ended.error is None


@dialogue
async def test_a_run_that_goes_on_with_another_number_of_gpus_has_both() -> None:
    """Those of steps that are in the result: one that was lost with its steps is not told."""
    desk = await desk_of()
    await desk.submit(request(cfg=3.0, gpus="auto"))
    (sample,) = [each for each in desk.controller._tasks._entries.values() if each.spec.stage is Stage.SAMPLE]
    sample.begin(2)
    sample.begin(1)
    assert sample.gpus == (1,), "the first run has left no state"
    sample.keep(FakeRef(None), (1, 4))
    sample.begin(4)
    sample.begin(2)
    sample.begin(2)  # each member
    assert sample.gpus == (1, 2)
    sample.state = None
    await desk.run_dry()


@dialogue
async def test_a_run_that_is_cancelled_before_its_parts_are_sent_is_not_sent() -> None:
    desk = await desk_of()
    known: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def late(worker_id: WorkerId, incarnation: int) -> str:
        return await known

    desk.fleet.gang_address = late  # type: ignore[method-assign]
    await desk.submit(request(cfg=3.0, gpus=2))
    while desk.fleet.running:
        await desk.finish(*desk.fleet.running)
    assert len(desk.state.gangs.runs) == 1
    await desk.controller.cancel(ME, SubmissionId("s"))
    await settle()
    known.set_result("a:1")
    await settle()
    assert not desk.state.gangs.runs
    assert not [sent for sent in desk.fleet.sent if sent.request.gang is not None]
    (ended,) = await desk.hear()
    assert ended.outcome.value == "cancelled"
