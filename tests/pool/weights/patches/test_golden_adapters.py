"""Every golden adapter case comes out as ComfyUI computes it, within 1e-6, but for the faults that are named here.

The faults are not waved through: each is put on top of what the pool computes, and the golden value comes out of that.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from modelpool.pool.weights.patches.dora import DoRA
from modelpool.pool.weights.patches.oft import BOFT, OFT
from modelpool.pool.weights.patches.weight_patch import WeightPatch
from tests.each_case import each_case
from tests.pool.weights.patches.golden_adapters import AdapterCase, adapter_cases

CASES = adapter_cases()

#: upstream applies the strength of a rotation twice
STRENGTH_TWICE = ("oft_linear_s0.5", "oft_linear_constraint_s0.5", "oft_conv", "oft_dora", "boft_linear_s0.5")
#: upstream does not rescale
NOT_RESCALED = ("oft_rescale_ignored",)
#: upstream divides by the lengths of the rows of the weight, where the formula has the rows of the weight with its
#: delta
LENGTHS_OF_WEIGHT = (
    "lora_dora_out_linear_s0.6",
    "lora_dora_out_conv_s0.6",
    "lora_dora_out_conv_s1.0",
    "lora_offset_dora",
    "lokr_dora",
)
#: added to the weight in half precision upstream, and in float32 here
HALF_MATHS = ("lora_fp16_weight_fp16_math", "lora_fp16_weight_fp32_math", "lora_bf16_weight_bf16_math")
NAMED_FAULTS = {*STRENGTH_TWICE, *NOT_RESCALED, *LENGTHS_OF_WEIGHT, *HALF_MATHS}


def error_of(found: Tensor, case: AdapterCase) -> float:
    assert (found.shape, found.dtype) == (case.expected.shape, case.expected.dtype)
    return (found.double() - case.expected.double()).abs().max().item()


def test_there_are_as_many_cases_as_the_readme_says() -> None:
    assert len(CASES) == 48


@each_case("name", [n for n in CASES if n not in NAMED_FAULTS])
def test_golden_case(name: str) -> None:
    case = CASES[name]
    assert error_of(case.patched(), case) <= 1e-6
    if not case.specification["changed"]:
        assert torch.equal(case.patched(), case.weight)


@pytest.mark.parametrize("name", HALF_MATHS)
def test_half_precision_maths_differ_by_their_own_rounding(name: str) -> None:
    """Upstream rounds the delta and the sum to it, some also the products; a unit of numbers up to 4 is 4 eps."""
    case = CASES[name]
    assert error_of(case.patched(), case) <= 4 * torch.finfo(case.weight.dtype).eps


@pytest.mark.parametrize("name", ["oft_linear_s0.5", "oft_linear_constraint_s0.5", "oft_conv"])
def test_upstreams_rotation_is_ours_at_the_squared_strength(name: str) -> None:
    case = CASES[name]
    assert error_of(case.patched(), case) > 1e-3
    (patch,) = case.patches
    squared = replace(case, patches=(replace(patch, strength=patch.strength**2),))
    assert error_of(squared.patched(), case) <= 1e-6


def test_upstreams_butterfly_blends_what_ours_has_blended() -> None:
    case = CASES["boft_linear_s0.5"]
    assert error_of(case.patched(), case) > 1e-3
    assert error_of(torch.lerp(case.weight, case.patched(), 0.5), case) <= 1e-6


def with_magnitude(case: AdapterCase, strength_of_delta: float, is_of_sum: bool) -> Tensor:
    """The weight of a case of one DoRA over rows, with lengths of the rows of the sum, or of the weight."""
    (patch,) = case.patches
    assert isinstance(patch.value, DoRA)
    result = case.weight.clone()
    part = result if patch.offset is None else patch.offset.of(result)
    weight = part.clone()
    total = weight + patch.value.value.delta(weight) * strength_of_delta
    lengths = (total if is_of_sum else weight).flatten(1).norm(dim=1).reshape(patch.value.magnitude.shape)
    part.copy_(weight + patch.strength * (total * patch.value.magnitude / lengths - weight))
    return result


def test_upstream_divides_magnitudes_of_rows_by_other_lengths() -> None:
    """A known fault: LyCORIS, PEFT and OneTrainer divide by the lengths of the weight with its delta."""
    for name in LENGTHS_OF_WEIGHT:
        case = CASES[name]
        assert error_of(with_magnitude(case, 1.0, False), case) <= 2e-6, name
        assert error_of(with_magnitude(case, 1.0, True), case) > 1e-3, name
        assert (case.patched() - with_magnitude(case, 1.0, True)).abs().max() <= 2e-6, name


def test_upstreams_rotation_under_dora_is_weaker() -> None:
    """The delta that the magnitude is put on has the strength in it already."""
    case = CASES["oft_dora"]
    (patch,) = case.patches
    assert error_of(with_magnitude(case, patch.strength, False), case) <= 2e-6
    assert (case.patched() - with_magnitude(case, 1.0, True)).abs().max() <= 2e-6


def test_upstream_leaves_out_the_rescaling() -> None:
    case = CASES["oft_rescale_ignored"]
    (patch,) = case.patches
    assert isinstance(patch.value, OFT)
    plain = replace(case, patches=(replace(patch, value=replace(patch.value, rescale=None)),))
    assert error_of(plain.patched(), case) <= 1e-6
    assert patch.value.rescale is not None
    assert torch.allclose(case.patched(), plain.patched() * patch.value.rescale, atol=1e-6)


def test_a_butterfly_without_alpha_works() -> None:
    """Upstream logs an error and leaves the weight alone."""
    case = CASES["boft_linear_s1.0"]
    (patch,) = case.patches
    assert isinstance(patch.value, BOFT)
    assert patch.value.cap == 0.0
    assert error_of(case.patched(), case) <= 1e-6


def test_patches_can_be_compared_and_named() -> None:
    one = CASES["diff"].patches[0]
    assert one == WeightPatch("k", "diff:0", CASES["set"].patches[0].value, 0.7)
    assert one.name == "patch 'diff:0' of 'k'"
