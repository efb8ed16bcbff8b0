"""Workflows in a pool with real engines and tiny models: their outputs are those of single steps that one engine runs
one by one, with 1 and with 3 workers, and what was computed once is not computed again."""

from __future__ import annotations

import asyncio
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
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine
from modelpool.pool.inference.operations.operate import operation_named
from modelpool.pool.values.core.stage_params import (
    DecodeParams,
    EncodeImageParams,
    EncodeParams,
    GuidanceParams,
    ImagePixels,
    Mask,
    MaskCondition,
    OutputShape,
    Result,
    SampleParams,
    SamplingSchedule,
    StageParams,
    StartCondition,
    StepPart,
    roles_of,
    stage_of,
    task_id,
)
from modelpool.pool.values.specs.spec import JobId, Stage, TaskSpec
from modelpool.scheduler.model.messages import Outcome
from tests.actors.fake_fleet import Desk, settle
from tests.actors.fakes import FakeCatalog, image_of
from tests.actors.loop_connection import open_real_pool
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.pipeline import QUIET

CONFIG = Path(__file__).parents[2] / "configs" / "laptop.toml"
SIDE, STEPS, SEED = 64, 4, 7


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> PoolConfig:
    folder = tmp_path_factory.mktemp("models")
    for seed, (name, layout) in enumerate(
        {"one": layouts.tiny_sd1, "two": layouts.tiny_sd1, "xl": layouts.tiny_sdxl}.items()
    ):
        write_tiny_checkpoint(folder / f"{name}.safetensors", seed, layout=layout())
    return PoolConfig.load(CONFIG).override(device="cpu", models=[folder])


class Steps:
    """Single steps on one engine."""

    def __init__(self, engine: Engine, catalog: Catalog) -> None:
        self.engine, self.catalog = engine, catalog

    def text(self, prompt: str, model: str = "one", is_negative: bool = False) -> Result:
        return self.run(EncodeParams(self.catalog.find_model(model), (), prompt, is_negative=is_negative))

    def sample(
        self, model: str = "one", side: int = SIDE, first: int = 0, part: StepPart | None = None, **read: Result
    ) -> Result:
        starts = (StartCondition(),) if "start" in read else ()
        masks = (MaskCondition(),) if "mask" in read else ()
        schedule = SamplingSchedule(STEPS, "euler", "normal", first)
        work = SampleParams(
            self.catalog.find_model(model), (), OutputShape(side, side), schedule, GuidanceParams(4.0), SEED,
            (*starts, *masks), part=part,
        )  # fmt: skip
        texts = {"positive": self.text("a cat", model), "negative": self.text("", model, is_negative=True)}
        return self.run(work, **{**texts, **read})

    def decode(self, latent: Result, model: str = "one", side: int = SIDE) -> Result:
        return self.run(DecodeParams(self.catalog.find_model(model), OutputShape(side, side)), latent=latent)

    def encode(self, image: Result, model: str = "one", side: int = SIDE) -> Result:
        return self.run(EncodeImageParams(self.catalog.find_model(model), side, side), image=image)

    def change(self, name: str, settings: dict[str, Any] | None = None, **read: Result) -> Result:
        operation = operation_named(name)
        return operation(operation.params_of(settings or {}), read)

    def run(self, work: StageParams, **read: Result) -> Result:
        model: Any = work
        count = len(self.engine._opened(model.model).checkpoint.family.text_encoders)
        roles = roles_of(work, count if isinstance(work, EncodeParams) else 1)
        uses = tuple(self.catalog.use(model.model, role, (), STEPS) for role in roles)
        activation_bytes = self.catalog.figures.activation_bytes(model.model, model)
        task = TaskSpec(task_id(work, {}), stage_of(work), uses, activation_bytes, 0.1)
        return self.engine.run(task, work, read, QUIET)[0]


def sampling(model: str = "one", latent: str = "", mask: str = "", **fields: Any) -> dict[str, Any]:
    texts = {"prompt": "a cat"} if "inputs" not in fields else {}
    size = {} if latent else {"width": SIDE, "height": SIDE}
    inputs = {name: node for name, node in (("latent", latent), ("mask", mask)) if node}
    request = {"model": model, **texts, "steps": STEPS, "cfg": 4.0, "sampler": "euler", "schedule": "normal", **size}
    return {"kind": "sample", "request": request, **fields, "inputs": {**inputs, **fields.get("inputs", {})}}


def decoding(latent: str, model: str = "one") -> dict[str, Any]:
    return {"kind": "decode", "model": model, "inputs": {"latent": latent}}


def encoding(image: str, model: str = "one") -> dict[str, Any]:
    return {"kind": "encode", "model": model, "inputs": {"image": image}}


def operation(name: str, settings: dict[str, Any] | None = None, **inputs: str) -> dict[str, Any]:
    return {"kind": "operation", "name": name, "settings": settings or {}, "inputs": inputs}


def text(prompt: str, model: str = "one", **fields: Any) -> dict[str, Any]:
    return {"kind": "text", "model": model, "prompt": prompt, **fields}


BIGGER = {"factor": 1.5, "method": "bilinear"}
#: a mask of the right half
HALF = np.zeros((SIDE, SIDE), np.uint8)
HALF[:, SIDE // 2 :] = 255
BASE = {"s": sampling(), "d": decoding("s")}
#: by name: the nodes, of which "d" is the output
GRAPHS: dict[str, dict[str, Any]] = {
    "one sampling run": BASE,
    "a refiner takes over": {
        "a": sampling(last_step=2, keeps_noise=True),
        "b": sampling("two", "a", first_step=2, adds_noise=False),
        "d": decoding("b"),
    },
    "a run that stops and goes on is one run": {
        "a": sampling(last_step=3, keeps_noise=True),
        "b": sampling("one", "a", first_step=3, adds_noise=False),
        "d": decoding("b"),
    },
    "a run that ends early is finished": {"a": sampling(last_step=2), "d": decoding("a")},
    "noise that is left is decoded": {"a": sampling(last_step=2, keeps_noise=True), "d": decoding("a")},
    "the latent is scaled in the middle": {
        "s": sampling(),
        "u": operation("latent_upscale_by", BIGGER, samples="s"),
        "b": sampling("two", "u", first_step=2),
        "d": decoding("b", "two"),
    },
    "the image is encoded again by another family": {
        "s": sampling(),
        "e": decoding("s"),
        "x": encoding("e", "xl"),
        "b": sampling("xl", "x", strength=0.5),
        "d": decoding("b", "xl"),
    },
    "the image is scaled and inverted in between": {
        "s": sampling(),
        "e": decoding("s"),
        "i": operation("image_invert", image="e"),
        "u": operation("image_scale_by", BIGGER, image="i"),
        "x": encoding("u"),
        "b": sampling("one", "x", strength=0.5),
        "d": decoding("b"),
    },
    "the negative text is zero": {
        "p": text("a cat"),
        "z": operation("encoded_zero", text="p"),
        "s": sampling(inputs={"positive": "p", "negative": "z"}),
        "d": decoding("s"),
    },
    "the text is encoded by another model": {
        "p": text("a cat", "two"),
        "n": text("", is_negative=True),
        "s": sampling(inputs={"positive": "p", "negative": "n"}),
        "d": decoding("s"),
    },
    "a text is the mean of two": {
        "p": text("a cat"),
        "q": text("a dog"),
        "n": text("", is_negative=True),
        "m": operation("encoded_average", {"strength": 0.5}, first="p", second="q"),
        "s": sampling(inputs={"positive": "m", "negative": "n"}),
        "d": decoding("s"),
    },
    "half of the latent is regenerated": {
        "s": sampling(),
        "m": {"kind": "mask", "mask": HALF},
        "b": sampling("two", "s", "m", strength=0.75),
        "d": decoding("b"),
    },
    "an empty latent is denoised partly": {"s": sampling(first_step=2), "d": decoding("s")},
    "another VAE decodes": {"s": sampling(), "d": decoding("s", "two")},
}


def expected_of(steps: Steps) -> dict[str, Result]:
    """The output of each graph, step by step."""
    base = steps.sample()
    image = steps.decode(base)
    left = StepPart(2, keeps_noise=True)
    goes_on = StepPart(adds_noise=False)
    inverted = steps.change("image_invert", image=image)
    bigger = steps.change("image_scale_by", BIGGER, image=inverted)
    scaled = steps.change("latent_upscale_by", BIGGER, samples=base)
    prompt, other = steps.text("a cat"), steps.text("a dog")
    mean = steps.change("encoded_average", {"strength": 0.5}, first=prompt, second=other)
    zero = steps.change("encoded_zero", text=prompt)
    side = SIDE * 3 // 2
    refined = steps.sample("two", first=2, part=goes_on, start=steps.sample(part=left))
    again = steps.sample("xl", first=2, start=steps.encode(image, "xl"))
    changed = steps.sample(first=2, start=steps.encode(bigger, side=side), side=side)
    half = steps.sample("two", first=1, start=base, mask=Mask(HALF))
    return {
        "one sampling run": image,
        "a refiner takes over": steps.decode(refined),
        "a run that stops and goes on is one run": image,
        "a run that ends early is finished": steps.decode(steps.sample(part=StepPart(2))),
        "noise that is left is decoded": steps.decode(steps.sample(part=left)),
        "the latent is scaled in the middle": steps.decode(steps.sample("two", side, 2, start=scaled), "two", side),
        "the image is encoded again by another family": steps.decode(again, "xl"),
        "the image is scaled and inverted in between": steps.decode(changed, side=side),
        "the negative text is zero": steps.decode(steps.sample(negative=zero)),
        "the text is encoded by another model": steps.decode(steps.sample(positive=steps.text("a cat", "two"))),
        "a text is the mean of two": steps.decode(steps.sample(positive=mean)),
        "half of the latent is regenerated": steps.decode(half),
        "an empty latent is denoised partly": steps.decode(steps.sample(first=2)),
        "another VAE decodes": steps.decode(base, "two"),
    }


@pytest.fixture(scope="module")
def expected(config: PoolConfig) -> dict[str, np.ndarray]:
    plan = plan_pool(config.override(workers=1), gpu_count=0, can_grow=False)
    engine: Any = plan.open_engine()
    with closing(engine):
        found = expected_of(Steps(engine, plan.open_catalog()))
    assert found.keys() == GRAPHS.keys()
    pixels = {name: image.pixels_HWC for name, image in found.items() if isinstance(image, ImagePixels)}
    assert len({each.tobytes() for each in pixels.values()}) == len(GRAPHS) - 1, "two graphs are one run"
    return pixels


def request_of(nodes: dict[str, Any]) -> GenerateRequest:
    return GenerateRequest(workflow={"nodes": nodes, "output": "d"}, seed=SEED)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_workflow_makes_what_its_steps_make_one_by_one(
    workers: int, config: PoolConfig, expected: dict[str, np.ndarray]
) -> None:
    """Also with passes; again, nothing is computed, and recipes lead to the same outputs."""
    with open_real_pool(config.override(workers=workers)) as pool:
        wanted = [request_of(nodes) for nodes in GRAPHS.values()]
        images = {result.index: result for result in pool.submit(wanted).images()}
        first = dict(zip(GRAPHS, (images[place] for place in range(len(GRAPHS))), strict=True))
        for name, image in first.items():
            np.testing.assert_array_equal(image.pixels, expected[name], err_msg=name)
        again = list(pool.submit(wanted).images())
        assert all(task.shared for result in again for task in result.tasks), "nothing is computed again"
        (passed,) = pool.submit([PASSES]).images()
        assert all(task.shared for task in passed.tasks), "a pass is the same work as its nodes"
        check_recipe(pool, first["the image is scaled and inverted in between"].recipe)
        check_recipe(pool, passed.recipe)


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


def check_recipe(pool: ModelPool, recipe: Recipe) -> None:
    """The request that a recipe leads to, read from its text, has the same recipe."""
    read = recipe_from_text(recipe.to_json())
    assert read == recipe
    (request,) = requests_of(read, lambda name: name)
    assert pool.recipe(request).digest == recipe.digest


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
