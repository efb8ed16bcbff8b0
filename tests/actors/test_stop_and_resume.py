"""A pool moves a sampling run to another worker, and resumes it there: its pixels are those of a run that stayed.

`tests.actors.test_unchanged_outputs` stops and resumes every kind of run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.losses import Loss
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.worker.gpu_worker import WorkerEngine
from modelpool.pool.values.core.stage_params import (
    Result,
    RunHooks,
    SampleParams,
    StageParams,
)
from modelpool.pool.values.specs.spec import RunCost, TaskSpec, WorkerId
from modelpool.scheduler.model.messages import Command, Event, RunTask, WorkersWanted
from tests.actors.loop_connection import LoopConnection
from tests.actors.unchanged_outputs import (
    ROOT,
)


class Gated:
    """An engine whose sampling runs wait after a step until they are let on, once."""

    def __init__(self, engine: WorkerEngine, step: int, reached: threading.Event, gate: threading.Event) -> None:
        self._engine, self._step, self._reached, self._gate = engine, step, reached, gate
        for name in ("introduce", "residency", "close", "run_batch"):
            setattr(self, name, getattr(engine, name))

    def run(
        self, task: TaskSpec, work: StageParams, inputs: tuple[Result, ...], hooks: RunHooks, *more: Any, **others: Any
    ) -> tuple[Result, RunCost]:
        def on_step(step: int, steps: int) -> None:
            hooks.on_step(step, steps)
            if step == self._step and isinstance(work, SampleParams) and not self._reached.is_set():
                self._reached.set()
                assert self._gate.wait(60.0)

        return self._engine.run(task, work, inputs, replace(hooks, on_step=on_step), *more, **others)


class MovedRun:
    """A pool of two workers on the shipped model, one of which is at the third of `STEPS` steps of a run."""

    STEPS = 8

    def __init__(
        self, sampler: str, checkpoint_seconds: float | None = None, checkpoint_folder: Path | None = None
    ) -> None:
        torch.set_num_threads(1)
        self.reached, self.gate, self.engines = threading.Event(), threading.Event(), list[WorkerEngine]()
        config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(workers=2, device="cpu")
        plan = plan_pool(config, gpu_count=0, can_grow=False)

        def make_engine() -> WorkerEngine:
            self.engines.append(Gated(plan.open_engine(), 3, self.reached, self.gate))  # type: ignore[arg-type]
            return self.engines[-1]

        self.line = LoopConnection(
            2,
            make_engine,
            plan.open_catalog,
            plan.scheduler,
            plan.budget_bytes,
            checkpoint_seconds=checkpoint_seconds,
            checkpoint_folders=(None, checkpoint_folder),
        )
        self.commands = list[Command]()
        handled = self.line.controller._dispatcher._on_handled
        self.line.controller._dispatcher._on_handled = lambda event, commands: (
            self.commands.extend(commands),
            handled(event, commands),
        )
        self.pool = ModelPool(self.line, self._close, None)
        request = {"model": "shapes", "prompt": "a red circle", "seed": 5, "sampler": sampler, "steps": self.STEPS}
        self.jobs = self.pool.submit([GenerateRequest.model_validate(request)], output=False)
        assert self.reached.wait(60.0)
        (worker,) = [
            worker for worker in self.line.controller._state.worker_table.workers.values() if worker.task_id is not None
        ]
        self.worker = worker
        self.other = next(w for w in ("gpu-0", "gpu-1") if w != worker.worker_id)

    def _close(self) -> None:
        self.gate.set()
        self.line.end()
        for thread in self.line.fleet.threads:  # a lost worker computes its step to the end
            thread.shutdown(wait=True)
        for engine in self.engines:
            engine.close()

    def kept_step(self) -> int:
        """Wait until the controller has a state of the run; return its step."""
        task = self.line.controller._state.demand.tasks[self.worker.task_id]  # type: ignore[index]
        until = time.monotonic() + 60.0
        while task.kept is None:
            assert time.monotonic() < until, "no state arrived"
            time.sleep(0.001)
        assert task.kept.steps == self.STEPS
        return task.kept.step

    def do(self, what: Callable[[Controller], None]) -> None:
        """In the controller."""

        async def ask(controller: Controller) -> None:
            what(controller)

        self.line.call(ask)

    def post(self, event: Callable[[float], Event]) -> None:
        self.do(lambda controller: controller._dispatcher.post(event(controller._dispatcher.now)))

    def pixels(self) -> bytes:
        images = list(self.jobs.images())
        assert self.jobs.failures == ()
        return images[0].pixels.tobytes()

    def runs(self) -> list[tuple[str, bool]]:
        """Where the sampling task ran, and whether it resumed there."""
        name = next(c.task_id for c in self.commands if isinstance(c, RunTask) and c.task_id.startswith("sample"))
        return [(c.worker_id, c.resume) for c in self.commands if isinstance(c, RunTask) and c.task_id == name]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, bytes]:
    found = {}
    for sampler in ("euler_a", "uni_pc"):
        with opened(MovedRun(sampler)) as moved:
            moved.gate.set()
            found[sampler] = moved.pixels()
            assert len(moved.runs()) == 1
    return found


@contextmanager
def opened(moved: MovedRun) -> Iterator[MovedRun]:
    with moved.pool:
        yield moved


@pytest.mark.parametrize("sampler", ["euler_a", "uni_pc"])
def test_a_pool_moves_a_run_to_another_worker(sampler: str, undisturbed: dict[str, bytes]) -> None:
    """Its steps are counted on, and its pixels are those of a run that stayed."""
    with opened(MovedRun(sampler)) as moved:
        state = moved.line.controller._state
        moved.do(lambda controller: state.preemption.pause(moved.worker, "for a test", state.at))
        moved.post(lambda at: WorkersWanted(at, (WorkerId(moved.other),)))
        steps = list[tuple[int, int]]()
        done = moved.line.controller._dispatcher.step_done
        moved.line.controller._dispatcher.step_done = lambda step: (  # type: ignore[method-assign]
            steps.append((step.step, step.steps)),
            done(step),
        )[1]
        moved.gate.set()
        assert moved.pixels() == undisturbed[sampler]
        assert moved.runs() == [(moved.worker.worker_id, False), (moved.other, True)]
        assert [step for step in steps if step[1] == moved.STEPS] == [(n, moved.STEPS) for n in range(4, moved.STEPS)]
        assert not any(entry.state for entry in moved.line.controller._tasks._entries.values())


def test_a_run_resumes_from_its_checkpoint_when_its_worker_is_lost(undisturbed: dict[str, bytes]) -> None:
    with opened(MovedRun("uni_pc", 0.0)) as moved:
        worker_id = WorkerId(moved.worker.worker_id)
        assert 1 <= moved.kept_step() <= 2, "the state after an earlier step"
        moved.do(lambda controller: controller._dispatcher.workers.lose(worker_id, 1, Loss("it was pulled out")))
        assert moved.pixels() == undisturbed["uni_pc"]
        assert moved.runs()[1][1], "it began anew"
        moved.gate.set()


def test_a_lost_state_costs_time_only(undisturbed: dict[str, bytes]) -> None:
    with opened(MovedRun("uni_pc", 0.0)) as moved:
        worker_id = WorkerId(moved.worker.worker_id)
        assert moved.kept_step()
        name = moved.worker.task_id
        assert name is not None

        def lose(controller: Controller) -> None:
            controller._tasks._entries[name].state.lost = True  # type: ignore[union-attr]
            controller._dispatcher.workers.lose(worker_id, 1, Loss("it was pulled out"))

        moved.do(lose)
        assert moved.pixels() == undisturbed["uni_pc"]
        assert [resume for _, resume in moved.runs()] == [False, True, False]
        moved.gate.set()


def test_a_run_resumes_from_its_file_when_its_whole_pool_is_gone(undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """Another pool, with the folder of the first one's controller, begins after the step that was saved."""

    def saved(moved: MovedRun) -> list[int]:
        moved.line.flush_checkpoints()
        archive = moved.line.controller._states.archive._disk
        assert archive is not None
        return list(archive.folder.steps().values())

    with opened(MovedRun("uni_pc", 0.0, tmp_path)) as moved:
        (step,) = saved(moved)
    with opened(MovedRun("uni_pc", 0.0, tmp_path)) as again:
        again.gate.set()
        (image,) = again.jobs.images()
        assert image.pixels.tobytes() == undisturbed["uni_pc"]
        assert [task.resumed for task in image.tasks if task.resumed] == [f"after step {step} of {again.STEPS}"]
        assert saved(again) == [], "it succeeded"
