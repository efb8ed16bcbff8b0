"""`Interrupting`: an engine that stops sampling runs after each step, and resumes them from bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace

from modelpool.actors.worker.gpu_worker import WorkerEngine
from modelpool.pool.values.core.stage_params import (
    BatchMember,
    Outcome,
    Result,
    RunHooks,
    RunState,
    SampleParams,
    StageParams,
)
from modelpool.pool.values.specs.spec import ComponentKey, RunCost, TaskSpec


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
        inputs: Mapping[str, Result],
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
