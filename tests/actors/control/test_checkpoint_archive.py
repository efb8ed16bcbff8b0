"""A controller resumes what runs of an earlier one left, from its own folder or from that of the worker's node."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from modelpool import GenerateRequest, ModelPool
from modelpool.actors.control import checkpoint_archive
from modelpool.actors.control.checkpoint_archive import CheckpointArchive
from modelpool.actors.control.controller import Controller
from modelpool.actors.outputs.results.outcomes import OutputResult
from modelpool.actors.worker.step_checkpoints.checkpoint_disk import CheckpointDisk
from modelpool.actors.worker.step_checkpoints.checkpoint_folder import CheckpointFolder
from modelpool.pool.values.core.results import RunState, SamplerState
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.specs.spec import Stage, TaskId, WorkerId
from modelpool.scheduler.core.leaving import LEAVE_SECONDS
from tests.actors.loop_connection import LoopConnection, disk_at
from tests.actors.worker.test_gpu_worker import Bench
from tests.actors.worker.test_run_checkpoints import SteppedEngine

STEPS = 6
REQUEST = GenerateRequest(model="shapes", prompt="a red circle", seed=3, steps=STEPS)


def state(step: int, steps: int = STEPS) -> RunState:
    return RunState(step, steps, SamplerState(np.zeros((4, 1, 1), np.float32)))


class Pool:
    """A pool of one worker. Its sampling run waits after `step`. The folders are the folders of worker and
    controller."""

    def __init__(self, folders: tuple[Path | None, Path | None], step: int = 0) -> None:
        self.reached, self.gate = threading.Event(), threading.Event()
        self.engine = SteppedEngine(lambda done: self._wait(done == step))
        self.line = LoopConnection(1, lambda: self.engine, checkpoint_seconds=0.0, checkpoint_folders=folders)
        self.pool = ModelPool(self.line, self._close, None)

    def _wait(self, is_there: bool) -> None:
        if is_there:
            self.reached.set()
            assert self.gate.wait(60.0)

    def _close(self) -> None:
        self.line.end()
        self.gate.set()
        for thread in self.line.fleet.threads:
            thread.shutdown(wait=True)

    def generate(self) -> OutputResult:
        with self.pool:
            (image,) = self.pool.submit([REQUEST], output=False).images()
            self.line.flush_checkpoints()
            return image

    def end_in_the_middle(self) -> None:
        """Submit, and end the pool in the middle of the run."""
        with self.pool:
            self.pool.submit([REQUEST], output=False)
            assert self.reached.wait(60.0)
            self.line.flush_checkpoints()


def steps_in(folder: Path) -> list[int]:
    found = disk_at(folder)
    assert found is not None
    return list(found.folder.steps().values())


@pytest.mark.parametrize("survivor", ["worker", "controller"])
def test_a_run_resumes_if_one_of_two_folders_survives(survivor: str, tmp_path: Path) -> None:
    """And both are empty once it has succeeded."""
    expected = Pool((None, None)).generate()
    folders = tmp_path / "worker", tmp_path / "controller"
    Pool(folders, step=4).end_in_the_middle()
    kept, lost = folders if survivor == "worker" else reversed(folders)
    shutil.rmtree(lost)
    (step,) = steps_in(kept)
    assert 1 <= step <= 3
    again = Pool(folders)
    image = again.generate()
    assert max(again.engine.resumed) == step
    assert image.pixels.tobytes() == expected.pixels.tobytes()
    (sampled,) = [task for task in image.tasks if task.stage is Stage.SAMPLE]
    assert sampled.resumed == f"after step {step} of {STEPS}"
    assert [steps_in(folder) for folder in folders] == [[], []]


def test_checkpoints_stay_until_the_job_has_its_output(tmp_path: Path) -> None:
    """The result of a run is lost with the controller, also after its report: in the middle of a long decode, say."""
    folders = tmp_path / "worker", tmp_path / "controller"
    pool = Pool(folders)
    decode, during_decode = pool.engine.run, []

    def run(task, *more, **others):  # type: ignore[no-untyped-def]
        if task.stage is Stage.DECODE:
            worker, _ = pool.line.fleet.workers[WorkerId("gpu-0"), 1]
            assert worker._checkpoints._disk.flush(60.0)
            during_decode.append(len(steps_in(folders[0])))
        return decode(task, *more, **others)

    pool.engine.run = run
    pool.generate()
    assert during_decode == [1]
    assert [steps_in(folder) for folder in folders] == [[], []]


def test_files_that_cannot_be_used_start_the_run_from_the_beginning(tmp_path: Path) -> None:
    Pool((None, tmp_path), step=4).end_in_the_middle()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    again = Pool((None, tmp_path))
    image = again.generate()
    assert (set(again.engine.resumed), {task.resumed for task in image.tasks}) == ({0}, {""})


def test_a_drained_pool_has_saved_the_run_that_it_stopped(tmp_path: Path) -> None:
    """The worker's own folder is lost with its node: the state was read from it and saved with the controller's."""
    pool = Pool((None, tmp_path), step=3)
    pool.line.fleet._checkpoint_seconds = 1e6  # the only state is the state at the stop

    def go_on_when_stopped() -> None:
        worker, _ = pool.line.fleet.workers[WorkerId("gpu-0"), 1]
        while not worker._pauses:
            time.sleep(0.001)
        pool.gate.set()

    with pool.pool:
        pool.pool.submit([REQUEST], output=False)
        assert pool.reached.wait(60.0)
        stopping = threading.Thread(target=go_on_when_stopped)
        stopping.start()
        assert pool.line.call(Controller.drain, LEAVE_SECONDS) == 0
        assert steps_in(tmp_path) == [3]
        stopping.join()


def archive(folder: Path) -> CheckpointArchive:
    return CheckpointArchive(CheckpointDisk(CheckpointFolder(folder, 1 << 30)))


def test_an_archive_finds_what_is_there_and_reads_nothing_else(tmp_path: Path) -> None:
    bench = Bench(steps=STEPS)
    assert isinstance(bench.work, SampleParams)
    works = {bench.task.task_id: bench.work, TaskId("sample-unknown"): bench.work}

    async def use() -> None:
        kept = archive(tmp_path)
        await kept.open()
        assert await kept.find(works) == {}
        kept.remove(bench.task.task_id)
        assert kept.takes(bench.task.task_id)
        kept.save(bench.task.task_id, state(4))
        await kept.flush(60.0)
        later = archive(tmp_path)
        before = asyncio.ensure_future(later.find(works))  # its driver has found the controller before it was open
        await asyncio.sleep(0)
        await later.open()
        ((task_id, found),) = (await before).items()
        assert (await later.find(works)).keys() == {task_id}
        assert (task_id, found.step) == (bench.task.task_id, 4)
        later.remove(task_id)
        await later.flush(60.0)
        assert await later.find(works) == {}
        assert steps_in(tmp_path) == []
        for one in (kept, later, CheckpointArchive()):
            one.close()

    asyncio.run(use())


def test_a_folder_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system with a server that is gone: the pool opens, and jobs start from the beginning."""
    monkeypatch.setattr(checkpoint_archive, "READ_SECONDS", 0.01)
    monkeypatch.setattr(CheckpointDisk.find, "__defaults__", (0, 0.01))
    gate = threading.Event()
    kept, bench = archive(tmp_path), Bench(steps=STEPS)
    assert kept._disk is not None
    monkeypatch.setattr(kept._disk.folder, "steps", lambda: gate.wait(60.0))
    read = list[object]()
    monkeypatch.setattr(kept._disk.folder, "newest", lambda *run: (read.append(run), gate.wait(60.0)))

    async def use() -> None:
        assert await kept.find({bench.task.task_id: bench.work}) == {}, "it is not open"
        await kept.open()
        kept.note(bench.task.task_id)
        for _ in range(3):
            assert await kept.find({bench.task.task_id: bench.work}) == {}
        gate.set()

    asyncio.run(use())
    assert len(read) == 1, "no more than one thread waits for it"
    kept.close()
