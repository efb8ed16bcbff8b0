"""Which runs several GPUs can share, and that every plan fits the class that it is for."""

from __future__ import annotations

import inspect
from dataclasses import replace

import diffusers
import pytest

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.gang_support import gang_obstacle
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.run_options import RunOptions, SkipLayers
from modelpool.pool.values.core.stage_params import (
    GuidanceParams,
    ImageCondition,
    LoraRef,
    MaskCondition,
    ModelRef,
    OutputShape,
    PriorCondition,
    ReferenceCondition,
    SampleParams,
    SamplingSchedule,
    StartCondition,
)
from modelpool.pool.values.specs.gang import DEGREES
from tests.each_case import each_case

MODEL = ModelRef("tiny", "aa", "tiny.safetensors")
PLAIN = SampleParams(
    MODEL, (), OutputShape(64, 64), SamplingSchedule(4, "euler", "simple"), GuidanceParams(3.0, 0.0), 1
)
ONE_TEXT = replace(PLAIN, guidance=GuidanceParams(1.0, 0.0))
#: a run of a family with a plan, and a word of the reason
REFUSED = {
    "options": (replace(PLAIN, options=RunOptions(slg=SkipLayers((1,)))), "slg"),
    "batch": (replace(PLAIN, batch_size=4), "batch"),
    "adaptive": (replace(PLAIN, schedule=replace(PLAIN.schedule, sampler="dpm_adaptive")), "dpm_adaptive"),
    "image": (replace(PLAIN, conditions=(ImageCondition(),)), "input image"),
    "reference": (replace(PLAIN, conditions=(ReferenceCondition(64, 64),)), "reference image"),
    "prior": (replace(PLAIN, conditions=(PriorCondition(4, 4),)), "second stage"),
    "LoRA": (replace(PLAIN, loras=(LoraRef("a", "bb", "a.safetensors", 1.0, only=("positive",)),)), "LoRA"),
}


@each_case("name", REFUSED)
def test_what_was_not_shown_to_be_right_is_refused_by_name(name: str) -> None:
    work, word = REFUSED[name]
    facts = running_families()["flux_dev"].sampling
    assert gang_obstacle(facts, work, 1) == "", "one GPU does everything"
    for degree in DEGREES[1:]:
        assert word in gang_obstacle(facts, work, degree)


def test_the_numbers_of_gpus_follow_from_texts_and_plans() -> None:
    families = running_families()
    for name, work, expected in (
        ("flux_dev", ONE_TEXT, DEGREES),
        ("wan_t2v", PLAIN, DEGREES),
        ("wan21_i2v", replace(PLAIN, conditions=(ImageCondition(),)), DEGREES),
        ("flux_dev", replace(ONE_TEXT, conditions=(StartCondition(), MaskCondition())), DEGREES),
        ("chroma", PLAIN, (1, 2)),
        ("chroma", ONE_TEXT, (1,)),
        ("wan_vace", PLAIN, (1, 2)),
    ):
        facts = families[name].sampling
        assert tuple(each for each in DEGREES if not gang_obstacle(facts, work, each)) == expected, name
    two_models = replace(families["ideogram4"].sampling, reads=frozenset({"unconditional"}))
    assert "a second model" in gang_obstacle(two_models, PLAIN, 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_plan_names_inputs_of_its_class() -> None:
    """Those of the model itself; those of blocks are looked up when a gang meets, and have to act in every call."""
    planned = [family for family in defined_families() if family.sampling.sequence is not None]
    assert len(planned) >= 15
    for family in planned:
        plan = family.sampling.sequence
        assert plan is not None
        inputs = inspect.signature(getattr(diffusers, family.module).forward).parameters
        named = {split.argument for split in plan.splits if not split.module}
        assert named <= set(inputs), family.name
        segments = {segment for split in plan.splits for segment in split.segments}
        used = {each for one in plan.attention for each in (*one.queries, *one.keys)}
        assert used | {gather.segment for gather in plan.gathers} <= segments, family.name
        own = getattr(getattr(diffusers, family.module), "_cp_plan", None)
        theirs = {name for name in (own or {}).get("", {}) if isinstance(name, str)}
        if family.module in ("FluxTransformer2DModel", "Flux2Transformer2DModel"):
            assert named == theirs, "the inputs that diffusers splits"
