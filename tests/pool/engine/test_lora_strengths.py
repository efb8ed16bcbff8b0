"""Strengths of a LoRA over the steps, by block and on the text encoders.

Proves: a run with a LoRA in the first half is the run with it, continued by the run without it, bit for bit, whatever
part of the weights is resident, and also if it is interrupted; the names of blocks are those of the original layout, as
diffusers' converter maps it; equal encodings are one task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.lora_names.blocks import MID, ModelBlocks, canonical_block, numbered_factors
from modelpool.pool.models.lora_names.discovered import layout_map
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import (
    EncodeParams,
    LoraRef,
    SampleParams,
    batch_key,
    task_id,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts
from tests.pool.pipeline import PLENTY_BYTES, Pipeline, open_engine
from tests.pool.two_loras import STEPS, catalog_of_two_loras, latent_of, paused

SHAPES = Path(__file__).parents[3] / "examples" / "shapes"


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return catalog_of_two_loras(tmp_path_factory.mktemp("weights"))


@pytest.fixture
def pipe(catalog: Catalog) -> Iterator[Pipeline]:
    engine = open_engine("sim", PLENTY_BYTES)
    yield Pipeline(engine, catalog, {"twist": 0.8})
    engine.close()


def of_steps(work: SampleParams, *loras: LoraRef) -> SampleParams:
    return replace(work, loras=loras, schedule=replace(work.schedule, steps=STEPS))


def test_a_lora_of_some_steps_is_the_run_with_it_and_then_without_it(pipe: Pipeline) -> None:
    prompt, negative, sample, _ = pipe.works()
    texts = pipe.run(replace(prompt, loras=())), pipe.run(replace(negative, loras=()))
    (twist,), turn = pipe.loras, pipe.catalog.find_lora("turn", 0.5)
    half = of_steps(sample, replace(twist, end=0.5), turn)
    whole, without = of_steps(sample, twist, turn), of_steps(sample, turn)
    found = latent_of(pipe, half, texts)
    assert np.array_equal(found, latent_of(pipe, without, texts, resume=paused(pipe, whole, texts, 2)))
    for other in (whole, without):
        assert not np.array_equal(found, latent_of(pipe, other, texts))
    for pause_at in (1, 3):
        resumed = latent_of(pipe, half, texts, resume=paused(pipe, half, texts, pause_at))
        assert np.array_equal(resumed, found), f"interrupted after step {pause_at}"


def test_a_lora_of_some_steps_does_not_depend_on_the_budget(catalog: Catalog) -> None:
    images = []
    for budget_bytes in (PLENTY_BYTES, 0):
        engine = open_engine("sim", PLENTY_BYTES)
        whole = Pipeline(engine, catalog, {"twist": 0.8})
        whole.loras = tuple(replace(lora, start=0.5) for lora in whole.loras)
        if not budget_bytes:
            budget_bytes = whole.smallest_bytes()
            engine.close()
            engine = open_engine("sim", budget_bytes)
            whole.engine = engine
        images.append(whole.image())
        engine.close()
    assert np.array_equal(*images)


@pytest.mark.parametrize(
    ("start", "end", "steps", "on"),
    [
        (0.0, 1.0, 4, [0, 1, 2, 3]),
        (0.0, 0.5, 4, [0, 1]),
        (0.5, 1.0, 4, [2, 3]),
        (0.3, 0.7, 10, [3, 4, 5, 6]),
        (0.1, 0.15, 4, []),
        (0.25, 0.3, 4, [1]),
    ],
)
def test_the_steps_of_a_part_of_the_schedule(start: float, end: float, steps: int, on: list[int]) -> None:
    lora = LoraRef("a", "a", "a", 1.0, start=start, end=end)
    assert [step for step in range(steps) if lora.is_on(step, steps)] == on


def test_work_of_another_part_blocks_or_strength_is_another_task(catalog: Catalog) -> None:
    model, lora = catalog.find_model("toy"), catalog.find_lora("twist", 0.8)
    variants = [lora, replace(lora, end=0.5), replace(lora, blocks=(("MID", 0.0),)), replace(lora, start=0.5)]
    works = [EncodeParams(model, (each,), "a") for each in variants]
    assert len({task_id(work, {}) for work in works}) == len({batch_key(work) for work in works}) == 4
    texts = [replace(each, text_strength=0.8).for_text() for each in variants]
    assert texts == [lora] * 4, "the text encoders see neither steps nor the blocks of the diffusion model"
    assert replace(lora, text_strength=0.3).for_text() == replace(lora, strength=0.3)
    assert replace(lora, text_strength=0.3).for_diffusion_model() == lora


def test_text_strength_is_that_of_the_text_encoders_alone(pipe: Pipeline) -> None:
    opened, (twist,) = pipe.engine._opened(pipe.model), pipe.loras
    chosen = (replace(twist, text_strength=0.25),)
    strengths = {
        role: {patch.strength for patch in opened.patch_set(role, chosen).patches}
        for role in (Role.TEXT_ENCODER, Role.DIFFUSION_MODEL)
    }
    assert strengths == {Role.TEXT_ENCODER: {0.25}, Role.DIFFUSION_MODEL: {0.8}}
    silent = replace(twist, text_strength=0.0)
    assert not opened.touches(Role.TEXT_ENCODER, silent)
    assert opened.touches(Role.DIFFUSION_MODEL, silent)
    assert not opened.patch_set(Role.TEXT_ENCODER, (silent,)).patches


def test_strengths_by_block_are_factors_of_the_weights_of_each_block(pipe: Pipeline) -> None:
    opened, (twist,) = pipe.engine._opened(pipe.model), pipe.loras
    blocks = (("BASE", 0.5), ("IN", 0.25), ("MID", 0.0))
    chosen = replace(twist, blocks=blocks)
    found = {patch.parameter: patch.strength for patch in opened.patch_set(Role.DIFFUSION_MODEL, (chosen,)).patches}
    down = "down_blocks.0.attentions.0.transformer_blocks.0."
    up = "up_blocks.1.attentions.1.transformer_blocks.0.attn1.to_out.0.weight"
    assert found == {f"{down}attn1.to_q.weight": 0.2, f"{down}attn2.to_k.weight": 0.2, up: 0.8}
    texts = {patch.strength for patch in opened.patch_set(Role.TEXT_ENCODER, (chosen,)).patches}
    assert texts == {0.4}
    with pytest.raises(UnusableField, match=r"loras.blocks: found 'IN11', expected a block of the model: BASE, IN"):
        opened.touches(Role.DIFFUSION_MODEL, replace(twist, blocks=(("IN11", 0.5),)))


@pytest.mark.parametrize(("family", "layout"), [("sd1", layouts.sd15), ("sdxl", layouts.sdxl)])
def test_block_names_are_those_of_the_original_layout(family: str, layout: layouts.Layout) -> None:
    prefix = "model.diffusion_model."
    key_map = layout_map(family, {k: v for k, v in layout().items() if k.startswith(prefix)}, prefix)
    blocks = ModelBlocks.of(key_map.origins)
    groups = {"input_blocks": "IN", "output_blocks": "OUT", "middle_block": MID}
    for parameter, origin in key_map.origins.items():
        place = re.match(
            r"(input_blocks|output_blocks|middle_block)\.(\d+)\.", origin.segments[0].source[len(prefix) :]
        )
        expected = "OTHER"
        if place is not None:
            group = groups[place[1]]
            expected = group if group == MID else f"{group}{int(place[2]):02}"
        assert blocks.block_of(parameter) == expected, parameter
    for count in {"sd1": (17, 26), "sdxl": (12, 20)}[family]:
        blocks.check(numbered_factors([1.0] * count))
    # the shorter lists have exactly the blocks with attention, which a plain LoRA changes
    attended = {blocks.block_of(name) for name in key_map.origins if "attentions" in name}
    short = numbered_factors([1.0] * {"sd1": 17, "sdxl": 12}[family])
    assert {name for name, _ in short} == attended | {"BASE"}


def test_transformers_have_double_and_single_blocks() -> None:
    flux = ModelBlocks.of(
        ["x_embedder.weight", "transformer_blocks.3.ff.weight", "single_transformer_blocks.12.proj_out.weight"]
    )
    assert flux.names == {"BASE", "OTHER", "D", "D03", "S", "S12"}
    wan = ModelBlocks.of(["blocks.0.ffn.weight", "blocks.1.ffn.weight", "condition_embedder.layers.0.weight"])
    assert wan.names == {"BASE", "OTHER", "B", "B00", "B01"}
    assert [canonical_block(name) for name in ("m00", "in4", "OUT", "Mid")] == ["MID", "IN04", "OUT", "MID"]


def test_a_lora_without_strength_on_all_that_it_patches_is_told_of() -> None:
    """Found in a review: a LoRA for the diffusion model alone, at 0 there and 1 on the text encoders, did nothing."""
    catalog = Catalog((SHAPES / "models",), (SHAPES / "loras",), "cpu")
    model = catalog.find_model("shapes")
    told = "none of its patches acts: all are for the diffusion model, and its strength on them is 0"
    for name, strength, text_strength, expected in (
        ("light", 0.0, 1.0, told),
        ("light", 1.0, 0.0, None),
        ("light", 1.0, None, None),
        ("light", 0.0, None, None),  # switched off
        ("outline", 0.0, 1.0, None),
        ("outline", 1.0, 0.0, None),
    ):
        lora = replace(catalog.find_lora(name, strength), text_strength=text_strength)
        assert catalog.lora_warning(model, lora) == expected, (name, strength, text_strength)
