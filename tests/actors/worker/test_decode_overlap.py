"""A worker with a device that still computes a decode starts the run behind it, and reports both as runs in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.wire.messages import EndsWanted, RunEnds, RunRequest
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.actors.worker.worker_setup import WorkerCallbacks
from modelpool.pool.values.core.stage_params import DecodeParams, Result
from modelpool.pool.values.specs.spec import JobId, RunCost, RunErrorKind, Stage, TaskReport, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from tests.actors.fakes import UPSCALER, FakeCatalog, FakeEngine, result_of
from tests.actors.worker.one_run import call_of, run_all, run_one

PATIENCE_SECONDS = 10.0


class OverlappingEngine(FakeEngine):
    """Its decodes are over when a later run has begun; all runs are in the thread that opened it."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.thread = threading.get_ident()
        self.other_began = threading.Event()
        self.order: list[str] = []
        #: the residency when the latest decode was begun
        self.left = self.residency()
        #: decodes that hold their memory, and whether somebody has the result of each
        self.held: list[bool] = []

    def run(self, *args: Any, **named: Any) -> tuple[Result, RunCost]:
        raise AssertionError("a worker with runs that overlap begins them")

    def begin(self, task: Any, work: Any, *args: Any, **named: Any) -> Callable[[], tuple[Result, RunCost]]:
        assert threading.get_ident() == self.thread, "the engine has one thread"
        self.order.append(task.stage.value)
        made = super().run(task, work, *args, **named)
        if not isinstance(work, DecodeParams):
            self.other_began.set()
            return lambda: made
        self.left, self.held = self.residency(), [False]

        def end() -> tuple[Result, RunCost]:
            assert self.other_began.wait(PATIENCE_SECONDS), "the decode kept the run behind it from starting"
            self.held = [True]
            if self.fails:
                raise RuntimeError("the device found an error late")
            return made

        return end

    @property
    def is_pending(self) -> bool:
        return bool(self.held)

    def poll_pending(self) -> None:
        assert threading.get_ident() == self.thread, "the engine has one thread"
        self.held = [is_over for is_over in self.held if not is_over]

    def release_pending(self) -> None:
        assert threading.get_ident() == self.thread, "the engine has one thread"
        self.held = []


class Overlapping:
    """One worker, with a decode and a sampling run of it."""

    def __init__(self, fails: bool = False) -> None:
        self.worker = GpuWorker(
            WorkerId("gpu-0"), 4, lambda: self.open(fails), WorkerCallbacks(lambda step: None), overlaps_decode=True
        )
        self.worker.start()
        _, cut = build_graph(GenerateRequest(model="shapes", prompt="x", seed=1, steps=3), JobId("x"), FakeCatalog())
        tasks = {task.stage: task for task in cut.job.tasks if task.stage is not Stage.ENCODE}
        made = {task.task_id: result_of(cut.works[task.task_id], {}) for task in cut.job.tasks}
        self.requests, self.inputs = [], []
        for run, stage in enumerate((Stage.DECODE, Stage.SAMPLE), 1):
            task = tasks[stage]
            self.requests.append(RunRequest(task, cut.works[task.task_id], 1, run))
            self.inputs.append([made[need] for need in task.needs])

    def open(self, fails: bool) -> OverlappingEngine:
        self.engine = OverlappingEngine(fails)
        return self.engine

    def check(self, reports: list[TaskReport | None], residency: Residency) -> None:
        decoded, sampled = reports
        assert decoded is not None
        assert sampled is not None
        assert [report.task_id for report in (decoded, sampled)] == [request.task.task_id for request in self.requests]
        assert sampled.error is None
        assert decoded.residency == self.engine.left != residency == sampled.residency == self.engine.residency()
        assert self.engine.order == ["decode", "sample"]
        self.worker.close()


def begun(worker: GpuWorker, request: RunRequest, *inputs: Result) -> RunEnds:
    return worker.run(call_of((request,)), (request,), *inputs)


def end_of(worker: GpuWorker, request: RunRequest) -> RunEnds:
    return worker.ends(EndsWanted(call_of((request,)), waits=True))


def by_the_calls_of_ray(worker: GpuWorker, requests: list[RunRequest], inputs: list[list[Result]]) -> Any:
    """As `RayFleet` does it: all runs begin in one thread, and another one waits for the decoded images."""
    answers = [begun(worker, request, *own) for request, own in zip(requests, inputs, strict=True)]
    with ThreadPoolExecutor(1) as thread:
        for place, request in enumerate(requests):
            if not answers[place].reports:
                answers[place] = thread.submit(end_of, worker, request).result(PATIENCE_SECONDS)
    return zip(*[(ends.reports[0], ends.results[0]) for ends in answers], strict=True)


def one_by_one(worker: GpuWorker, requests: list[RunRequest], inputs: list[list[Result]]) -> Any:
    """Two calls on the threads of Ray's group, the second when the first is under way."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_one, worker, requests[0], *inputs[0])
        while not worker._engine.order:
            threading.Event().wait(0.001)
        second = threads.submit(run_one, worker, requests[1], *inputs[1])
        return zip(*(call.result(PATIENCE_SECONDS) for call in (first, second)), strict=True)


def in_one_call(worker: GpuWorker, requests: list[RunRequest], inputs: list[list[Result]]) -> Any:
    return run_all(worker, requests, *inputs[0], *inputs[1])


@pytest.mark.parametrize("call", [one_by_one, by_the_calls_of_ray, in_one_call])
@pytest.mark.parametrize("fails", [False, True])
def test_the_run_behind_a_decode_begins_before_the_decode_is_over(call: Any, fails: bool) -> None:
    both = Overlapping(fails)
    reports, results = call(both.worker, both.requests, both.inputs)
    both.check(list(reports), both.engine.residency())
    decoded, sampled = results
    assert sampled is not None
    if fails:
        assert decoded is None
        assert reports[0].error.kind is RunErrorKind.INTERNAL
        assert "late" in reports[0].error.message
    else:
        expected = result_of(both.requests[0].work, {"latent": both.inputs[0][0]})
        assert np.array_equal(decoded.pixels_HWC, expected.pixels_HWC)


def test_a_decode_that_is_the_last_of_a_call_is_waited_for() -> None:
    both = Overlapping()
    both.engine.other_began.set()
    order, inputs = both.requests[::-1], [*both.inputs[1], *both.inputs[0]]
    reports, results = run_all(both.worker, order, *inputs)
    assert [report is not None and report.error is None for report in reports] == [True, True]
    assert all(result is not None for result in results)
    both.worker.close()


def test_a_run_can_be_revoked_until_its_turn() -> None:
    """A decode is under way on the engine's thread; the next run waits for that thread, and has not started."""
    both, is_free = Overlapping(), threading.Event()
    assert both.worker._compute is not None
    both.worker._compute.submit(is_free.wait, PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        called = threads.submit(run_one, both.worker, both.requests[1], *both.inputs[1])
        revoked = both.worker.revoke(both.requests[1].run)
        is_free.set()
        assert revoked
        assert called.result(PATIENCE_SECONDS) == (None, None)
    both.worker.close()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_reads_what_is_decoded_waits_for_it(together: bool, fails: bool) -> None:
    """Found in a review: it did not find its input, as the decode had only begun, and had to be sent again."""
    both = Overlapping(fails)
    wanted = GenerateRequest(model="shapes", prompt="x", seed=1, steps=3, upscale=f"{UPSCALER}:2")
    _, cut = build_graph(wanted, JobId("x"), FakeCatalog())
    decode, upscale = cut.job.tasks[-2:]
    requests = [
        RunRequest(decode, cut.works[decode.task_id], 1, 1),
        RunRequest(upscale, cut.works[upscale.task_id], 1, 2, own=(1,)),
    ]
    may_start = both.worker.may_start

    def asked(request: RunRequest) -> bool:
        if request.run == 2:
            both.engine.other_began.set()
        return may_start(request)

    both.worker.may_start = asked
    if together:
        both.engine.other_began.set()
    call = in_one_call if together else one_by_one
    (decoded, upscaled), results = call(both.worker, requests, [both.inputs[0], []])
    assert (decoded.error is None) == (not fails)
    assert (upscaled is None, results[1] is None) == (fails, fails)
    if not fails:
        assert upscaled.error is None
        assert np.array_equal(results[1].pixels_HWC, result_of(requests[1].work, {"image": results[0]}).pixels_HWC)
    both.worker.close()


def test_a_call_that_waits_for_its_turn_hides_no_ended_runs_of_the_one_before() -> None:
    """Found in a review: the worker knew one call of several runs at a time."""
    both, is_second = Overlapping(), threading.Event()
    sampling = replace(both.requests[1], run=3)
    begin, seen = both.engine.begin, list[Any]()
    over = EndsWanted(call_of((both.requests[1], sampling)), most=2)

    def look(task: Any, work: Any, *args: Any, **named: Any) -> Any:
        if len(both.engine.order) == 1:
            assert is_second.wait(PATIENCE_SECONDS)
            seen.append(both.worker.ends(over).reports)
        return begin(task, work, *args, **named)

    both.engine.begin = look
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(run_all, both.worker, [both.requests[1], sampling], *both.inputs[1] * 2)
        while not both.engine.order:
            threading.Event().wait(0.001)
        second = threads.submit(run_all, both.worker, [both.requests[0]], *both.inputs[0])
        while both.worker._compute._work_queue.empty():
            threading.Event().wait(0.001)
        is_second.set()
        reports, _ = first.result(PATIENCE_SECONDS)
        second.result(PATIENCE_SECONDS)
    assert seen == [reports[:1]]
    assert both.worker.ends(over) == ((), ()), "the call is over"
    both.worker.close()


def test_an_idle_worker_holds_nothing_of_a_decode_that_is_over() -> None:
    """Found in an audit: the weights and the memory of the last decode were leased until the next run."""

    def alone(worker: GpuWorker, requests: list[RunRequest], *inputs: Result) -> None:
        run_all(worker, requests, *inputs)

    def in_order(worker: GpuWorker, requests: list[RunRequest], *inputs: Result) -> None:
        run_all(worker, requests, *inputs)

    for runs, call in ((1, alone), (1, in_order), (2, in_order)):
        both = Overlapping()
        if runs == 1:
            both.engine.other_began.set()
        call(both.worker, both.requests[:runs], *[one for inputs in both.inputs[:runs] for one in inputs])
        both.worker._in_turn(lambda: None)
        assert both.engine.order == ["decode", "sample"][:runs]
        assert both.engine.held == []
        both.worker.close()


def test_a_decode_that_is_over_at_once_is_reported_at_once() -> None:
    """Without memory for the next run beside it, or without streams. Another call would cost a message."""
    both = Overlapping()
    both.engine.other_began.set()
    begin = both.engine.begin

    def at_once(*args: Any, **named: Any) -> Any:
        made = begin(*args, **named)()
        both.engine.held = []
        return lambda: made

    both.engine.begin = at_once
    (report,), (result,) = begun(both.worker, both.requests[0], *both.inputs[0])
    assert isinstance(report, TaskReport)
    assert result is not None
    both.worker.close()


def test_a_worker_that_is_taken_over_holds_no_decode_of_an_earlier_controller() -> None:
    """Nobody asks for its end any more."""
    both = Overlapping()
    assert begun(both.worker, both.requests[0], *both.inputs[0]) == ((), ())
    both.worker.change_controller(1)
    with pytest.raises(OlderEpoch):
        end_of(both.worker, both.requests[0])
    both.worker.adopt(WorkerId("gpu-0"), 5, 1)
    assert both.engine.held == []
    assert both.worker._endings == {}
    both.worker.close()
