"""Runs that a worker stops with their state, resumes, and saves between two steps."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from modelpool.actors.worker.gpu_worker import STOPS_REMEMBERED, GpuWorker, result_bytes
from modelpool.actors.worker.step_checkpoints.latest_queue import LatestQueue
from modelpool.actors.worker.wire.messages import RunRequest, StateSaved
from modelpool.actors.worker.wire.packing import packed_result, result_of
from modelpool.actors.worker.worker_setup import Checkpointing, WorkerCallbacks
from modelpool.pool.values.core.results import GuidanceState, Latent, RunState, SamplerState
from modelpool.pool.values.specs.spec import RunErrorKind, WorkerId
from tests.actors.fakes import FakeEngine
from tests.actors.worker.one_run import run_batch, run_one
from tests.actors.worker.test_gpu_worker import Bench


def resumed(bench: Bench, state: RunState, run: int):  # type: ignore[no-untyped-def]
    request = RunRequest(bench.task, bench.work, 2, run, resume=True)
    return run_one(bench.worker, request, *bench.inputs, pickle.loads(pickle.dumps(state)))


def test_a_run_stops_with_its_state_and_another_resumes_from_it() -> None:
    bench, other = Bench(steps=5), Bench(steps=5)
    bench.worker.start()
    other.worker.start()
    bench.worker.stop(1, keep_state=True)
    report, state = bench.run(run=1)
    assert isinstance(state, RunState)
    assert (report.has_state, report.step, report.steps, report.result_bytes) == (True, 1, 5, result_bytes(state))
    assert report.error is not None
    assert report.error.kind is RunErrorKind.CANCELLED
    assert "after step 1 of 5" in report.error.message
    assert report.cost.uploaded_bytes > 0, "what it cost is counted"
    report, result = resumed(other, state, run=2)
    assert (report.error, report.has_state) == (None, False)
    assert isinstance(result, Latent)
    assert [(step.step, step.steps) for step in other.steps] == [(2, 5), (3, 5), (4, 5)], (
        "counted on from the first run"
    )


def test_a_stop_without_a_state_wins() -> None:
    bench = Bench(steps=5)
    bench.worker.start()
    bench.worker.stop(1, keep_state=True)
    bench.worker.stop(1)
    report, result = bench.run(run=1)
    assert (result, report.has_state) == (None, False)
    for run in range(100, 100 + 2 * STOPS_REMEMBERED):
        bench.worker.stop(run, keep_state=True)
    assert len(bench.worker._pauses) <= STOPS_REMEMBERED


def test_tasks_of_a_batch_have_states_of_their_own() -> None:
    bench = Bench(steps=4)
    bench.worker.start()
    requests = [RunRequest(bench.task, bench.work, 1, run) for run in (1, 2)]
    for run in (1, 2):
        bench.worker.stop(run, keep_state=True)
    reports, states = run_batch(bench.worker, requests, *bench.inputs, *bench.inputs)
    assert [report.step for report in reports] == [1, 1]
    again = [RunRequest(bench.task, bench.work, 2, run, resume=True) for run in (3, 4)]
    inputs = [value for state in states for value in (*bench.inputs, state)]
    reports, results = run_batch(bench.worker, again, *inputs)
    assert [report.error for report in reports] == [None, None]
    assert all(isinstance(result, Latent) for result in results)


@pytest.mark.parametrize(("seconds", "expected"), [(None, []), (0.0, [1, 2, 3, 4]), (1e6, [])])
def test_states_are_saved_at_most_once_in_an_interval(
    seconds: float | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[tuple[StateSaved, RunState]] = []
    monkeypatch.setattr(LatestQueue, "put", lambda queue, key, action: action())  # at once: none is skipped
    bench = Bench(steps=5)
    bench.worker = GpuWorker(
        WorkerId("gpu-0"),
        4,
        FakeEngine,
        WorkerCallbacks(bench.steps.append, on_state=lambda *one: saved.append(one)),
        checkpointing=Checkpointing(seconds),
    )
    bench.worker.start()
    report, _ = bench.run(run=7, attempt=3)
    assert report.error is None
    assert [state.step for _, state in saved] == [one.step for one, _ in saved] == expected
    for one, state in saved:
        assert (one.worker_id, one.incarnation, one.task_id) == ("gpu-0", 4, bench.task.task_id)
        assert (one.attempt, one.run, one.steps, one.state_bytes) == (3, 7, 5, result_bytes(state))


def test_states_after_a_takeover_have_the_name_that_the_new_controller_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[StateSaved] = []
    monkeypatch.setattr(LatestQueue, "put", lambda queue, key, action: action())
    bench = Bench(steps=3)
    bench.worker = GpuWorker(
        WorkerId("gpu-3"),
        2,
        FakeEngine,
        WorkerCallbacks(bench.steps.append, on_state=lambda one, state: saved.append(one)),
        checkpointing=Checkpointing(0.0),
    )
    bench.worker.start()
    bench.worker.adopt(WorkerId("gpu-0"), 1)
    bench.run()
    assert {(one.worker_id, one.incarnation) for one in saved} == {("gpu-0", 1)}


def test_a_state_travels_packed_or_whole() -> None:
    latent = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    sampler = SamplerState(latent, (2.0, 1.0), np.stack([latent, latent + 1]), latent * 2)
    state = RunState(3, 9, sampler, GuidanceState(2, 1.0, latent + 3, None, 7))
    assert result_bytes(state) == 5 * latent.nbytes
    for size in (result_bytes(state), 1 << 30):
        arrived = result_of(packed_result(state, size))
        assert (arrived.step, arrived.steps, arrived.guidance.inputs_drawn) == (3, 9, 7)
        assert all(map(np.array_equal, arrived.arrays, state.arrays))
