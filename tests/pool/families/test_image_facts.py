"""How images are sampled: the facts beside the models say what the calls read, and what the schedulers have."""

from __future__ import annotations

import math

import diffusers
import pytest
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.signatures import SIGNATURES
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.values.core.sampling_facts import Guidance, NoiseKind, Prediction
from tests.pool.families.definitions.in_tables import image_families_in_tables
from tests.pool.models.components.diffusion.image_cases import CASES, Case
from tests.pool.models.components.diffusion.test_image_build import IMAGE_ROWS, SIZED, level
from tests.pool.zoo.case import quiet_libraries

IMAGE_FAMILIES = image_families_in_tables()


def test_every_model_that_is_built_has_facts_and_is_recognised_under_that_name() -> None:
    assert IMAGE_FAMILIES.keys() == IMAGE_ROWS.keys()
    names = {row.name: row.runs for row in SIGNATURES}
    assert {name: names[name] for name in IMAGE_ROWS} == {name: row.module.__name__ for name, row in IMAGE_ROWS.items()}


@pytest.mark.parametrize("case", list(CASES.values()), ids=list(CASES))
def test_a_model_runs_on_what_it_must_be_told_and_on_nothing_less(case: Case) -> None:
    """Names that it may read can be left out; each that it must read is missed."""
    name = SIZED.get(case.name, case.name)
    (family,) = (family for family in defined_families() if family.name == name)
    module = case.module()
    plan = plan_diffusion_model({key: tuple(value.shape) for key, value in case.file(module).items()})
    x, told = case.inputs()
    assert told.keys() <= family.sampling.reads | family.build.optional_inputs
    distilled = {"guidance", "next_level"} & told.keys()
    needed = {name: told[name] for name in (*family.required_inputs, *distilled)}
    with torch.no_grad(), quiet_libraries():
        assert plan.call(module, x, level(case), needed).shape == x.shape
        for name in needed:
            without = {key: value for key, value in needed.items() if key != name}
            if name.endswith("_mask") or name == "image":
                continue  # all tokens are real then; a model with channels to fill says so itself
            with pytest.raises(KeyError, match=name):
                plan.call(module, x, level(case), without)


def test_flows_predict_flows_and_the_sizes_and_scales_fit() -> None:
    for name, family in IMAGE_FAMILIES.items():
        facts, defaults = family.sampling, family.sampling.defaults
        assert defaults is not None, name
        is_flow = facts.noise.kind is NoiseKind.FLOW
        assert (facts.prediction is Prediction.FLOW) == is_flow, name
        assert all(side % facts.side_multiple == 0 for side in family.size), name
        assert (defaults.guidance is Guidance.DISTILLED) == ("guidance" in family.required_inputs), name
        assert (defaults.guidance is not Guidance.NONE) or defaults.cfg == 1.0, name


@pytest.mark.parametrize("name", ["flux2_dev", "flux2_klein"])
@pytest.mark.parametrize("steps", [4, 20, 50])
def test_flux_2_has_its_pipelines_shift_in_any_number_of_steps(name: str, steps: int) -> None:
    by_size = IMAGE_FAMILIES[name].sampling.noise.shift_by_size
    assert by_size is not None
    for tokens in (256, 1024, 2304, 4096, 8192):
        assert math.log(by_size.shift(tokens, steps)) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-9)


def test_the_shift_of_flux_is_its_schedulers() -> None:
    by_size = IMAGE_FAMILIES["flux_dev"].sampling.noise.shift_by_size
    assert by_size is not None
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    tokens = 1024
    scheduler.set_timesteps(sigmas=[0.5], mu=calculate_shift(tokens))
    shift = by_size.shift(tokens, 1)
    assert float(scheduler.sigmas[0]) == pytest.approx(shift * 0.5 / (1 + (shift - 1) * 0.5), rel=1e-6)
