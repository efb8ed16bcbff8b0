"""A worker that outlives its controllers serves the newest one only, and ends itself when none calls."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.run_memory import MOST_KINDS, MOST_RUNS, RunMemory
from modelpool.actors.worker.wire.messages import LoadRequest, RunRequest
from modelpool.actors.worker.worker_lease import LeaseWatch, OlderEpoch, WorkerLease
from modelpool.actors.worker.worker_setup import WorkerCallbacks
from modelpool.pool.values.core.stage_params import PreloadRequest
from modelpool.pool.values.specs.spec import RunCost, RunErrorKind, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from tests.actors.fakes import CAPACITY_BYTES, ENDLESS, FakeEngine
from tests.actors.worker.one_run import run_batch, run_one
from tests.actors.worker.test_gpu_worker import Bench


class Time:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_lease_is_over_after_its_time_without_a_call() -> None:
    time = Time()
    lease = WorkerLease(3, 60.0, time)
    time.now += 59.0
    assert lease.left_seconds == 1.0
    lease.check(3)
    assert lease.left_seconds == 60.0
    time.now += 61.0
    assert lease.left_seconds == -1.0


def test_a_call_of_an_older_epoch_is_rejected_and_does_not_renew() -> None:
    time = Time()
    lease = WorkerLease(3, 60.0, time)
    lease.pass_to(5)
    time.now += 10.0
    for call in (lease.check, lease.pass_to):
        with pytest.raises(OlderEpoch, match="epoch 5; the call is of epoch 4"):
            call(4)
    assert (lease.epoch, lease.left_seconds) == (5, 50.0)


def test_the_watch_of_a_lease_calls_once_when_it_is_over_and_not_before() -> None:
    time, over = Time(), threading.Event()
    lease = WorkerLease(1, 0.2, time)
    LeaseWatch(lease, over.set).start()
    assert not over.wait(0.3), "the time of the lease has not passed"
    time.now += 1.0
    assert over.wait(60.0)


def test_a_worker_that_ends_with_its_controller_has_no_watch() -> None:
    lease = WorkerLease()
    assert lease.left_seconds is None
    watch = LeaseWatch(lease, lambda: None)
    watch.start()
    assert not watch._thread.is_alive()


class LeasedBench(Bench):
    """A worker of the controller of epoch 2."""

    def __init__(self, engine: FakeEngine | None = None, prompt: str = "a red circle") -> None:
        super().__init__(engine, prompt)
        self.worker = GpuWorker(
            WorkerId("gpu-0"),
            4,
            lambda: self.engine,
            WorkerCallbacks(self.steps.append),
            progress_seconds=0.0,
            lease=WorkerLease(2),
        )
        self.request = RunRequest(self.task, self.work, 1, 1, epoch=2)

    def run_of(self, epoch: int):
        return run_one(self.worker, replace(self.request, epoch=epoch), *self.inputs)


def test_every_call_of_an_older_controller_is_rejected() -> None:
    bench = LeasedBench()
    bench.worker.start(2)
    bench.worker.change_controller(7)
    old = bench.request
    calls = [
        lambda: run_one(bench.worker, old, *bench.inputs),
        lambda: run_batch(bench.worker, (old, old), *bench.inputs, *bench.inputs),
        lambda: bench.worker.load(LoadRequest(1, bench.work.model, (), (), epoch=2)),
        lambda: bench.worker.stop(1, False, 2),
        lambda: bench.worker.prefetch((), 2),
        lambda: bench.worker.preload(1, PreloadRequest(()), 2),
        lambda: bench.worker.ping(2),
        lambda: bench.worker.adopt(WorkerId("gpu-0"), 5, 2),
        lambda: bench.worker.change_controller(2),
    ]
    for call in calls:
        with pytest.raises(OlderEpoch, match="epoch 7; the call is of epoch 2"):
            call()
    assert bench.engine.residency().used_bytes == 0, "a rejected run has run"
    assert bench.run_of(7)[0].error is None


def test_a_start_of_an_older_controller_is_rejected_and_continues_for_the_newer_one() -> None:
    """Else the older one takes the end of its start for a failure of the worker."""
    bench = LeasedBench()
    bench.worker.change_controller(7)
    with pytest.raises(OlderEpoch, match="epoch 7; the call is of epoch 2"):
        bench.worker.start(2)
    assert bench.worker._engine is None
    bench.worker._open_engine = lambda: bench.worker.change_controller(8) and bench.engine
    with pytest.raises(OlderEpoch, match="epoch 8; the call is of epoch 7"):
        bench.worker.start(7)
    bench.worker._open_engine = lambda: pytest.fail("its engine is open")
    assert bench.worker.adopt(WorkerId("gpu-0"), 1, 8).spec.capacity_bytes == CAPACITY_BYTES


def test_a_run_of_the_older_controller_stops_and_the_worker_continues_with_its_weights() -> None:
    class Endless(FakeEngine):
        def _say(self, pipe: str, word: str) -> None:
            reached.set()

    reached = threading.Event()
    bench = LeasedBench(Endless(), ENDLESS)
    bench.worker.start(2)
    with ThreadPoolExecutor(1) as compute:
        run = compute.submit(bench.run_of, 2)
        reached.wait()
        bench.worker.change_controller(3)
        adopted = compute.submit(bench.worker.adopt, WorkerId("gpu-7"), 1, 3).result()
        report, _ = run.result()
    assert report.error.kind is RunErrorKind.CANCELLED
    assert (adopted.spec.worker_id, adopted.spec.incarnation) == ("gpu-7", 1)
    assert adopted.spec.capacity_bytes == CAPACITY_BYTES
    assert adopted.residency == report.residency
    assert adopted.residency.used_bytes > 0


def test_what_the_older_controller_said_of_a_run_does_not_concern_the_same_number_of_the_newer() -> None:
    """Each controller counts its runs from 1."""
    bench = LeasedBench()
    bench.worker.start(2)
    bench.worker.stop(1, False, 2)
    bench.worker.change_controller(3)
    report, _ = bench.run_of(3)
    assert report.error is None


def test_a_worker_whose_start_was_interrupted_starts_when_it_is_adopted() -> None:
    bench = LeasedBench()
    bench.worker.change_controller(3)
    adopted = bench.worker.adopt(WorkerId("gpu-0"), 1, 3)
    assert adopted.spec.incarnation == 1
    assert adopted.residency == Residency(CAPACITY_BYTES), "it was taken over: nobody learns how long a start takes"
    assert bench.run_of(3)[0].error is None


def test_a_worker_remembers_its_last_runs_for_the_next_controller() -> None:
    bench = LeasedBench()
    bench.worker.start(2)
    costs = [bench.run_of(2)[0].cost for _ in range(MOST_RUNS + 1)]
    bench.worker.change_controller(3)
    past_runs = bench.worker.adopt(WorkerId("gpu-0"), 1, 3).past_runs
    assert [past.cost for past in past_runs] == costs[1:]
    assert {(past.task.stage, past.task.run_seconds, past.task.needs) for past in past_runs} == {
        (bench.task.stage, bench.task.run_seconds, ())
    }


def test_a_worker_remembers_a_bounded_number_of_kinds_of_run_the_latest_ones() -> None:
    memory, task = RunMemory(), LeasedBench().task
    for size in range(2 * MOST_KINDS):
        memory.note(replace(task, activation_bytes=1 << size), RunCost(run_seconds=1.0))
        memory.note(replace(task, activation_bytes=1), RunCost(run_seconds=2.0))
    sizes = [past.task.activation_bytes.bit_length() - 1 for past in memory.runs()]
    assert sorted(set(sizes)) == [0, *range(MOST_KINDS + 1, 2 * MOST_KINDS)]
    assert sizes.count(0) == MOST_RUNS
