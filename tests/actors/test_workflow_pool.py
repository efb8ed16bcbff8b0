"""Workflows in a pool with real engines and tiny models: their outputs are the outputs of single steps that one engine
runs one by one, with 1 and with 3 workers, and what was computed once is not computed again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from modelpool import GenerateRequest, ModelPool, PoolConfig
from modelpool.actors.control.pool_plan import plan_pool
from modelpool.actors.graph.build_graph import build_graph
from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.graph.recipe_request import requests_of
from modelpool.actors.outputs.recipe_json import recipe_from_text
from modelpool.pool.inference.operations.operate import OPERATIONS
from modelpool.pool.values.specs.spec import JobId, Stage
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fake_fleet import Desk, settle
from tests.actors.fakes import FakeCatalog, image_of
from tests.actors.golden_steps import SEED, SIDE, STEPS, Steps, pixels_of, write_models
from tests.actors.golden_workflows import (
    CHAINS,
    GOLDENS,
    GROUPS,
    SAME_OUTPUT,
    Golden,
    decoding,
    encoding,
    operation,
    sampling,
)
from tests.actors.loop_connection import open_real_pool

#: operations that other tests render: of models that sample audio with frames (`test_rendered_ltx`), of squares
#: (`test_comfy_adapter_nodes`), and of first frames (`test_kandinsky5_from_images`, `test_operations`)
RENDERED_ELSEWHERE = {
    *("latent_sound_track", "image_crop_square", "latent_replace_frames", "latent_normalize_start"),
    "image_scale_to_cells",
}
CONFIG = Path(__file__).parents[2] / "configs" / "laptop.toml"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PoolConfig:
    folder = tmp_path_factory.mktemp("golden") / "models"
    write_models(folder)
    return PoolConfig.load(CONFIG).override(device="cpu", models=[folder], loras=[folder / "loras"])


@pytest.fixture(scope="module")
def steps(config: PoolConfig) -> Iterator[Steps]:
    plan = plan_pool(config.override(workers=1), gpu_count=0, can_grow=False)
    engine: Any = plan.open_engine()
    with closing(engine):
        yield Steps(engine, plan.open_catalog())


@pytest.mark.rotates
@pytest.mark.parametrize("group", GROUPS)
def test_a_workflow_makes_what_its_steps_make_one_by_one(group: str, config: PoolConfig, steps: Steps) -> None:
    """With 1 worker and with 3. Again, nothing is computed; recipes describe the outputs, and lead to them."""
    goldens = GROUPS[group]
    expected = {name: golden.by_hand(steps) for name, golden in goldens.items()}
    equal = [name for name in SAME_OUTPUT if name in goldens]
    assert len({pixels_of(each).tobytes() for each in expected.values()}) == len(goldens) - len(equal)
    for workers in (1, 3):
        with open_real_pool(config.override(workers=workers)) as pool:
            check_outputs(pool, goldens, expected)


def check_outputs(pool: ModelPool, goldens: Mapping[str, Golden], expected: Mapping[str, Any]) -> None:
    """Check the outputs of workflows and their recipes, and that nothing is computed again."""
    names, wanted = list(goldens), [golden.request for golden in goldens.values()]
    jobs = pool.submit(wanted, output=False)
    for result in jobs.results():
        name, recipe = names[result.index], getattr(result, "recipe", None)
        assert recipe is not None, f"{name}: {result}"
        np.testing.assert_array_equal(pixels_of(result), pixels_of(expected[name]), err_msg=name)
        heard, sound = (getattr(each, "sound", None) for each in (result, expected[name]))
        np.testing.assert_array_equal(*(None if each is None else each.samples_SC for each in (heard, sound)))
        assert extent_of(result, expected[name]) == (recipe.width, recipe.height, recipe.frames, recipe.frame_rate), (
            name
        )
        check_recipe(pool, recipe)
    again = list(pool.submit(wanted, output=False).results())
    assert all(task.shared for result in again for task in result.tasks), "nothing is computed again"


def extent_of(result: Any, expected: Any) -> tuple[int, int, int, float]:
    """Width, height, frames and frame rate of an output."""
    rate = getattr(expected, "frame_rate", 0.0)
    assert getattr(result, "frame_rate", 0.0) == rate
    *frames, high, wide, _ = (1, 0, 0, 0) if pixels_of(result).ndim == 2 else pixels_of(result).shape
    return wide, high, frames[0] if rate else 0, rate


def test_golden_workflows_have_every_operation_and_every_stage(config: PoolConfig) -> None:
    """And many of them, so that features meet."""
    assert len(GOLDENS) >= 40
    nodes = [node for golden in GOLDENS.values() for node in golden.nodes.values()]
    assert {node["name"] for node in nodes if node["kind"] == "operation"} == set(OPERATIONS) - RENDERED_ELSEWHERE
    with open_real_pool(config.override(workers=1)) as pool:
        digests = {name: pool.recipe(golden.request).digest for name, golden in GOLDENS.items()}
    assert len(set(digests.values())) == len(digests)
    assert {node["kind"] for node in nodes} == {
        *("text", "image", "mask", "encode", "sample", "decode", "upscale", "operation")
    }


PASSES = GenerateRequest(
    model="one",
    prompt="a cat",
    steps=STEPS,
    cfg=4.0,
    sampler="euler",
    schedule="normal",
    width=SIDE,
    height=SIDE,
    seed=SEED,
    passes=[{"model": "two", "scale": 1.5, "via": "latent", "strength": 0.5}],
)


def test_passes_are_the_work_of_their_nodes(config: PoolConfig) -> None:
    with open_real_pool(config.override(workers=1)) as pool:
        (scaled,) = pool.submit([CHAINS["the latent is scaled in the middle"].request], output=False).images()
        (passed,) = pool.submit([PASSES], output=False).images()
        assert all(task.shared for task in passed.tasks)
        np.testing.assert_array_equal(scaled.pixels, passed.pixels)
        check_recipe(pool, passed.recipe)


def check_recipe(pool: ModelPool, recipe: Recipe) -> None:
    """The request that a recipe leads to, read from its text, has the same recipe: not with images from memory."""
    read = recipe_from_text(recipe.to_json())
    assert read == recipe
    if recipe.workflow is not None and recipe.workflow.images:
        return
    (request,) = requests_of(read, lambda name: name)
    assert pool.recipe(request).digest == recipe.digest


def request_of(nodes: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest(workflow={"nodes": nodes, "output": "d"}, seed=SEED)


def test_a_worker_that_dies_in_the_middle_leaves_the_output_as_it_is() -> None:
    """With fake engines: what it held is computed again, and everything else once."""
    nodes = {
        "s": sampling("shapes"),
        "e": decoding("s", "shapes"),
        "i": operation("image_invert", image="e"),
        "x": encoding("i", "shapes"),
        "b": sampling("forms", "x", strength=0.5),
        "d": decoding("b", "forms"),
    }
    _, graph = build_graph(request_of(nodes), JobId("x"), FakeCatalog())
    expected: Any = image_of(dict(graph.works), graph.job.tasks)

    async def talk() -> None:
        for stage in (Stage.SAMPLE, Stage.DECODE, Stage.OPERATE):
            desk = await Desk(3).open()
            await desk.submit(request_of(nodes))
            while desk.fleet.running[0].request.task.stage is not stage:
                await desk.finish(*desk.fleet.running)
            (running,) = desk.fleet.running
            for result in running.inputs:
                result.lost = True
            desk.fleet.kill(running.worker_id)
            await settle()
            (ended,) = await desk.run_dry()
            assert ended.outcome is Outcome.SUCCEEDED
            np.testing.assert_array_equal(ended.result.value.pixels_HWC, expected.pixels_HWC)

    asyncio.run(talk())
