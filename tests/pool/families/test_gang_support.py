"""Which runs several GPUs can share, and that every plan fits the class that it is for."""

from __future__ import annotations

import inspect
from dataclasses import replace

import diffusers
import pytest

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.gang_support import gang_obstacle
from modelpool.pool.families.supported import running_families
from modelpool.pool.models.components.diffusion.adapted_modules import ADAPTED
from modelpool.pool.values.core.run_options import CfgOverride, ProjectedGuidance, RunOptions, SelfAttention, SkipLayers
from modelpool.pool.values.core.stage_params import (
    ControlRef,
    ControlVideoCondition,
    FaceCondition,
    GuidanceParams,
    ImageCondition,
    ImagePromptRef,
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
CONTROL = ControlRef("canny", "canny.safetensors", "cc", 1.0, 0.0, 1.0)
MASKED = ImagePromptRef("ip", "ip.safetensors", "dd", 1.0, masks=1)
#: a family, a run of it, the numbers of GPUs that are refused, and words of the reason
REFUSED = {
    "batch": ("flux_dev", replace(PLAIN, batch_size=4), (2, 4, 8), "fixed batch size"),
    "adaptive": (
        "flux_dev",
        replace(PLAIN, schedule=replace(PLAIN.schedule, sampler="dpm_adaptive")),
        (2, 4, 8),
        "dpm_adaptive",
    ),
    "attention of another text": ("sd1", replace(PLAIN, options=RunOptions(sag=SelfAttention())), (2, 4, 8), "sag"),
    "image": ("z_image", replace(PLAIN, conditions=(ImageCondition(),)), (4, 8), "an input image of the model"),
    "reference": ("z_image", replace(PLAIN, conditions=(ReferenceCondition(64, 64),)), (4, 8), "a reference image"),
    "ControlNet": ("wan_t2v", replace(PLAIN, conditions=(CONTROL,)), (4, 8), "a ControlNet"),
    "blockwise ControlNet": (
        "qwen_image",
        replace(PLAIN, conditions=(replace(CONTROL, is_blockwise=True),)),
        (4, 8),
        "a ControlNet behind each block",
    ),
    "prior": ("flux_dev", replace(PLAIN, conditions=(PriorCondition(4, 4),)), (4, 8), "a second stage"),
    "image prompt": ("qwen_image", replace(PLAIN, conditions=(replace(MASKED, masks=0),)), (4, 8), "an image prompt"),
    "option": ("sd3", replace(PLAIN, options=RunOptions(slg=SkipLayers((1,)))), (4, 8), "slg acts inside"),
    "face": ("mochi", replace(PLAIN, conditions=(FaceCondition(),)), (4, 8), "a video of a face"),
    "convolutions": ("sana", PLAIN, (4, 8), "as it convolves over neighbouring tokens; expected at most 2"),
    "mask of one": ("flux_dev", replace(PLAIN, conditions=(MASKED,)), (4, 8), "the masks of an image prompt"),
}


@each_case("name", REFUSED)
def test_what_was_not_shown_to_be_right_is_refused_by_name(name: str) -> None:
    family, work, refused, words = REFUSED[name]
    facts = running_families()[family].sampling
    found = {degree: obstacle for degree in DEGREES if (obstacle := gang_obstacle(facts, work, degree))}
    assert tuple(found) == refused
    assert all(words in obstacle for obstacle in found.values()), found


def test_the_numbers_of_gpus_follow_from_texts_and_plans() -> None:
    families = running_families()
    for name, work, expected in (
        ("flux_dev", ONE_TEXT, DEGREES),
        ("wan_t2v", PLAIN, DEGREES),
        ("wan21_i2v", replace(PLAIN, conditions=(ImageCondition(),)), DEGREES),
        ("flux_dev", replace(ONE_TEXT, conditions=(StartCondition(), MaskCondition())), DEGREES),
        ("chroma", PLAIN, DEGREES),
        ("sana", PLAIN, (1, 2)),
        ("sana", ONE_TEXT, (1,)),
        ("wan_vace", replace(PLAIN, conditions=(ControlVideoCondition(), ReferenceCondition(64, 64))), DEGREES),
        ("wan22_animate", replace(PLAIN, conditions=(ControlVideoCondition(), FaceCondition())), DEGREES),
        ("flux_dev", replace(ONE_TEXT, conditions=(CONTROL, ReferenceCondition(64, 64))), DEGREES),
        ("sd3", replace(PLAIN, options=RunOptions(apg=ProjectedGuidance(), cfg_override=CfgOverride())), DEGREES),
        ("sd1", replace(ONE_TEXT, options=RunOptions(sag=SelfAttention())), (1,)),
    ):
        facts = families[name].sampling
        assert tuple(each for each in DEGREES if not gang_obstacle(facts, work, each)) == expected, name
    two_models = replace(families["ideogram4"].sampling, reads=frozenset({"unconditional"}))
    assert "a second model" in gang_obstacle(two_models, PLAIN, 2)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_plan_names_inputs_of_its_class() -> None:
    """Those of the model itself; those of blocks are looked up when a gang meets, and have to act in every call."""
    planned = [family for family in defined_families() if family.sampling.sequence is not None]
    for family in defined_families():
        assert (family.sampling.sequence is None) == bool(family.sampling.not_divided), f"{family.name} says why not"
    assert len(planned) >= 60
    for family in planned:
        plan = family.sampling.sequence
        assert plan is not None
        kind = ADAPTED.get(family.module) or getattr(diffusers, family.module)
        inputs = inspect.signature(kind.forward).parameters
        named = {split.argument for split in plan.splits if not split.module}
        assert named <= set(inputs), family.name
        segments = {segment for split in plan.splits for segment in split.segments}
        used = {each for one in plan.attention for each in (*one.queries, *one.keys)}
        assert used | {gather.segment for gather in plan.gathers} <= segments, family.name
        own = getattr(kind, "_cp_plan", None)
        theirs = {name for name in (own or {}).get("", {}) if isinstance(name, str)}
        if family.module in ("FluxTransformer2DModel", "Flux2Transformer2DModel"):
            residuals = {name for name in named if name.startswith("controlnet_")}
            assert bool(residuals) == plan.reads_controls
            assert named - residuals == theirs, "the inputs that diffusers splits"
