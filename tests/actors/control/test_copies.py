"""Results that are copied off a machine that ends: what reads them later reads the copy."""

from __future__ import annotations

import asyncio

import pytest

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.specs.spec import NodeId, Stage
from modelpool.scheduler.model.messages import ComponentsKnown, Outcome
from tests.actors.fake_fleet import Desk, settle


@pytest.mark.parametrize("is_lost", [False, True], ids=["copied", "lost"])
def test_a_result_is_read_from_its_copy_or_computed_again(is_lost: bool) -> None:
    async def talk() -> None:
        desk = await Desk().open()
        await desk.submit(GenerateRequest(model="shapes", prompt="p", seed=1, steps=2))
        while desk.fleet.running[0].request.task.stage is not Stage.DECODE:
            before = desk.fleet.running[0]
            await desk.finish(*desk.fleet.running)
        decoding = desk.fleet.running[0]
        (original,) = decoding.inputs
        assert decoding.request.task.needs == (before.task_id,)
        original.lost = is_lost
        dispatcher = desk.controller._dispatcher
        for held in desk.state.demand.results.held.values():
            held.node = NodeId("one")
        desk.state.leaving.prepare({NodeId("one"): dispatcher.now + 1000.0}, dispatcher.now)
        dispatcher.post(ComponentsKnown(dispatcher.now, ()))
        await settle()
        assert original in desk.fleet.copied
        desk.fleet.kill(decoding.worker_id)
        original.lost = True
        await settle()
        (ended,) = await desk.run_dry()
        assert ended.outcome is Outcome.SUCCEEDED
        samples = [sent for sent in desk.fleet.sent if sent.request.task.stage is Stage.SAMPLE]
        assert len(samples) == (2 if is_lost else 1), "it was computed again only if it was lost"

    asyncio.run(talk())
