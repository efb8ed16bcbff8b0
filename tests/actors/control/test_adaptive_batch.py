"""`batch = "adaptive"` in the controller.

Proves: recipe, tasks and ids equal those of a request with the chosen number; few requests have 1 and many the size
that pays; a request that comes again keeps its size; measured run times decide, where there are some; what cannot join
passes has 1; all other requests are as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from modelpool.actors.control.adaptive_batch import AdaptiveBatches
from modelpool.actors.control.build_requests import build_requests
from modelpool.actors.control.graph_shapes import BuiltRequest, GraphShapes
from modelpool.actors.control.question_turns import QuestionTurns
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS, BatchTerms
from modelpool.actors.graph.features.recorded_batches import output_keys
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.batch_gains import MeasuredGain
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.specs.spec import JobId, Stage, WorkerId, WorkerSpec
from modelpool.scheduler.core.state import SchedulerState
from modelpool.scheduler.model.config import SchedulerConfig
from modelpool.scheduler.model.messages import WorkersWanted, WorkerUp
from modelpool.scheduler.model.run_kinds import size_class
from tests.actors.fakes import FakeCatalog

GAIN = MeasuredGain(frozenset({"a"}), frozenset({"cpu"}), "card", 128, 1000, {2: 1.5, 4: 2.0, 8: 2.5}, "here")


class Catalog(FakeCatalog):
    """Of a model for which batches were measured; each sampling takes a second alone."""

    gains = (GAIN,)

    def __init__(self) -> None:
        self._shapes = GraphShapes()

    async def ask(
        self,
        question: object,
        wanted: Sequence[tuple[JobId, GenerateRequest]],
        capacity_bytes: int | None,
        until_error: bool,
        batches: BatchTerms = USUAL_TERMS,
    ) -> list[BuiltRequest | UserError]:
        return [self._built(job_id, one, batches) for job_id, one in wanted]

    def _built(self, job_id: JobId, wanted: GenerateRequest, batches: BatchTerms) -> BuiltRequest:
        number = self._shapes.number(wanted)
        found = self._shapes.derived(number, wanted, job_id)  # a graph takes long
        if found is None:
            found = self._timed(BuiltRequest(*build_graph(wanted, job_id, self, batches)))
            self._shapes.note(number, found)
        return found

    def _timed(self, built: BuiltRequest) -> BuiltRequest:
        seconds = {Stage.ENCODE: 0.0, Stage.SAMPLE: 1.0, Stage.DECODE: 0.0}
        tasks = tuple(
            replace(task, run_seconds=seconds[task.stage] * task.batch_size) for task in built.graph.job.tasks
        )
        return BuiltRequest(built.recipe, replace(built.graph, job=replace(built.graph.job, tasks=tasks)))


class Controller:
    """Takes requests at given times, with one worker."""

    def __init__(self, joins: bool = True) -> None:
        self.state = SchedulerState(SchedulerConfig(joins=joins))
        self.state.handle(WorkersWanted(0.0, (WorkerId("a"),)))
        self.state.handle(WorkerUp(0.0, WorkerSpec(WorkerId("a"), 1, 1 << 30, 1e9, "card")))
        self.sizes, self.catalog, self.count = AdaptiveBatches(self.state), Catalog(), 0

    def take(self, at: float, *requests: GenerateRequest) -> list[BuiltRequest]:
        self.count += 1
        wanted = [(JobId(f"j-{self.count}-{place}"), one) for place, one in enumerate(requests)]

        async def taken() -> list[BuiltRequest | UserError]:
            turns = QuestionTurns()
            built = await build_requests(self.catalog, wanted, None, turns=turns)
            return await self.sizes.sized(wanted, built, self.catalog, None, turns, "", at)

        found = asyncio.run(taken())
        assert all(isinstance(one, BuiltRequest) for one in found)
        return [one for one in found if isinstance(one, BuiltRequest)]

    def take_each(self, apart: float, count: int, begin: float = 0.0, **fields: object) -> list[BuiltRequest]:
        return [self.take(begin + apart * n, request(seed=1 + self.count, **fields))[0] for n in range(count)]


def request(seed: int = 1, **fields: object) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {"model": "shapes", "prompt": "a", "seed": seed, "batch": "adaptive", **fields}
    )


def sizes(found: Sequence[BuiltRequest]) -> list[int]:
    return [one.recipe.batch or 1 for one in found]


def test_the_recipe_and_the_tasks_are_those_of_the_number() -> None:
    controller = Controller()
    few, many = controller.take_each(9.0, 20), controller.take_each(0.7, 60, 200.0)
    assert (set(sizes(few)), set(sizes(many[-20:]))) == ({1}, {8})
    for one in (few[-1], many[-1]):
        number = one.recipe.batch or 1
        recipe, graph = build_graph(request(one.recipe.seed, batch=number), one.graph.job.job_id, Catalog())
        assert one.recipe.digest == recipe.digest
        assert [task.task_id for task in one.graph.job.tasks] == [task.task_id for task in graph.job.tasks]
        assert one.recipe.batch_reason == one.graph.job.batch_reason
        assert one.recipe.batch_reason.startswith("by the load")


def test_a_request_that_comes_again_keeps_its_size() -> None:
    """It was withdrawn, or its output was lost. Its load has no effect, either."""
    controller = Controller()
    many = controller.take_each(0.7, 60)
    again = controller.take(900.0, request(many[-1].recipe.seed), request(many[0].recipe.seed))
    assert sizes(again) == [8, 1]


def test_an_output_of_any_size_is_as_good_for_a_submission_that_is_resumed() -> None:
    (one,) = Controller().take(0.0, request())
    (larger,) = Controller().take(0.0, request(batch=8))
    keys = output_keys(request(), one.recipe, (1, 8))
    assert output_keys(request(batch=8), larger.recipe, ())[0] in keys


def test_measured_run_times_decide_where_there_are_some() -> None:
    """Passes of eight are measured to take as long as eight single ones: they serve no more requests."""
    controller = Controller()
    (eight,) = controller.take(0.0, request(batch=8))
    kinds = controller.state.costs.run_kinds
    for task in eight.graph.job.tasks:
        if task.stage is Stage.SAMPLE:
            components = tuple(use.component for use in task.uses)
            kinds.learn(kinds.kind(task.stage, components), "card", size_class(task), 1.0)
            alone = replace(task, activation_bytes=task.activation_bytes // 8)
            kinds.learn(kinds.kind(task.stage, components), "card", size_class(alone), 1.0)
    assert set(sizes(controller.take_each(1.1, 60))[30:]) == {1}
    assert set(sizes(Controller().take_each(1.1, 60))[30:]) == {8}


@pytest.mark.parametrize(
    ("fields", "joins", "reason"),
    [
        ({}, False, "nothing joins"),
        ({"sampler": "dpm_adaptive"}, True, "the steps of sampler"),
        ({"width": 512, "height": 512}, True, "no gain of batches is measured"),
    ],
)
def test_what_has_no_use_of_passes_has_1(fields: dict[str, object], joins: bool, reason: str) -> None:
    found = Controller(joins).take_each(0.3, 30, **fields)
    assert set(sizes(found)) == {1}
    assert reason in found[-1].recipe.batch_reason


def test_other_requests_are_as_they_were() -> None:
    controller = Controller()
    controller.take_each(0.3, 30)
    for number in (1, 4, "auto"):
        (found,) = controller.take(10.0, request(batch=number))
        assert (
            found == asyncio.run(Catalog().ask(None, [(found.graph.job.job_id, request(batch=number))], None, False))[0]
        )


def test_a_word_is_one_of_two() -> None:
    assert request(batch=" Adaptive ").batch == "adaptive"
    with pytest.raises(ValueError, match='a whole number from 1 to 64, or "auto", or "adaptive"'):
        request(batch="by load")
