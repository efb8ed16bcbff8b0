"""A sampling run that stops after a step and resumes in another process is the same run, for everything that a request
may ask for."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.control.controller import Controller
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.worker.gpu_worker import WorkerEngine
from modelpool.pool.core.stage_params import (
    BatchMember,
    Outcome,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    StageParams,
)
from modelpool.pool.specs.spec import ComponentKey, RunCost, TaskSpec, WorkerId
from modelpool.scheduler.tables.config import SchedulerConfig
from modelpool.scheduler.tables.messages import Command, Event, RunTask, WorkersWanted
from tests.actors.loop_connection import LoopConnection
from tests.actors.unchanged_outputs import (
    ROOT,
    digest_of,
    load_record,
    run_requests,
    write_inputs,
    write_models,
)


class Interrupting:
    """An engine that stops each sampling run after every `every` steps, and resumes it from bytes."""

    def __init__(self, engine: WorkerEngine, every: int) -> None:
        self._engine = engine
        self._every = every
        #: the step at which each run stopped, and its steps
        self.stops: list[tuple[int, int]] = []
        #: every sampling task that it ran
        self.tasks: list[SampleParams] = []
        for name in ("introduce", "residency", "close"):
            setattr(self, name, getattr(engine, name))

    def run(
        self,
        task: TaskSpec,
        work: StageParams,
        inputs: tuple[Result, ...],
        hooks: RunHooks,
        fresh: bool = False,
        needed_next: tuple[ComponentKey, ...] = (),
        resume: RunState | None = None,
    ) -> tuple[Result, RunCost]:
        if isinstance(work, SampleParams):
            self.tasks.append(work)
        while True:
            result, cost = self._engine.run(task, work, inputs, self._hooks(hooks, resume), fresh, needed_next, resume)
            if not isinstance(result, RunState):
                return result, cost
            resume = self._passed_on(result)

    def run_batch(
        self, members: Sequence[BatchMember], needed_next: tuple[ComponentKey, ...] = ()
    ) -> tuple[Outcome, ...]:
        self.tasks += [member.work for member in members if isinstance(member.work, SampleParams)]
        outcomes: dict[int, Outcome] = {}
        places = list(range(len(members)))
        while places:
            stopping = [replace(members[p], hooks=self._hooks(members[p].hooks, members[p].resume)) for p in places]
            outcomes |= zip(places, self._engine.run_batch(stopping, needed_next), strict=True)
            places = [place for place in places if isinstance(self._result(outcomes[place]), RunState)]
            members = [
                replace(member, resume=self._passed_on(self._result(outcomes[place]))) if place in places else member
                for place, member in enumerate(members)
            ]
        return tuple(outcomes[place] for place in range(len(members)))

    def _result(self, outcome: Outcome) -> Result | None:
        return None if isinstance(outcome, Exception) else outcome[0]

    def _passed_on(self, state: Result | None) -> RunState:
        assert isinstance(state, RunState)
        self.stops.append((state.step, state.steps))
        arrived: RunState = pickle.loads(pickle.dumps(state))
        return arrived

    def _hooks(self, hooks: RunHooks, resume: RunState | None) -> RunHooks:
        """Stop after `every` more steps."""
        end, done = (0 if resume is None else resume.step) + self._every, 0

        def on_step(step: int, steps: int) -> None:
            nonlocal done
            done = step
            hooks.on_step(step, steps)

        return replace(hooks, on_step=on_step, should_pause=lambda: done >= end)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
def test_every_kind_of_run_stops_and_resumes_at_every_step(tmp_path: Path) -> None:
    """All samplers, models, inputs, batches and divisions of the recorded outputs: pixels are equal to those without
    interruptions."""
    write_models(tmp_path / "models")
    write_inputs(tmp_path / "inputs")
    outputs = load_record()["outputs"]
    expected = dict(run_requests(tmp_path, outputs))
    engines: list[Interrupting] = []

    def wrap(engine: WorkerEngine) -> WorkerEngine:
        engines.append(Interrupting(engine, every=1))
        return engines[-1]  # type: ignore[return-value]

    made = dict(run_requests(tmp_path, outputs, wrap))
    other = [name for name, found in expected.items() if not _equal(made[name], found)]
    # those recorded as depending on what shared a run with them may share it with others here
    assert set(other) <= {output["id"] for output in outputs if not output["exact"]}
    stops = [stop for engine in engines for stop in engine.stops]
    works = [work for engine in engines for work in engine.tasks]
    assert len(stops) == sum(work.steps_run - 1 for work in works) > len(outputs)


def _equal(one: np.ndarray | str, other: np.ndarray | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return digest_of(one) == digest_of(other)


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

    def __init__(self, sampler: str, scheduler: SchedulerConfig | None = None) -> None:
        torch.set_num_threads(1)
        self.reached, self.gate, self.engines = threading.Event(), threading.Event(), list[WorkerEngine]()
        config = PoolConfig.load(ROOT / "configs" / "laptop.toml").override(workers=2, device="cpu")
        plan = plan_pool(config, gpu_count=0, can_grow=False)

        def make_engine() -> WorkerEngine:
            self.engines.append(Gated(plan.open_engine(), 3, self.reached, self.gate))  # type: ignore[arg-type]
            return self.engines[-1]

        self.line = LoopConnection(2, make_engine, plan.open_catalog, scheduler or plan.scheduler, plan.budget_bytes)
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
        for engine in self.engines:
            engine.close()

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
    with opened(MovedRun("uni_pc", SchedulerConfig(checkpoint_seconds=0.0))) as moved:
        state, worker_id = moved.line.controller._state, WorkerId(moved.worker.worker_id)
        task = state.demand.tasks[moved.worker.task_id]  # type: ignore[index]
        assert task.kept is not None
        assert (task.kept.step, task.kept.steps) == (2, moved.STEPS), "the state after the step before"
        moved.do(lambda controller: controller._dispatcher._lose(worker_id, 1, "it was pulled out"))
        assert moved.pixels() == undisturbed["uni_pc"]
        assert moved.runs()[1][1], "it began anew"
        moved.gate.set()


def test_a_lost_state_costs_time_only(undisturbed: dict[str, bytes]) -> None:
    with opened(MovedRun("uni_pc", SchedulerConfig(checkpoint_seconds=0.0))) as moved:
        worker_id = WorkerId(moved.worker.worker_id)
        name = moved.worker.task_id
        assert name is not None

        def lose(controller: Controller) -> None:
            controller._tasks._entries[name].state.lost = True  # type: ignore[union-attr]
            controller._dispatcher._lose(worker_id, 1, "it was pulled out")

        moved.do(lose)
        assert moved.pixels() == undisturbed["uni_pc"]
        assert [resume for _, resume in moved.runs()] == [False, True, False]
        moved.gate.set()
