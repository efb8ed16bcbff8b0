"""The worker as a plain class: whatever its engine does becomes one report."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_files import task_files
from modelpool.actors.request.requests import GenerateRequest
from modelpool.actors.worker.file_check import FileCheck
from modelpool.actors.worker.gpu_worker import STOPS_REMEMBERED, GpuWorker, result_bytes, run_error
from modelpool.actors.worker.wire.messages import ExpectedFile, RunRequest, StepDone
from modelpool.actors.worker.worker_setup import WorkerCallbacks, WorkerNode
from modelpool.pool.values.core.errors import CorruptFile, DoesNotFit
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.values.core.stage_params import Encoded, ImagePixels, Latent, PreloadRequest, SampleParams, Stopped
from modelpool.pool.values.core.task_inputs import TaskInputs
from modelpool.pool.values.specs.spec import ComponentKey, JobId, NodeId, OomStep, RunErrorKind, Stage, WorkerId
from modelpool.pool.values.specs.wire_value import evolve
from tests.actors.cold_file import PAGE, cold_file, resident_pages
from tests.actors.fakes import CAPACITY_BYTES, ENDLESS, FAIL, FakeCatalog, FakeEngine, GrowingEngine, result_of
from tests.actors.worker.one_run import run_all, run_batch, run_one

MIB = 1 << 20


class Bench:
    """One worker, and the sample task of one image with its inputs."""

    def __init__(self, engine: object | None = None, prompt: str = "a red circle", steps: int = 3) -> None:
        self.steps: list[StepDone] = []
        self.engine = engine or FakeEngine()
        self.worker = GpuWorker(
            WorkerId("gpu-0"), 4, lambda: self.engine, WorkerCallbacks(self.steps.extend), progress_seconds=0.0
        )
        request = GenerateRequest(model="shapes", prompt=prompt, seed=1, steps=steps)
        _, cut = build_graph(request, JobId("x"), FakeCatalog())
        self.task = next(task for task in cut.job.tasks if task.stage is Stage.SAMPLE)
        self.work = cut.works[self.task.task_id]
        self.inputs = tuple(result_of(cut.works[need], {}) for need in self.task.needs)

    def reads(self, path: Path, sha256: str = "") -> ExpectedFile:
        """Have the model of the task in this file from now on; it need not be one of weights."""
        self.worker._files._check = FileCheck(_there)
        run, known = self.engine.run, self.work.model
        self.engine.run = lambda task, work, *rest, **named: run(task, evolve(work, model=known), *rest, **named)
        self.work = evolve(self.work, model=evolve(self.work.model, path=str(path), sha256=sha256))
        ((component, part),) = task_files(self.task, self.work).items()
        return ExpectedFile(component, part, _there(part))

    def run(self, run: int = 1, attempt: int = 1):
        return run_one(self.worker, RunRequest(self.task, self.work, attempt, run), *self.inputs)


def _there(part: FilePart) -> str:
    if not Path(part.path).exists():
        raise CorruptFile(f"{part.path}: cannot be read: No such file")
    return "there"


class RaisingEngine(FakeEngine):
    """Fails in a given way."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__()
        self.raised = raised

    def run(self, *args, **kwargs):
        raise self.raised


def test_a_worker_introduces_itself_with_what_its_engine_measured() -> None:
    spec = Bench().worker.start()
    assert (spec.worker_id, spec.incarnation, spec.capacity_bytes) == ("gpu-0", 4, CAPACITY_BYTES)
    assert (spec.link_bytes_per_second, spec.device_name) == (1e9, "fake")


def test_a_worker_says_that_it_may_grow_and_grows_when_it_is_asked() -> None:
    worker = Bench(GrowingEngine()).worker
    assert not worker.growth.beat(), "it has not started"
    worker.start()
    assert worker.growth.beat()
    assert worker.growth.grow().capacity_bytes == 2 * CAPACITY_BYTES
    assert not worker.growth.beat()


def test_the_driver_of_a_gpu_is_not_asked_during_a_run() -> None:
    """Each heartbeat did, and the answer may wait for what the GPU computes."""

    class Asked(GrowingEngine):
        asked = 0
        beats: tuple[bool, ...] = ()

        @property
        def may_grow(self) -> bool:
            self.asked += 1
            return True

        def run(self, *args, **kwargs):
            self.beats += (bench.worker.growth.beat(),)
            return super().run(*args, **kwargs)

    bench = Bench(Asked())
    bench.worker.start()
    bench.run()
    assert (bench.engine.beats, bench.engine.asked) == ((False,), 0)
    assert bench.worker.growth.beat(), "it is idle again"


def test_a_run_comes_back_with_its_result_cost_and_residency() -> None:
    bench = Bench()
    bench.worker.start()
    report, result = bench.run(attempt=2)
    assert (report.task_id, report.attempt) == (bench.task.task_id, 2)
    assert (report.worker_id, report.incarnation) == ("gpu-0", 4)
    assert report.error is None
    assert (
        result.samples_CHW == result_of(bench.work, TaskInputs.named(bench.task.input_names, bench.inputs)).samples_CHW
    ).all()
    assert report.result_bytes == result.samples_CHW.nbytes
    assert report.cost.uploaded_bytes > 0
    assert report.residency == bench.engine.residency()
    assert report.residency.used_bytes > 0
    again, _ = bench.run(attempt=3)
    assert again.cost.resident


def test_steps_are_told_when_time_allows_but_for_the_last_which_the_report_tells() -> None:
    bench = Bench(steps=5)
    bench.worker.start()
    bench.run(run=7)
    assert [(s.step, s.steps) for s in bench.steps] == [(n, 5) for n in range(1, 5)]
    assert {(s.worker_id, s.incarnation, s.task_id, s.run) for s in bench.steps} == {
        ("gpu-0", 4, bench.task.task_id, 7)
    }
    bench.worker._progress_seconds = 1e9
    bench.steps.clear()
    bench.run()
    assert bench.steps == []


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (Stopped(), RunErrorKind.CANCELLED),
        (CorruptFile("the file is cut short"), RunErrorKind.BAD_INPUT),
        (DoesNotFit("needs more"), RunErrorKind.BAD_INPUT),
        (KeyError("weight"), RunErrorKind.INTERNAL),
        (SystemExit(3), RunErrorKind.INTERNAL),
        (MemoryError("the host is full"), RunErrorKind.OUT_OF_HOST_MEMORY),
    ],
)
def test_whatever_is_raised_becomes_a_value(raised, kind) -> None:
    bench = Bench(RaisingEngine(raised))
    bench.worker.start()
    report, result = bench.run()
    assert result is None
    assert report.error.kind is kind
    assert str(raised) in report.error.message or kind is RunErrorKind.CANCELLED
    assert ("Traceback" in report.error.traceback_text) == (kind is not RunErrorKind.CANCELLED)
    assert report.residency == bench.engine.residency()


def test_running_out_of_device_memory_is_a_kind_of_its_own() -> None:
    import torch

    bench = Bench(RaisingEngine(torch.OutOfMemoryError("tried to allocate 2 GiB")))
    bench.worker.start()
    report, _ = bench.run()
    assert report.error.kind is RunErrorKind.OUT_OF_VRAM
    assert "2 GiB" in report.error.message


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EMFILE, errno.ESTALE])
def test_a_broken_disk_of_a_worker_fails_no_job(number: int) -> None:
    """It was an internal error, which fails a job at once: such a node was idle again at once, and failed the next."""
    bench = Bench(RaisingEngine(OSError(number, os.strerror(number), "/tmp/cache")))
    bench.worker.start()
    requests, inputs = together(bench, "one")
    reports, _ = run_all(bench.worker, requests, *inputs)
    error = reports[0].error
    assert error is not None
    assert error.kind is RunErrorKind.WORKER_LOST
    assert os.strerror(number) in error.message
    other = run_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "/tmp/x"))
    assert other.kind is RunErrorKind.INTERNAL


@pytest.mark.parametrize("name", ["AcceleratorError", "RuntimeError"])
@pytest.mark.parametrize("said", ["CUDA error: out of memory", "MPS backend out of memory (MPS allocated: 8.00 GB)"])
def test_a_device_that_says_so_in_another_error_is_not_lost(name: str, said: str) -> None:
    """Found in a review: an AcceleratorError about memory gave the worker up, a RuntimeError was an internal error."""
    import torch

    bench = Bench(RaisingEngine(getattr(torch, name, RuntimeError)(said)))
    bench.worker.start()
    report, _ = bench.run()
    assert report.error.kind is RunErrorKind.OUT_OF_VRAM
    assert said in report.error.message
    assert not bench.worker._ended.is_set()


@pytest.mark.parametrize(("name", "over"), [("AcceleratorError", True), ("OutOfMemoryError", False)])
def test_a_worker_whose_gpu_is_broken_is_over_after_its_report(name, over) -> None:
    import torch

    bench = Bench(RaisingEngine(getattr(torch, name)("an illegal memory access was encountered")))
    bench.worker.start()
    report, _ = bench.run()
    assert "illegal memory access" in report.error.message
    assert (report.error.kind is RunErrorKind.WORKER_LOST) == over
    assert bench.worker._ended.is_set() == over


def test_what_was_done_about_memory_is_told_from_the_first_attempt_on() -> None:
    """The rungs of the request come first, the worker's after them; for good ends and for bad ones."""
    from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory

    before, there = (OomStep.DROP_CACHES, OomStep.OTHER_WORKER), (OomStep.DROP_CACHES, OomStep.STREAM_MORE)
    bench = Bench(RaisingEngine(RanOutOfMemory("2 GiB are missing", there)))
    bench.worker.start()
    request = RunRequest(bench.task, bench.work, 2, 1, oom_steps=before)
    report, _ = run_one(bench.worker, request, *bench.inputs)
    assert (report.error.kind, report.error.oom_steps) == (RunErrorKind.OUT_OF_VRAM, before + there)
    bench.engine = FakeEngine()
    bench.worker.start()
    report, _ = run_one(bench.worker, request, *bench.inputs)
    assert (report.error, report.cost.oom_steps) == (None, before)


def test_what_is_needed_next_reaches_the_engine() -> None:
    class Listening(FakeEngine):
        heard = ()

        def run(self, *args, **kwargs):
            self.heard = args[5]
            return super().run(*args, **kwargs)

    bench = Bench(Listening())
    bench.worker.start()
    hint = (ComponentKey("shapes/vae"),)
    run_one(bench.worker, RunRequest(bench.task, bench.work, 1, 1, needed_next=hint), *bench.inputs)
    assert bench.engine.heard == hint


def test_what_is_to_come_reaches_the_run_that_it_was_told_for_and_no_other() -> None:
    class Listening(FakeEngine):
        heard: PreloadRequest | None = None

        def run(self, task, work, inputs, hooks, fresh=False, needed_next=(), state=None):
            self.heard = hooks.preload_request()
            return super().run(task, work, inputs, hooks, fresh, needed_next, state)

    engine = Listening()
    bench = Bench(engine)
    bench.worker.start()
    preload_request = PreloadRequest(())
    bench.worker.preload(7, preload_request)
    bench.run(run=6)
    assert engine.heard is None
    bench.run(run=7)
    assert engine.heard is preload_request
    bench.worker.preload(8, PreloadRequest(()))
    bench.run(run=7)
    assert engine.heard is None, "another has taken its place"


def test_a_stop_ends_that_run_and_no_other() -> None:
    bench = Bench()
    bench.worker.start()
    bench.worker.stop(2)
    assert bench.run(run=1)[0].error is None
    assert bench.run(run=2)[0].error.kind is RunErrorKind.CANCELLED
    assert bench.run(run=3)[0].error is None


def test_a_stop_that_comes_too_late_does_not_stop_the_same_work_when_it_is_asked_for_again() -> None:
    """Attempts of a task start at 1 again when it was forgotten in between."""
    bench = Bench()
    bench.worker.start()
    assert bench.run(run=1, attempt=1)[0].error is None
    bench.worker.stop(1)
    assert bench.run(run=2, attempt=1)[0].error is None


def test_a_stop_from_another_thread_ends_a_run_at_its_next_step() -> None:
    class Endless(FakeEngine):
        def _say(self, pipe: str, word: str) -> None:
            reached.set()

    reached = threading.Event()
    bench = Bench(Endless(), prompt=ENDLESS)
    bench.worker.start()

    def stop() -> None:
        reached.wait()
        bench.worker.stop(1)

    stopper = threading.Thread(target=stop)
    stopper.start()
    report, _ = bench.run()
    stopper.join()
    assert report.error.kind is RunErrorKind.CANCELLED


def test_stops_that_come_too_late_do_not_pile_up() -> None:
    bench = Bench()
    bench.worker.start()
    for number in range(1000):
        bench.worker.stop(number)
    assert bench.run(run=number)[0].error.kind is RunErrorKind.CANCELLED
    assert len(bench.worker._stops) <= STOPS_REMEMBERED


def test_closing_ends_the_watch_and_empties_the_gpu() -> None:
    bench = Bench()
    bench.worker.start()
    bench.run()
    watching = threading.Thread(target=bench.worker.watch)
    watching.start()
    bench.worker.close()
    bench.worker.close()
    watching.join()
    assert bench.engine.residency().used_bytes == 0


@pytest.mark.parametrize(
    ("result", "size_bytes"),
    [
        (Encoded(np.zeros((77, 8), np.float32)), 77 * 8 * 4),
        (Encoded(np.zeros((77, 8), np.float32), np.zeros(16, np.float32)), (77 * 8 + 16) * 4),
        (Latent(np.zeros((4, 8, 8), np.float32)), 4 * 8 * 8 * 4),
        (ImagePixels(np.zeros((64, 64, 3), np.uint8)), 64 * 64 * 3),
    ],
)
def test_the_size_of_a_result_is_the_size_of_its_arrays(result, size_bytes) -> None:
    assert result_bytes(result) == size_bytes


def test_the_work_of_the_bench_is_a_sampling() -> None:
    assert isinstance(Bench().work, SampleParams)


def together(bench: Bench, *prompts: str, attempt: int = 1) -> tuple[list[RunRequest], list]:
    """Requests for the sample tasks of images with these prompts, and all their inputs."""
    requests, inputs = [], []
    for number, prompt in enumerate(prompts):
        other = Bench(prompt=prompt)
        requests.append(RunRequest(other.task, other.work, attempt, 10 + number))
        inputs += other.inputs
    return requests, inputs


def test_several_attempts_come_back_with_a_report_each() -> None:
    """Each of its own inputs; what fails and what was asked to stop takes nobody along."""
    bench = Bench()
    bench.worker.start()
    requests, inputs = together(bench, "one", "two", FAIL, "four")
    bench.worker.stop(13)
    reports, results = run_batch(bench.worker, requests, *inputs)
    kinds = [report.error and report.error.kind for report in reports]
    assert kinds == [None, None, RunErrorKind.INTERNAL, RunErrorKind.CANCELLED]
    assert [report.task_id for report in reports] == [request.task.task_id for request in requests]
    assert [result is None for result in results] == [False, False, True, True]
    for place in (0, 1):
        lone, result = run_one(bench.worker, requests[place], *inputs[2 * place : 2 * place + 2])
        assert (result.samples_CHW == results[place].samples_CHW).all()
        assert reports[place].result_bytes == lone.result_bytes
        assert (reports[place].cost.batched, lone.cost.batched) == (4, 1)
    assert (results[0].samples_CHW != results[1].samples_CHW).any()


def test_runs_of_one_call_come_back_in_order_without_those_that_were_revoked() -> None:
    bench = Bench()
    bench.worker.start()
    requests, inputs = together(bench, "one", "two", FAIL, "four")
    assert bench.worker.revoke(11)
    reports, results = run_all(bench.worker, requests, *inputs)
    kinds = [report and (report.error and report.error.kind) for report in reports]
    assert kinds == [None, None, RunErrorKind.INTERNAL, None]
    assert [report is None for report in reports] == [False, True, False, False]
    assert [result is None for result in results] == [False, True, True, False]
    assert not bench.worker.revoke(13), "it has started"
    for place in (0, 3):
        _, lone = run_one(bench.worker, requests[place], *inputs[2 * place : 2 * place + 2])
        assert (lone.samples_CHW == results[place].samples_CHW).all()


def test_no_run_of_a_call_starts_after_the_loss_of_the_gpu() -> None:
    import torch

    bench = Bench(RaisingEngine(torch.AcceleratorError("an illegal memory access was encountered")))
    bench.worker.start()
    requests, inputs = together(bench, "one", "two")
    reports, results = run_all(bench.worker, requests, *inputs)
    assert reports[0].error.kind is RunErrorKind.WORKER_LOST
    assert (reports[1], results) == (None, (None, None))
    assert run_all(bench.worker, requests[:1], *inputs[:2]) == ((None,), (None,)), "in no later call either"


def test_what_no_engine_should_raise_is_reported_by_all() -> None:
    class Broken(FakeEngine):
        def run_batch(self, members, needed_next=()):
            raise RuntimeError("not even this")

    bench = Bench(Broken())
    bench.worker.start()
    requests, inputs = together(bench, "one", "two")
    reports, results = run_batch(bench.worker, requests, *inputs)
    assert [report.error.kind for report in reports] == [RunErrorKind.INTERNAL] * 2
    assert results == (None, None)


class ReadingEngine(FakeEngine):
    """Touches every page of a mapped file in each run, as an upload of mapped weights does."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def run(self, *args, **kwargs):
        assert np.memmap(self.path, dtype=np.uint8, mode="r")[::PAGE].any()
        return super().run(*args, **kwargs)


def test_a_run_says_what_it_read_from_disks_and_the_next_one_that_it_need_not(tmp_path: Path) -> None:
    bench = Bench(ReadingEngine(cold_file(tmp_path / "weights", 16 * MIB)))
    bench.worker.start()
    cold, _ = bench.run()
    warm, _ = bench.run()
    assert cold.cost.storage_bytes > 15 * MIB
    assert warm.cost.storage_bytes < MIB


def test_what_was_read_ahead_is_no_business_of_the_run_after_it(tmp_path: Path) -> None:
    """The weights are in memory then, and the bytes that brought them there are not the run's."""
    path = cold_file(tmp_path / "weights", 16 * MIB)
    bench = Bench(ReadingEngine(path))
    bench.worker.start()
    bench.worker.prefetch([FilePart(str(path))])
    assert bench.worker._prefetcher.wait(30.0)
    assert resident_pages(path).all()
    report, _ = bench.run()
    bench.worker.close()
    assert report.error is None
    assert report.cost.storage_bytes < MIB


def test_a_worker_says_which_machine_it_is_on_and_what_that_can_keep() -> None:
    worker = GpuWorker(
        WorkerId("gpu-0"), 1, FakeEngine, WorkerCallbacks(lambda step: None), node=WorkerNode(NodeId("here"))
    )
    spec = worker.start()
    assert spec.node == "here"
    assert spec.host_bytes > 64 * MIB
    assert Bench().worker.start().node == "", "a machine of its own where nobody says it"
