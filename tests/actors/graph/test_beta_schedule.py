"""Alpha and beta of the beta schedule: what they change, and where they are recorded."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.cli.models.recipe_table import recipe_facts
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe, RecipeNoise
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.sampling.schedules import levels_of, sd1_sigma_table
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import PAIR, FakeCatalog


def built(**fields: Any) -> tuple[Recipe, JobGraph]:
    request = GenerateRequest(**{"model": "shapes", "prompt": "p", "seed": 7, "schedule": "beta", **fields})
    return build_graph(request, JobId("job"), FakeCatalog())


def runs(graph: JobGraph) -> list[SampleParams]:
    return [stage for stage in graph.works.values() if isinstance(stage, SampleParams)]


def test_alpha_and_beta_move_the_levels_of_a_run() -> None:
    levels = {}
    even = {"beta_alpha": 1, "beta_beta": 1}
    for name, fields in (("usual", {}), ("low", {"beta_alpha": 0.3}), ("high", {"beta_beta": 0.3}), ("even", even)):
        (run,) = runs(built(**fields)[1])
        levels[name] = levels_of(run.schedule, sd1_sigma_table()).tolist()
    assert levels["low"][10] < levels["usual"][10] < levels["high"][10]
    assert levels["even"][10] == pytest.approx(sd1_sigma_table().sigma(499.5), rel=5e-3)


def test_both_experts_have_them() -> None:
    size = {"width": 64, "height": 64, "frames": 5, "steps": 8}
    high, low = runs(built(model=PAIR, beta_alpha=0.5, **size)[1])
    assert high.schedule.settings == low.schedule.settings == (("alpha", 0.5),)


def test_they_are_recorded_unless_they_are_the_usual_ones_and_come_back_as_a_request() -> None:
    plain, graph = built()
    usual, usual_graph = built(beta_alpha=0.6, beta_beta=0.6)
    assert (usual, usual_graph.job) == (plain, graph.job)
    assert "noise" not in plain.as_json()
    recipe, other = built(beta_alpha=0.5, beta_beta=2.0)
    assert recipe.noise == RecipeNoise(beta_alpha=0.5, beta_beta=2.0)
    assert recipe.digest != plain.digest
    assert other.job.wanted != graph.job.wanted
    assert recipe_from_text(recipe.to_json()) == recipe
    again = [build_graph(each, JobId("again"), FakeCatalog())[0].digest for each in requests_of(recipe, str)]
    assert again[0] == recipe.digest
    shown = dict(recipe_facts(recipe))["noise"]
    assert shown == "eta the sampler's, s_noise 1, s_churn 0, alpha of the schedule 0.5, beta of the schedule 2"
    assert built(beta_alpha=0.5)[0].as_json()["noise"] == {
        "eta": None, "s_noise": 1.0, "s_churn": 0.0, "beta_alpha": 0.5,
    }  # fmt: skip


def test_another_schedule_does_not_read_them_and_says_so() -> None:
    plain, graph = built(schedule="karras")
    recipe, other = built(schedule="karras", beta_alpha=0.5)
    assert (recipe.digest, other.job) == (plain.digest, graph.job)
    assert "beta_alpha 0.5: schedule Karras does not read it, schedule Beta does" in other.warnings
    _, listed = built(schedule=None, sigmas=(1.0, 0.5), beta_beta=0.5)
    assert "beta_beta 0.5: listed noise levels do not read it, schedule Beta does" in listed.warnings
    assert built()[1].warnings == built(beta_alpha=0.5)[1].warnings
    for value in (0, 11, "much"):
        with pytest.raises(UnusableField, match="beta_alpha: found"):
            built(beta_alpha=value)
