"""A LoRA that a model has only a part of is told: in the recipe, and once to whoever submits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import warnings

import pytest

from modelpool.actors.cli.models.recipe_table import recipe_facts
from modelpool.actors.client.client import PartialLora
from modelpool.actors.control.catalog_questions import BUILD_SOME
from modelpool.actors.control.catalog_service import CatalogService
from modelpool.actors.control.graph_shapes import BuiltRequest
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.auto_batch import USUAL_TERMS
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.specs.spec import JobId
from tests.actors.fake_fleet import InlineExecutor
from tests.actors.fakes import PARTIAL_LORA, FakeCatalog
from tests.actors.loop_connection import open_pool


def request(*loras: str, seed: int = 1) -> GenerateRequest:
    return GenerateRequest(model="shapes", prompt="a red circle", seed=seed, loras=[(name, 0.5) for name in loras])


def test_a_recipe_tells_what_is_not_used_and_keeps_its_digest() -> None:
    recipe, _ = build_graph(request("light", PARTIAL_LORA), JobId("a"), FakeCatalog())
    assert recipe.warnings == (f"LoRA {PARTIAL_LORA!r} on model 'shapes': 3 of 4 keys matched, not used: odd",)
    assert dataclasses.replace(recipe, warnings=()).digest == recipe.digest
    assert recipe_from_json(json.loads(json.dumps(recipe.as_json()))) == recipe


def test_a_recipe_from_before_there_were_warnings_is_read() -> None:
    recipe, _ = build_graph(request("light"), JobId("a"), FakeCatalog())
    assert recipe.warnings == ()
    fields = {name: value for name, value in recipe.as_json().items() if name != "warnings"}
    assert recipe_from_json(fields) == recipe


def test_a_recipe_tells_the_settings_of_the_pool_and_keeps_its_digest() -> None:
    service = CatalogService(FakeCatalog, InlineExecutor(), {"products": "auto"})
    (built,) = asyncio.run(service.ask(BUILD_SOME, [(JobId("a"), request("light"))], None, False, USUAL_TERMS))
    recipe, _ = build_graph(request("light"), JobId("a"), FakeCatalog())
    assert isinstance(built, BuiltRequest)
    assert built.recipe.computed_by == {"products": "auto"}
    assert built.recipe.digest == recipe.digest
    assert "computed_by" not in recipe.as_json()
    assert recipe_from_json(json.loads(json.dumps(built.recipe.as_json()))) == built.recipe
    assert ("pool products", "auto") in recipe_facts(built.recipe)


def test_whoever_submits_is_warned_once_and_told_where_from() -> None:
    with open_pool() as pool:
        with pytest.warns(PartialLora, match="3 of 4 keys matched") as caught:
            pool.submit([request(PARTIAL_LORA, seed=seed) for seed in range(3)]).wait(30)
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pool.submit(request("light")).wait(30)


def test_stages_by_themselves_warn_as_well() -> None:
    with open_pool() as pool, pytest.warns(PartialLora, match="3 of 4 keys matched") as caught:
        pool.encode("a red circle", model="shapes", loras=[(PARTIAL_LORA, 0.5)]).result(30)
    assert [warning.filename for warning in caught] == [__file__]
