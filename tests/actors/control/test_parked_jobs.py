"""Jobs with a late turn are not in the core: their order, their ends and their history are as if they were. Only work
that is equal to theirs is not shared before they enter.
"""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import numpy as np
import pytest

from modelpool.actors.control import job_queue as queue_module
from modelpool.actors.control.parked_jobs import JOBS_IN_PACK, JobPack, ParkedJobs, QueuedJob, packs_of
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.wire.messages import ClientId, Submission, SubmissionId
from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.specs.spec import JobId, JobSpec, RunError, RunErrorKind, Stage, TaskSpec
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import Command, Event, Outcome, Submitted
from modelpool.scheduler.model.node_groups import NodeGroup
from tests.actors.fake_fleet import ME, Desk, Sent, dialogue
from tests.actors.fakes import FAIL, FakeCatalog

WINDOW = 2 * JOBS_IN_PACK


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "WINDOW", WINDOW)


def request(number: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": f"a {number}", "seed": number, "steps": 2, **fields})


def requests(count: int, first: int = 0, **fields: Any) -> tuple[GenerateRequest, ...]:
    return tuple(request(number, **fields) for number in range(first, first + count))


def started(desk: Desk) -> list[str]:
    """The prompts of sampling runs that were not asked back, in order."""
    sent = [sent for sent in desk.fleet.sent if sent.request.task.stage is Stage.SAMPLE]
    works = [one.request for one in sent if not one.report.done() or one.report.result() is not None]
    return [f"a {work.work.seed}" for work in works]


async def run_of(desk: Desk, seed: int) -> Sent:
    """The sampling run of this seed, once it runs; others end meanwhile."""
    while True:
        for sent in desk.fleet.running:
            if sent.request.task.stage is Stage.SAMPLE and sent.request.work.seed == seed:
                return sent
        await desk.finish(*desk.fleet.running)


@dialogue
async def test_all_jobs_of_a_long_submission_run_once_in_order() -> None:
    count = 3 * WINDOW + 3
    desk = await Desk().open()
    for first in range(0, count, 40):
        chunk = requests(min(40, count - first), first)
        await desk.submit(*chunk, first_index=first, hold=first + 40 < count)
    status = await desk.controller.status()
    assert status.jobs["live"] == count
    assert status.waiting["sample"] == status.waiting["decode"] == count
    assert status.waiting_by_user[""]["sample"] == count
    assert len(desk.state.demand.jobs) <= WINDOW
    ended = await desk.run_dry()
    assert sorted(end.index for end in ended) == list(range(count))
    assert {end.outcome for end in ended} == {Outcome.SUCCEEDED}
    assert all(end.recipe is not None and end.recipe.prompt == f"a {end.index}" for end in ended)
    assert started(desk) == [f"a {number}" for number in range(count)]
    assert (await desk.controller.status()).jobs == {"live": 0, "succeeded": count, "failed": 0, "cancelled": 0}
    assert not desk.controller._queue.parked._flows
    assert desk.controller._drivers.known[ME].submissions == {}


@dialogue
async def test_priorities_order_and_shares_are_kept() -> None:
    """Two users, one of them also with a higher priority: each flow in its order, and the users in turns."""
    count = WINDOW + JOBS_IN_PACK + 1

    async def order(window: int) -> list[int]:
        desk = Desk()
        desk.controller._queue.parked = ParkedJobs(window)
        await desk.open()
        for number, (user, priority) in enumerate([("ann", 0), ("ben", 0), ("ann", 5)]):
            terms = {"user": user, "priority": priority}
            await desk.submit(*requests(count, 1000 * number, **terms), submission=f"s{number}")
        await desk.run_dry()
        return [int(prompt.split()[1]) for prompt in started(desk)]

    def imbalance(order: list[int]) -> int:
        """How far one user was ahead of the other at most, while both had jobs."""
        ahead = np.cumsum([1 if number < 1000 else -1 for number in order if number < 2000])
        return int(np.abs(ahead[: 2 * WINDOW]).max())

    found, expected = await order(WINDOW), await order(10_000)
    for flow in range(3):
        assert [number for number in found if number // 1000 == flow] == list(range(1000 * flow, 1000 * flow + count))
    assert max(found.index(2000 + number) - expected.index(2000 + number) for number in range(count)) <= 1
    assert imbalance(found) <= imbalance(expected) + 2


@dialogue
async def test_cancelled_jobs_end_whether_parked_or_not() -> None:
    desk = await Desk().open()
    await desk.submit(*requests(2 * WINDOW), submission="first")
    await desk.submit(*requests(2 * WINDOW, 1000), submission="second")
    await desk.controller.cancel(ME, SubmissionId("first"))
    ended = await desk.run_dry()
    first = [end for end in ended if end.submission_id == "first"]
    assert sorted(end.index for end in first) == list(range(2 * WINDOW))
    assert sum(end.outcome is Outcome.CANCELLED for end in first) >= 2 * WINDOW - 1
    second = [end for end in ended if end.submission_id == "second"]
    assert [end.outcome for end in second] == [Outcome.SUCCEEDED] * (2 * WINDOW)
    assert not desk.controller._queue.parked._flows


@dialogue
async def test_withdrawn_jobs_end_except_those_that_run() -> None:
    desk = await Desk().open()
    await desk.submit(*requests(3 * WINDOW))
    await desk.controller.cancel(ME, SubmissionId("s"), withdraw=True)
    ended = await desk.run_dry()
    assert sorted(end.index for end in ended) == list(range(3 * WINDOW))
    assert len(desk.controller._queue.parked) == 0


@dialogue
async def test_a_driver_that_leaves_leaves_nothing() -> None:
    desk = await Desk().open()
    await desk.submit(*requests(3 * WINDOW))
    assert len(desk.controller._queue.parked)
    await desk.controller.leave(ME)
    while desk.fleet.running:
        await desk.finish(*desk.fleet.running)
    assert not desk.controller._queue.parked._flows
    assert not desk.controller._queue.jobs


@dialogue
async def test_jobs_leave_with_their_driver_though_the_first_of_their_pack_ends_at_once() -> None:
    """The submission has nothing else left when the core refuses the first job of its only pack."""
    desk = await Desk().open()
    demand = desk.state.demand
    fits = demand._unfit

    def unfit(spec: TaskSpec) -> RunError | None:
        entered = [job_id for job_id in demand.jobs if job_id.startswith("second-")]
        return RunError(RunErrorKind.OUT_OF_VRAM, "too large") if entered == ["second-0"] else fits(spec)

    desk.state.demand._unfit = unfit  # type: ignore[method-assign]
    await desk.submit(*requests(WINDOW), submission="first")
    await desk.submit(*requests(JOBS_IN_PACK, 1000), submission="second")
    while len(desk.controller._queue.parked):
        await desk.finish(*desk.fleet.running)
    queued = [job_id for job_id in desk.controller._queue.jobs if job_id.startswith("second-")]
    assert len(queued) == JOBS_IN_PACK - 1
    assert "second" in desk.controller._drivers.known[ME].submissions
    await desk.controller.cancel(ME, SubmissionId("second"))
    ended = await desk.run_dry()
    assert sum(end.outcome is Outcome.CANCELLED for end in ended) == JOBS_IN_PACK - 1
    assert not desk.controller._queue.jobs


@dialogue
async def test_a_failure_makes_room_as_a_success_does() -> None:
    desk = await Desk().open()
    wanted = [request(number, prompt=f"{FAIL} {number}") for number in range(3 * WINDOW)]
    await desk.submit(*wanted)
    ended = await desk.run_dry()
    assert [end.outcome for end in ended] == [Outcome.FAILED] * (3 * WINDOW)


@dialogue
async def test_why_knows_jobs_whose_turn_is_far() -> None:
    desk = await Desk().open()
    await desk.submit(*requests(3 * WINDOW), submission="abc")
    history = await desk.controller.history(f"abc-{3 * WINDOW - 1}")
    assert history.status == "active"
    assert f"{3 * WINDOW - 1} earlier jobs" in history.note
    assert (await desk.controller.history("abc-0")).tasks
    with pytest.raises(UnknownName, match="could be any"):
        await desk.controller.history("abc-")
    with pytest.raises(UnknownName, match="nothing"):
        await desk.controller.history("nothing")


@dialogue
async def test_jobs_count_as_submitted_from_their_submission_wherever_they_wait() -> None:
    """Their history says so, and they age from then on."""
    ageing_seconds, last = 100.0, f"s-{3 * WINDOW - 1}"
    desk = await Desk(workers=2, config=SchedulerConfig(ageing_seconds=ageing_seconds)).open()
    await desk.clock.advance(5.0)
    await desk.submit(*requests(3 * WINDOW))
    assert (await desk.controller.history(last)).submitted_at == 5.0
    await desk.submit(request(1000, priority=9), submission="high")
    high = await run_of(desk, 1000)
    for _ in range(7):
        await desk.pass_time(0.5 * ageing_seconds)
    while last not in desk.controller._queue.jobs:
        await desk.finish(*(sent for sent in desk.fleet.running if sent is not high))
    history = await desk.controller.history(last)
    assert (history.submitted_at, history.status) == (5.0, "active")
    assert desk.state.demand.jobs[JobId(last)].priority == 3


@dialogue
async def test_the_core_knows_every_deadline_at_once_and_all_work_where_nodes_follow_it() -> None:
    """A deadline must not be missed unnoticed; groups of nodes grow by the work that waits."""
    desk = await Desk().open()
    await desk.submit(*requests(4 * WINDOW))
    await desk.submit(*requests(WINDOW, 1000, deadline=3600), submission="urgent")
    assert sum(job.spec.deadline is not None for job in desk.state.demand.jobs.values()) == WINDOW
    group = NodeGroup("a")
    desk = await Desk(config=SchedulerConfig(groups=(group,))).open()
    await desk.submit(*requests(4 * WINDOW))
    assert len(desk.state.demand.jobs) == 4 * WINDOW


@dialogue
async def test_a_failure_of_the_core_fails_parked_jobs_too() -> None:
    desk = await Desk().open()
    await desk.submit(*requests(3 * WINDOW))
    desk.controller._queue.fail_all("planted")
    ended = await desk.hear()
    assert sorted(end.index for end in ended) == list(range(3 * WINDOW))
    assert all(end.error is not None and "planted" in end.error.message for end in ended)


@pytest.mark.parametrize("failing", [JOBS_IN_PACK + 5, 2 * WINDOW + 5])
def test_a_core_that_fails_while_jobs_are_queued_ends_all_of_them(failing: int) -> None:
    """On their arrival, and when their turn is near."""

    @dialogue
    async def talk() -> None:
        desk = await Desk().open()
        handle = desk.state.handle

        def failing_handle(event: Event) -> list[Command]:
            if isinstance(event, Submitted) and event.job.job_id == f"s-{failing}":
                raise RuntimeError("planted")
            return handle(event)

        desk.state.handle = failing_handle  # type: ignore[method-assign]
        await desk.submit(*requests(3 * WINDOW))
        while desk.fleet.running and not desk.controller._queue.broken:
            await desk.finish(*desk.fleet.running)
        await require_all_failed(desk)

    talk()


@dialogue
async def test_a_job_that_cannot_be_queued_ends_with_all_others() -> None:
    """A bug outside of the core."""
    desk = await Desk().open()
    await desk.submit(*requests(3 * WINDOW))
    add = desk.controller._tasks.add

    def failing_add(spec: JobSpec, *args: Any) -> None:
        if spec.job_id == f"s-{2 * WINDOW + 5}":
            raise RuntimeError("planted")
        add(spec, *args)

    desk.controller._tasks.add = failing_add  # type: ignore[method-assign]
    while desk.fleet.running and not desk.controller._queue.broken:
        await desk.finish(*desk.fleet.running)
    await require_all_failed(desk)


async def require_all_failed(desk: Desk) -> None:
    """Every job has ended, at least one of them by the planted failure, and nothing is left."""
    ended = await desk.hear()
    assert sorted(end.index for end in ended) == list(range(3 * WINDOW))
    failed = [end for end in ended if end.outcome is not Outcome.SUCCEEDED]
    assert failed
    assert all(end.error is not None and "planted" in end.error.message for end in failed)
    assert not desk.controller._queue.jobs
    assert desk.controller._drivers.known[ME].submissions == {}


@dialogue
async def test_a_queued_job_takes_at_most_1_kib() -> None:
    """8.3 KiB before. The jobs of the window keep what they had."""
    desk = await Desk().open()
    await desk.submit(*requests(WINDOW), submission="window")
    count = 4 * JOBS_IN_PACK
    wanted = requests(count, 1000)
    gc.collect()
    tracemalloc.start()
    try:
        part = Submission(ME, SubmissionId("many"), 0, wanted)
        await desk.controller.submit(part)
        del part
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] / count < 1024
    finally:
        tracemalloc.stop()


def queued(number: int, **given: Any) -> QueuedJob:
    recipe, graph = build_graph(request(number), JobId(f"s-{number}"), FakeCatalog())
    return QueuedJob(ClientId("me"), SubmissionId("s"), number, graph, recipe, given)


def test_a_pack_returns_what_it_was_given() -> None:
    jobs = [queued(number) for number in range(5)]
    given = {"latent": np.zeros(3)}
    for some in (jobs, [*jobs, queued(5, **given)]):
        pack = JobPack(some)
        pack.pack()
        pack.pack()
        assert list(pack.jobs()) == some
    assert pack.jobs()[5].given["latent"] is given["latent"]  # a reference


def test_packs_hold_jobs_of_one_flow() -> None:
    found = [len(pack) for pack in packs_of(queued(number) for number in range(2 * JOBS_IN_PACK + 1))]
    assert found == [JOBS_IN_PACK, JOBS_IN_PACK, 1]
    parked = ParkedJobs(None)
    (pack,) = packs_of([queued(0)])
    parked.entered(pack.flow)
    assert parked.may_enter(pack)
