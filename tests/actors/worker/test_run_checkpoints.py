"""A worker resumes what an earlier run of a task saved on its node, and no disk delays or fails a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.step_checkpoints.checkpoint_disk import CheckpointDisk
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointFolder
from modelpool.actors.worker.wire.messages import RunRequest, StateSaved
from modelpool.actors.worker.worker_lease import OlderEpoch
from modelpool.actors.worker.worker_setup import Checkpointing, WorkerCallbacks
from modelpool.pool.values.core.results import Latent, RunState, SamplerState
from modelpool.pool.values.core.stage_params import RunHooks, SampleParams
from modelpool.pool.values.specs.spec import RunErrorKind, TaskReport, WorkerId
from tests.actors.fakes import FakeEngine
from tests.actors.worker.one_run import run_batch, run_one
from tests.actors.worker.test_gpu_worker import Bench

STEPS = 5


class SteppedEngine(FakeEngine):
    """Calls `after(step)` after each step of a sampling run."""

    def __init__(self, after: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.after = after
        self.resumed: list[int] = []

    def run(self, task, work, inputs, hooks: RunHooks, *more, **others):  # type: ignore[no-untyped-def]
        resume = others.get("resume")
        self.resumed.append(0 if resume is None else resume.step)

        def on_step(step: int, steps: int) -> None:
            hooks.on_step(step, steps)
            self.after(step)

        return super().run(task, work, inputs, replace(hooks, on_step=on_step), *more, **others)


class Saving(Bench):
    """A worker that saves in `folder` after every step."""

    def __init__(
        self,
        folder: Path,
        after: Callable[[int], None] = lambda step: None,
        seconds: float | None = 0.0,
        send: Callable[[StateSaved, RunState], None] = lambda saved, state: None,
    ) -> None:
        super().__init__(SteppedEngine(after), steps=STEPS)
        self.disk = CheckpointDisk(CheckpointFolder(folder, 1 << 30))
        self.worker = GpuWorker(
            WorkerId("gpu-0"),
            1,
            lambda: self.engine,
            WorkerCallbacks(self.steps.append, on_state=send),
            checkpointing=Checkpointing(seconds, self.disk),
        )
        self.worker.start()

    def saved(self) -> dict[str, int]:
        assert self.disk.flush(60.0)
        return dict(self.disk.folder.steps())

    def left_after(self, *reports: TaskReport) -> dict[str, int]:
        """States saved once the controller needs the checkpoints of these runs no more."""
        for report in reports:
            assert report.error is None
            assert report.has_checkpoints
            self.worker.forget_checkpoints(report.task_id)
        return self.saved()


def die_at(folder: str, step: int) -> None:
    """A worker process that is killed after `step`, as soon as the state of the step before is on disk."""
    bench: Saving

    def after(done: int) -> None:
        if done == step:
            assert bench.disk.flush(60.0)
            os.kill(os.getpid(), signal.SIGKILL)

    bench = Saving(Path(folder), after)
    bench.run()


def test_a_run_resumes_where_the_process_of_another_worker_was_killed(tmp_path: Path) -> None:
    """A process is killed after step 4 of 5; another one does the steps since its last checkpoint."""
    code = f"from {__name__} import die_at; die_at({str(tmp_path)!r}, 4)"
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": str(root)})
    assert killed.returncode == -signal.SIGKILL
    bench = Saving(tmp_path)
    ((_, step),) = bench.saved().items()
    assert 1 <= step <= 3
    report, result = bench.run()
    assert report.error is None
    assert isinstance(result, Latent)
    assert bench.engine.resumed == [step]
    assert (report.cost.steps_before, report.cost.steps) == (step, STEPS)
    assert [one.step for one in bench.steps] == []
    assert bench.left_after(report) == {}
    report, _ = bench.run()
    assert (bench.engine.resumed, report.cost.steps_before) == ([step, 0], 0)


def test_a_result_that_is_lost_with_its_controller_costs_only_the_steps_since_the_checkpoint(tmp_path: Path) -> None:
    """The run ended when nobody was there: the next controller submits the task again."""
    bench = Saving(tmp_path)
    report, result = bench.run(run=1)
    ((_, step),) = bench.saved().items()
    assert 1 <= step < STEPS
    again, same = bench.run(run=1)
    assert again.cost.steps_before == step
    assert isinstance(result, Latent)
    assert isinstance(same, Latent)
    assert (same.samples_CHW == result.samples_CHW).all()
    assert bench.left_after(again) == {}
    with pytest.raises(OlderEpoch):
        bench.worker.forget_checkpoints(report.task_id, epoch=-1)


def test_the_later_of_two_states_is_used(tmp_path: Path) -> None:
    bench = Saving(tmp_path)
    task_id = bench.task.task_id
    sampler = SamplerState(np.zeros((4, 1, 1), np.float32))
    for on_disk, sent, expected in ((2, 3, 3), (3, 2, 3), (3, 3, 3), (4, None, 4)):
        bench.disk.folder.save(task_id, RunState(on_disk, STEPS, sampler))
        states = () if sent is None else (RunState(sent, STEPS, sampler),)
        request = RunRequest(bench.task, bench.work, 1, 1, resume=sent is not None)
        report, _ = run_one(bench.worker, request, *bench.inputs, *states)
        assert (report.error, report.cost.steps_before) == (None, expected)
        assert bench.engine.resumed[-1] == expected
        bench.worker.forget_checkpoints(task_id)
        assert bench.saved() == {}


def test_each_task_of_a_batch_has_a_checkpoint_and_resumes_from_it(tmp_path: Path) -> None:
    bench = Saving(tmp_path)
    assert isinstance(bench.work, SampleParams)
    other_work = replace(bench.work, seed=2)
    other = replace(bench.task, task_id=type(bench.task.task_id)(f"{bench.task.task_id}-2"))
    sampler = SamplerState(np.zeros((4, 1, 1), np.float32))
    for task, step in ((bench.task, 2), (other, 3)):
        bench.disk.folder.save(task.task_id, RunState(step, STEPS, sampler))
    requests = [RunRequest(bench.task, bench.work, 1, 1), RunRequest(other, other_work, 1, 2)]
    reports, _ = run_batch(bench.worker, requests, *bench.inputs, *bench.inputs)
    assert [report.cost.steps_before for report in reports] == [2, 3]
    assert set(bench.saved()) == {bench.task.task_id, other.task_id}
    assert bench.left_after(*reports) == {}


def test_a_disk_that_never_answers_delays_neither_the_run_nor_what_is_sent(tmp_path: Path) -> None:
    """The first state is being written for as long as the run takes; all others are skipped there, and none is
    awaited."""
    begun, gate, sent = threading.Event(), threading.Event(), list[int]()
    bench = Saving(tmp_path, send=lambda saved, state: sent.append(saved.step))
    hung, save = list[int](), bench.disk.folder.save

    def hang(task_id, state):  # type: ignore[no-untyped-def]
        hung.append(state.step)
        begun.set()
        assert gate.wait(60.0)
        return save(task_id, state)

    def after(step: int) -> None:
        if step > 1:  # the first state is offered after the first step
            assert begun.wait(60.0), "the first state is not being written"
        bench.worker._checkpoints._sending.flush(60.0)

    bench.disk.folder.save = hang  # type: ignore[method-assign]
    bench.engine.after = after
    report, result = bench.run()
    assert report.error is None
    assert isinstance(result, Latent)
    assert (hung, sent) == ([1], [1, 2, 3, 4])
    bench.worker.forget_checkpoints(report.task_id)
    gate.set()
    assert bench.saved() == {}, "what was written late is removed, too"


def test_a_state_that_a_run_stops_with_is_saved(tmp_path: Path) -> None:
    bench = Saving(tmp_path, seconds=1e6)
    bench.worker.stop(1, keep_state=True)
    report, state = bench.run(run=1)
    assert report.has_state
    assert isinstance(state, RunState)
    assert bench.saved() == {bench.task.task_id: 1}
    report, _ = bench.run(run=2)
    assert (report.error, report.cost.steps_before) == (None, 1)
    assert bench.left_after(report) == {}


@pytest.mark.parametrize(("raised", "is_kept"), [(RuntimeError("a bug"), False), (MemoryError("full"), True)])
def test_a_state_that_may_have_failed_a_run_is_not_used_again(raised: Exception, is_kept: bool, tmp_path: Path) -> None:
    bench = Saving(tmp_path)
    sampler = SamplerState(np.zeros((4, 1, 1), np.float32))
    bench.disk.folder.save(bench.task.task_id, RunState(3, STEPS, sampler))

    def fail(step: int) -> None:
        raise raised

    bench.engine.after = fail
    report, _ = bench.run()
    assert report.error is not None
    assert report.error.kind in (RunErrorKind.INTERNAL, RunErrorKind.OUT_OF_HOST_MEMORY)
    assert report.cost.steps_before == 3
    assert (bench.saved() != {}) == is_kept


def test_a_worker_without_checkpoints_neither_writes_nor_looks(tmp_path: Path) -> None:
    bench = Bench(steps=STEPS)
    bench.worker.start()
    report, _ = bench.run()
    assert (report.error, list(tmp_path.iterdir())) == (None, [])
