"""The GPUs of a request: ids, degrees, recipes and limits."""

from __future__ import annotations

import pytest

from modelpool.actors.control.job_qos import with_limited_gpus
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.comparison import left_open, repeated_gpus
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.specs.gang import ANY_GPUS
from modelpool.pool.values.specs.spec import JobId, Stage
from tests.actors.fakes import FakeCatalog

FIELDS = {"model": "shapes", "prompt": "a red circle", "seed": 1}


def cut(**fields: object):  # type: ignore[no-untyped-def]
    recipe, graph = build_graph(GenerateRequest.model_validate({**FIELDS, **fields}), JobId("job"), FakeCatalog())
    (task,) = [task for task in graph.job.tasks if task.stage is Stage.SAMPLE]
    return recipe, graph, task


def test_gpus_are_a_part_of_the_sampling_task_alone() -> None:
    """One GPU is no part of anything: its ids are what they were."""
    recipe, graph, plain = cut()
    assert cut(gpus=1)[2] == plain
    assert plain.degrees == (1,)
    assert "gpus" not in recipe.as_json()
    ids = {plain.task_id}
    for gpus, degrees, own in ((2, (2,), 2), ("2", (2,), 2), ("auto", (1, 2), ANY_GPUS)):
        recipe, shared, task = cut(gpus=gpus)
        assert (task.degrees, task.together, recipe.gpus) == (degrees, "", str(gpus))
        work = shared.works[task.task_id]
        assert isinstance(work, SampleParams)
        assert work.gpus == own
        ids.add(task.task_id)
        encodes = {each.task_id for each in graph.job.tasks if each.stage is Stage.ENCODE}
        assert encodes <= {each.task_id for each in shared.job.tasks}
        tasks = [{"stage": "sample", "gpus": [2]}]
        assert repeated_gpus(recipe, tasks) == (2 if gpus == "auto" else None), "verify repeats a number"
        (again, *_) = requests_of(recipe, lambda file: file)
        assert str(again.gpus) == str(gpus)
    assert len(ids) == 3


def test_outputs_of_auto_differ_where_other_numbers_of_gpus_were_used() -> None:
    """As the manifest lists them: a run may have had several, and a task that others do not share has none."""
    (auto, _, _), (two, _, _) = cut(gpus="auto"), cut(gpus=2)
    kept: dict[str, object] = {"stage": "sample", "gpus": []}
    for listed, now, said, number in (
        ([[2]], [[2]], (), 2),
        ([[1]], [[1]], (), None),  # 1 in a request is another computation
        ([[2, 1]], [[2, 1]], (), None),
        ([[2, 1], [2]], [[2], [2]], ("numbers of GPUs (2 then 1, 2; now 2, 2)",), None),
        ([[2], []], [[2], []], (), 2),
        ([[0, 2]], [[2]], ("numbers of GPUs, perhaps, which the scheduler chooses",), None),
        ([], [[2]], ("numbers of GPUs, perhaps, which the scheduler chooses",), None),
        ([["2"]], [[2]], ("numbers of GPUs, perhaps, which the scheduler chooses",), None),
    ):
        tasks, again = ([{**kept, "gpus": gpus} for gpus in each] for each in (listed, now))
        assert (left_open(auto, tasks, again), repeated_gpus(auto, tasks)) == (said, number), listed
        assert (left_open(two, tasks, again), repeated_gpus(two, tasks)) == ((), None)
    assert left_open(auto, None, ()), "an older manifest"


def test_what_no_gpus_can_share_is_refused_or_left_out() -> None:
    with pytest.raises(UserError, match="gpus: found 4, expected fewer: the tokens of this family"):
        cut(gpus=4)
    recipe, _, task = cut(gpus="auto", cfg=1.0)
    assert (task.degrees, recipe.gpus) == ((1,), ""), "auto takes one where one is possible"
    assert task == cut(cfg=1.0)[2]
    for wrong in (3, 0, "many", True, 2.5):
        with pytest.raises(ValueError, match="gpus"):
            cut(gpus=wrong)


def test_the_limit_of_a_pool_is_known_at_submission() -> None:
    _, graph, _ = cut(gpus="auto")
    assert with_limited_gpus(graph, 8) is graph
    limited = with_limited_gpus(graph, 1)
    assert {task.degrees for task in limited.job.tasks} == {(1,)}
    with pytest.raises(UserError, match="gpus: found 2, expected up to 1: `most_gpus`"):
        with_limited_gpus(cut(gpus=2)[1], 1)
