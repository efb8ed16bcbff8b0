"""Another controller continues with the workers of a lost one: the same weights, the same pixels, no loads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

from modelpool import GenerateRequest, ImageResult, ModelPool
from modelpool.actors.config.config import PoolConfig
from modelpool.actors.control.pool_plan import _MESSAGES, _PARTS, plan_pool, worker_kind
from modelpool.actors.graph.common.stage_request import StageRequest
from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.wire.message_fields import message_fields
from modelpool.actors.worker.wire.messages import (
    PreviewMade,
    RunRequest,
    StageSubmission,
    StartedWorker,
    StateSaved,
    Submission,
    SubmissionId,
)
from modelpool.pool.values.core.results import Encoded, RunState, SamplerState
from modelpool.pool.values.core.stage_params import DecodeParams, PreloadRequest, SamplingSchedule
from modelpool.pool.values.core.stopping import stop_if_asked
from modelpool.pool.values.specs.gang import Gang
from modelpool.pool.values.specs.spec import ComponentKey, ComponentUse, NodeId, Stage, TaskReport, WorkerId
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.kept_states import state_id
from modelpool.scheduler.model.node_groups import NodeGroup
from tests.actors.fake_fleet import ME, Desk, FakeRef, dialogue, settle
from tests.actors.fakes import FakeEngine
from tests.actors.loop_connection import LoopConnection
from tests.scheduler.test_compiled import modules

MODELS = ("shapes", "forms")


@contextmanager
def lines(count: int, **options: object) -> Iterator[list[LoopConnection]]:
    """A controller and its successors; each is lost before the next one starts."""
    found = [LoopConnection(2, FakeEngine, **options)]  # type: ignore[arg-type]
    try:
        for _ in range(count - 1):
            found.append(LoopConnection(2, FakeEngine, predecessor=found[-1], **options))  # type: ignore[arg-type]
        yield found
    finally:
        for line in reversed(found):
            line.end()


def rendered(line: LoopConnection, seed: int) -> dict[str, ImageResult]:
    """An image of each model by name, one after the other: while both GPUs are idle, weights decide."""
    with ModelPool(line, lambda: None, None) as pool:
        pool.wait_ready(60)
        requests = [GenerateRequest(model=model, prompt="a circle", seed=seed, steps=2) for model in MODELS]
        return {request.model: next(pool.submit([request]).images()) for request in requests}


def ratios(line: LoopConnection) -> dict[tuple[Stage, tuple[ComponentKey, ...]], float | None]:
    """The run time of each kind of run over its prior estimate, as learned."""
    kinds = line.controller._state.costs.run_kinds
    return {(kind.stage, kind.components): kind.ratio for kind in kinds if kind.ratio is not None}


def sampled_on(image: ImageResult) -> str:
    """The worker of its sampling run."""
    return next(task.worker for task in image.tasks if task.stage is Stage.SAMPLE)


def test_each_model_is_rendered_where_its_weights_are_without_a_load() -> None:
    first = LoopConnection(2, FakeEngine)
    try:
        before = rendered(first, 1)
        learned = ratios(first)
        held = {w: worker._engine.residency() for (w, _), (worker, _) in first.fleet.workers.items()}
        first.lose()
        second = LoopConnection(2, FakeEngine, predecessor=first)
        try:
            with ModelPool(second, lambda: None, None) as pool:
                pool.wait_ready(60)
            assert ratios(second) == learned, "how long runs take is known"
            assert len(learned) >= 2 * len(MODELS)
            after = rendered(second, 2)
            same = rendered(second, 1)
            state = second.controller._state.worker_table.workers
            for worker, residency in held.items():
                assert set(state[worker].entries) >= {entry.component for entry in residency.entries}
            assert first.fleet.workers == {}
        finally:
            second.end()
    finally:
        first.end()
    for model in MODELS:
        # a decode may be faster on the GPU that is free, though that has to load the VAE
        sampling = [task for task in after[model].tasks if task.stage is Stage.SAMPLE]
        assert [(task.resident, task.uploaded_bytes) for task in sampling] == [(True, 0)]
        assert sampled_on(before[model]) == sampled_on(after[model]), "its weights are elsewhere"
        assert (same[model].pixels == before[model].pixels).all()


def test_workers_outlive_several_controllers_and_are_not_restarted() -> None:
    with lines(3) as found:
        assert [line.fleet.epoch for line in found] == [1, 2, 3]
        rendered(found[-1], 1)
        assert all(line.fleet.workers == {} for line in found[:-1])
        with ModelPool(found[-1], lambda: None, None) as pool:
            assert pool.status().restarts == 0
        assert sum(len(line.fleet.threads) for line in found) == 2, "no worker was started again"


class SharingEngine(FakeEngine):
    """Shares runs. The first run of a gang goes on until it is asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.gangs: list[Gang] = []

    def run(self, *args: Any, **named: Any) -> Any:
        if len(args) < 8:
            return super().run(*args, **named)
        *alone, gang = args
        self.gangs.append(gang)
        while gang.gang_id.startswith("1/"):
            time.sleep(0.01)
            stop_if_asked(alone[3].should_stop)
        return super().run(*alone)


def test_the_members_of_a_gang_stop_for_the_next_controller_and_share_its_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    introduction = GpuWorker._introduction
    monkeypatch.setattr(GpuWorker, "_introduction", lambda *args: replace(introduction(*args), node=NodeId("n1")))
    engines: list[SharingEngine] = []
    request = GenerateRequest(model="shapes", prompt="a circle", seed=1, steps=2, cfg=3.0, gpus=2)

    def engine() -> SharingEngine:
        engines.append(SharingEngine())
        return engines[-1]

    first = LoopConnection(2, engine)
    first.controller._most_gpus = 2
    pool = ModelPool(first, lambda: None, None)
    pool.wait_ready(60)
    pool.submit([request])
    while sum(len(each.gangs) for each in engines) < 2:
        time.sleep(0.01)
    first.lose()
    second = LoopConnection(2, engine, predecessor=first)
    second.controller._most_gpus = 2
    try:
        with ModelPool(second, lambda: None, None) as pool:
            pool.wait_ready(60)
            image = next(pool.submit([request]).images())
            assert pool.status().restarts == 0
        alone = rendered(second, 1)  # nobody is left in a gang
    finally:
        second.end()
        first.end()
    assert image.pixels.size
    assert len(alone) == len(MODELS)
    found = [[(gang.gang_id.partition("/")[0], gang.degree) for gang in each.gangs] for each in engines]
    assert found == [[("1", 2), ("2", 2)]] * 2, "the workers of the first controller share the runs of the second"
    assert {gang.rank for each in engines for gang in each.gangs if gang.gang_id.startswith("2/")} == {0, 1}


@dialogue
async def test_a_state_of_a_run_of_the_controller_before_is_not_one_of_the_run_with_its_number() -> None:
    """It was sent by the worker's own thread, and arrives when the worker has its new name."""
    desk = await Desk(epoch=2).open()
    await desk.submit(GenerateRequest(model="shapes", prompt="a circle", seed=1, steps=4))
    while desk.fleet.running[0].request.task.stage is not Stage.SAMPLE:
        await desk.finish(desk.fleet.running[0])
    (sent,) = desk.fleet.running
    state = RunState(3, 4, SamplerState(np.zeros((4, 1, 1), np.float32)))
    saved = StateSaved(sent.worker_id, sent.incarnation, sent.task_id, 1, sent.request.run, 3, 4, 16, epoch=1)
    await desk.controller.state_saved(saved, FakeRef(state), state)
    assert desk.controller._tasks.find(state_id(sent.task_id)) is None
    ref = FakeRef(state)
    await desk.controller.state_saved(replace(saved, epoch=2), ref, state)
    assert desk.controller._tasks.find(state_id(sent.task_id)) is ref
    await desk.controller.close()


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({}, True),
        ({"vram": "32MiB"}, False),
        ({"threads": 2}, False),
        ({"workers": 1}, True),
        ({"device": "cpu"}, False),
    ],
)
def test_workers_of_another_configuration_are_of_another_kind(changed: dict[str, object], is_same: bool) -> None:
    """Worth a restart is only what a worker's process depends on."""
    config = PoolConfig().override(device="sim", workers=2)
    plans = [plan_pool(one, 0, False) for one in (config, config.override(**changed))]
    kinds = [worker_kind(plan, "") for plan in plans]
    assert (kinds[0] == kinds[1]) == is_same
    assert worker_kind(plans[0], "no such group") is None
    assert worker_kind(plans[0], "", ("other code",)) != kinds[0]
    assert WorkerId("gpu-0") in plans[0].worker_ids


def test_workers_that_read_other_requests_are_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an earlier version, which was replaced while they ran, would fail with each run, or read the values of
    one field as those of another: pickles of parameters have no names."""
    plan = plan_pool(PoolConfig().override(device="sim", workers=1), 0, False)
    kinds = {worker_kind(plan, "")}
    for number, message in enumerate(
        (RunRequest, DecodeParams, SamplingSchedule, ComponentUse, TaskReport, Encoded, PreloadRequest, PreviewMade), 2
    ):
        monkeypatch.setattr(message, "__match_args__", message.__match_args__[:-1])
        kinds.add(worker_kind(plan, ""))
        assert len(kinds) == number, message


def test_the_parts_of_messages_that_compiled_classes_do_not_tell_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: the files of a worker's disk were not. Compiled, a class knows no element types."""
    known, hints, compiled_modules = message_fields(*_MESSAGES, *_PARTS), get_type_hints, modules()

    def compiled(kind: type) -> dict[str, object]:
        found = hints(kind)
        is_known = kind.__module__ not in compiled_modules
        return {name: hint if is_known or not get_args(hint) else type for name, hint in found.items()}

    monkeypatch.setattr("modelpool.actors.worker.wire.message_fields.get_type_hints", compiled)
    assert message_fields(*_MESSAGES, *_PARTS) == known != message_fields(*_MESSAGES)


@dialogue
async def test_jobs_start_no_workers_before_those_of_the_earlier_controller_are_found() -> None:
    """Groups of nodes grow with the jobs that wait."""
    desk = Desk(workers=0, config=SchedulerConfig(groups=(NodeGroup("a", max_nodes=4),)))
    found = asyncio.Event()
    taken_over = []
    start = desk.fleet.start

    async def take_over() -> int:
        await found.wait()
        return 1

    async def noted_start(worker_id: WorkerId, incarnation: int, group: str = "") -> StartedWorker:
        taken_over.append(found.is_set())
        return await start(worker_id, incarnation, group)

    desk.fleet.take_over = take_over  # type: ignore[method-assign]
    desk.fleet.start = noted_start  # type: ignore[method-assign]
    opening = asyncio.ensure_future(desk.controller.open())
    await settle()
    await desk.controller.enter(ME)
    request = GenerateRequest(model="shapes", prompt="a circle", seed=1, steps=2)
    sent = asyncio.ensure_future(desk.controller.submit(Submission(ME, SubmissionId("s"), 0, (request,))))
    encode = StageRequest(Stage.ENCODE, GenerateRequest(model="shapes", prompt="a red circle"))
    stage = StageSubmission(ME, SubmissionId("t"), encode, {})
    sent_stage = asyncio.ensure_future(desk.controller.submit_stage(stage))
    await settle()
    await desk.clock.advance(2.0)
    found.set()
    await asyncio.gather(opening, sent, sent_stage)
    await desk.clock.advance(2.0)
    await settle()
    assert taken_over
    assert all(taken_over)
