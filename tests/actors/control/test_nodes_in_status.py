"""Where workers are, and why those that are not up are not: in the status, in the costs of tasks, in histories."""

from __future__ import annotations

from modelpool.actors.cli.cluster.explain import _started
from modelpool.actors.control.cluster_view import NodeView
from modelpool.actors.control.past_jobs import unpacked_history
from modelpool.actors.outputs.results.outcomes import where_and_why
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.specs.spec import NodeId, WorkerId
from modelpool.scheduler.core.history import history_of
from tests.actors.fake_fleet import Desk, dialogue, settle
from tests.actors.fake_nodes import FakeNodes

BOX = NodeId("aaaabbbbccccdddd")
REQUEST = GenerateRequest(model="shapes", prompt="a red circle", seed=1, steps=3)


def box() -> FakeNodes:
    """A node with two GPUs, on which another pool has two workers."""
    nodes = FakeNodes(NodeView(BOX, name="box", total=(("GPU", 2.0),), free=(("GPU", 0.0),)))
    nodes.pools = {"other": 2}
    return nodes


async def not_up(desk: Desk) -> list[str]:
    return [worker.not_up for worker in (await desk.controller.status()).workers]


@dialogue
async def test_a_worker_is_pending_then_starting_on_its_node_then_up() -> None:
    nodes = box()
    desk = Desk(workers=2, nodes=nodes)
    desk.fleet.starts_by_itself = False
    await desk.open()
    status = await desk.controller.status()
    assert [worker.not_up for worker in status.workers] == ["pending: no node with a free GPU"] * 2
    assert status.waiting_for == "waiting for 2 GPUs: 0 of 2 are free; pool 'other' uses 2"
    await desk.controller.worker_placed(WorkerId("gpu-0"), 1, BOX)
    status = await desk.controller.status()
    assert [worker.not_up for worker in status.workers] == ["starting on box", "pending: no node with a free GPU"]
    assert status.waiting_for == "waiting for 1 GPU: 0 of 2 are free; pool 'other' uses 2"
    nodes.change(BOX, free=(("GPU", 1.0),))
    assert await not_up(desk) == ["starting on box", "starting"]
    for start in desk.fleet.starting.values():
        start.set_result(None)
    await settle()
    status = await desk.controller.status()
    assert [worker.not_up for worker in status.workers] == ["", ""]
    assert status.waiting_for == ""


@dialogue
async def test_a_lost_worker_says_what_happened_until_it_is_up_again() -> None:
    desk = await Desk(nodes=box()).open()
    await desk.controller.worker_placed(WorkerId("gpu-0"), 1, BOX)
    desk.fleet.starts_by_itself = False
    desk.fleet.kill(WorkerId("gpu-0"))
    await settle()
    assert await not_up(desk) == ["pending: no node with a free GPU; before on box: killed by the test"]
    await desk.controller.worker_placed(WorkerId("gpu-0"), 2, BOX)
    assert await not_up(desk) == ["starting on box; before on box: killed by the test"]


@dialogue
async def test_each_task_names_the_node_that_it_ran_on() -> None:
    desk = await Desk(nodes=box()).open()
    await desk.controller.worker_placed(WorkerId("gpu-0"), 1, BOX)
    await desk.submit(REQUEST)
    (ended,) = await desk.run_dry()
    assert {task.node for task in ended.tasks} == {"box"}
    assert "sample gpu-0 on box" in where_and_why(ended.tasks)


@dialogue
async def test_a_single_machine_has_no_names_of_nodes() -> None:
    desk = await Desk().open()
    await desk.controller.worker_placed(WorkerId("gpu-0"), 1, NodeId(""))
    await desk.submit(REQUEST)
    (ended,) = await desk.run_dry()
    assert {task.node for task in ended.tasks} == {""}
    assert " on " not in where_and_why(ended.tasks)
    status = await desk.controller.status()
    assert (status.controller, status.waiting_for, [worker.node_name for worker in status.workers]) == ("", "", [""])


@dialogue
async def test_a_history_names_the_node_of_each_attempt() -> None:
    desk = Desk(nodes=box())
    desk.fleet.node = BOX
    await desk.open()
    await desk.submit(REQUEST)
    (ended,) = await desk.run_dry()
    history = await desk.controller.history(ended.job_id)
    attempts = [attempt for task in history.tasks for attempt in task.attempts]
    assert [attempt.node for attempt in attempts] == ["box"] * 4
    ids = [attempt.node for task in history_of(desk.state, ended.job_id).tasks for attempt in task.attempts]
    assert ids == [BOX] * 4
    assert "gpu-0 on box" in _started(history, history.tasks[0], attempts[0])


@dialogue
async def test_a_history_that_a_journal_keeps_names_the_nodes() -> None:
    """Nobody had asked for names before the controller was lost: `why` showed ids after a restart."""
    desk = Desk(nodes=box())
    desk.fleet.node = BOX
    await desk.open()
    await desk.submit(REQUEST)
    await desk.run_dry()
    (past,) = (await desk.controller.memory(0)).past_jobs
    kept = unpacked_history(past.history)
    assert kept is not None
    assert [attempt.node for task in kept.tasks for attempt in task.attempts] == ["box"] * 4
