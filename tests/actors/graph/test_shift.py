"""The shift of a flow model's noise levels: where a request may set it, and what it changes."""

from __future__ import annotations

from typing import Any

import pytest

from modelpool.actors.cli.models.recipe_table import recipe_facts
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.common.task_collector import JobGraph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.features.schedule_guidance import check_shift
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.http.a1111.a1111_parameters import fields_of_parameters
from modelpool.actors.outputs.image_file import parameters_text, parse_parameters
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.sampling_facts import NoiseFacts, NoiseKind, Prediction, SamplingFacts
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fakes import PAIR, SAMPLING, FakeCatalog

SIZE = {"width": 64, "height": 64, "frames": 5, "steps": 8}


def cut(**fields: Any) -> tuple[Recipe, JobGraph]:
    request = GenerateRequest(**{"model": PAIR, "prompt": "p", "seed": 7, **SIZE, **fields})
    return build_graph(request, JobId("job"), FakeCatalog())


def runs(job: JobGraph) -> list[SampleParams]:
    return [work for work in job.works.values() if isinstance(work, SampleParams)]


def test_a_shift_reaches_both_experts_and_moves_the_step_at_which_they_change() -> None:
    """A model with two experts changes at a noise level: with a larger shift, more steps are above it."""
    switches = {}
    for shift in (1.0, None, 40.0):
        high, low = runs(cut(shift=shift)[1])
        assert high.schedule.shift == low.schedule.shift == (shift or 0.0)
        assert high.schedule.switch == low.schedule.switch
        switches[shift] = high.schedule.switch
    assert switches[1.0] < switches[None] < switches[40.0]


def test_a_shift_is_part_of_the_recipe_unless_it_is_the_models_own() -> None:
    plain, job = cut()
    own = SAMPLING[PAIR].noise.shift
    same, same_job = cut(shift=own)
    assert (same, same_job.job) == (plain, job.job)
    recipe, _ = cut(shift=2.5)
    assert recipe.shift == 2.5
    assert "shift" not in plain.as_json()
    assert recipe.digest != plain.digest
    assert recipe_from_json(recipe.as_json()) == recipe
    assert ("shift", "2.5") in recipe_facts(recipe)
    again = [build_graph(each, JobId("again"), FakeCatalog())[0] for each in requests_of(recipe, str)]
    assert recipe.digest in [each.digest for each in again]
    text = parameters_text(recipe)
    assert "Shift: 2.5" in text
    assert fields_of_parameters(parse_parameters(text)).fields["shift"] == 2.5


def test_models_without_a_shift_refuse_it_and_say_why() -> None:
    with pytest.raises(UnusableField, match=r"shift: found 3\.0, not supported by model 'shapes', which predicts no"):
        cut(model="shapes", frames=None, shift=3)
    request = GenerateRequest(model="m", prompt="p", shift=3)
    ratios = SamplingFacts(Prediction.FLOW, noise=NoiseFacts(NoiseKind.FLOW, 0.002, 80.0))
    with pytest.raises(UnusableField, match="which was trained with levels of its own"):
        check_shift(request, ratios)
    for kind in NoiseKind:
        takes = kind in (NoiseKind.FLOW, NoiseKind.COSINE)
        assert NoiseFacts(kind).takes_shift == takes
    for value in (0, -1, 1000, "much"):
        with pytest.raises(UnusableField, match="shift: found"):
            GenerateRequest(model="m", prompt="p", shift=value)


def test_a_shift_beside_listed_levels_is_warned_of() -> None:
    _, job = cut(shift=2.5, sigmas=(1.0, 0.5), steps=2)
    assert "shift 2.5: it does not change the noise levels, which the request lists" in job.warnings
