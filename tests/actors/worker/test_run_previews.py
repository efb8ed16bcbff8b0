"""A worker makes previews while somebody wants them, at most so often, and the newest; otherwise it does nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from modelpool.actors.worker.gpu_worker import GpuWorker
from modelpool.actors.worker.wire.messages import PreviewMade, RunRequest
from modelpool.actors.worker.worker_setup import WorkerCallbacks
from modelpool.pool.values.core.previews import PreviewKind, PreviewWish
from modelpool.pool.values.core.stage_params import FloatArray, ModelRef, RunHooks
from modelpool.pool.values.specs.spec import WorkerId
from tests.actors.fakes import FakeEngine
from tests.actors.worker.one_run import run_one
from tests.actors.worker.test_gpu_worker import Bench

EACH_STEP = PreviewWish(interval_seconds=0.0)
STEPS = 4


class PredictingEngine(FakeEngine):
    """Offers a latent that has the number of its step, and makes previews that have it too."""

    def __init__(self, before: Callable[[int], None] = lambda step: None) -> None:
        super().__init__()
        self.before = before
        self.prepared: list[PreviewWish] = []
        self.copies = 0
        self.made: list[int] = []

    def prepare_previews(self, model: ModelRef, wish: PreviewWish) -> None:
        self.prepared.append(wish)

    def preview(self, model: ModelRef, latent_CHW: FloatArray, wish: PreviewWish) -> bytes | None:
        self.made.append(int(latent_CHW[0, 0, 0]))
        return b"%d" % self.made[-1]

    def run(self, task: Any, work: Any, inputs: Any, hooks: RunHooks, *others: Any, **named: Any) -> Any:
        assert hooks.preview is not None
        for step in range(1, STEPS + 1):
            self.before(step)

            def latents(step: int = step) -> tuple[FloatArray, ...]:
                self.copies += 1
                return (np.full((4, 2, 2), step, np.float32),)

            hooks.preview(latents)
            hooks.on_step(step, STEPS)
        return super().run(task, work, inputs, replace(hooks, on_step=lambda done, steps: None), *others, **named)


class Watched(Bench):
    """A worker with previews that are collected."""

    def __init__(self, before: Callable[[Watched, int], None] = lambda bench, step: None) -> None:
        super().__init__(PredictingEngine(lambda step: before(self, step)), steps=STEPS)
        self.sent: list[PreviewMade] = []
        self.worker = GpuWorker(
            WorkerId("gpu-0"), 4, lambda: self.engine, WorkerCallbacks(self.steps.append, on_preview=self.sent.append)
        )
        self.worker.start()

    def watch(self, wish: PreviewWish | None, run: int = 1) -> list[tuple[int, bytes]]:
        """Run, and return the step and content of each preview that was sent."""
        run_one(self.worker, RunRequest(self.task, self.work, 1, run, preview=wish), *self.inputs)
        assert self.worker._previews.flush(60)
        return [(made.preview.step, made.preview.content) for made in self.sent]


def flushed(bench: Watched, step: int) -> None:
    """Each preview is sent before the next step."""
    assert bench.worker._previews.flush(60)


def test_without_a_wish_nothing_is_copied_made_or_sent() -> None:
    for wish in (None, PreviewWish(PreviewKind.NONE, 0.0)):
        bench = Watched()
        assert bench.watch(wish) == []
        assert (bench.engine.copies, bench.engine.made, bench.engine.prepared) == (0, [], [])
        assert bench.worker._previews._queue._thread is None


def test_each_step_has_a_preview_if_somebody_wants_that() -> None:
    bench = Watched(flushed)
    assert bench.watch(EACH_STEP) == [(step, b"%d" % step) for step in range(1, STEPS + 1)]
    assert bench.engine.prepared == [EACH_STEP]
    first = bench.sent[0]
    assert (first.worker_id, first.incarnation, first.task_id, first.run) == ("gpu-0", 4, bench.task.task_id, 1)
    assert first.preview.steps == STEPS


def test_previews_are_made_at_most_once_in_the_interval() -> None:
    bench = Watched(flushed)
    assert bench.watch(PreviewWish(interval_seconds=3600.0)) == [(1, b"1")]
    assert bench.engine.copies == 1


def test_while_one_is_made_only_the_newest_waits() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before(bench: Watched, step: int) -> None:
        if step == 2:
            assert begun.wait(60)
        if step == STEPS:
            assert bench.worker._previews._queue.waits(bench.task.task_id)

    bench = Watched(before)
    make = bench.engine.preview

    def slow(*given: Any) -> bytes | None:
        begun.set()
        assert go_on.wait(60)
        return make(*given)

    bench.engine.preview = slow
    release = threading.Timer(0.2, go_on.set)
    release.start()
    assert bench.watch(EACH_STEP) == [(1, b"1"), (STEPS, b"%d" % STEPS)]
    release.join()


def test_a_wish_may_come_and_go_during_a_run() -> None:
    def before(bench: Watched, step: int) -> None:
        flushed(bench, step)
        if step in (2, 4):
            bench.worker.want_previews(1, EACH_STEP if step == 2 else None)

    bench = Watched(before)
    assert bench.watch(None) == [(2, b"2"), (3, b"3")]
    assert bench.watch(None, run=2) == [(2, b"2"), (3, b"3")]  # a wish is for one run


def test_a_model_without_previews_is_sampled_anyway() -> None:
    bench = Watched()

    def fail(*given: Any) -> None:
        raise RuntimeError("no memory for the VAE")

    bench.engine.prepare_previews = fail
    bench.engine.preview = lambda *given: None
    assert bench.watch(EACH_STEP) == []
    report, result = bench.run(run=2)
    assert report.error is None
    assert result is not None
