"""Weights are stored byte for byte as upstream stores them, and unpack to the same values.

Exceptions, all upstream's: the 2025 snapshot computed the scale of a bfloat16 weight in bfloat16, and used other noise
for rounding 8-bit floats by chance, which this project has for plain 8-bit weights; and upstream's rounding of nvfp4 by
chance turns what it moves beyond the largest number into 4 where this project writes 6.
"""

from __future__ import annotations

import torch

from modelpool.pool.weights.patches.stochastic_rounding import round_to
from modelpool.pool.weights.quant import kitchen
from modelpool.pool.weights.quant.formats import FORMATS
from modelpool.pool.weights.quant.quantize import quantize
from tests.each_case import each_case
from tests.pool.weights.quant.golden_cases import NEWEST, OLDER, Case, as_bytes, cases, document

CASES = [*cases(NEWEST), *(c for c in cases(OLDER) if c.seed is None)]
STORED = [c for c in CASES if c.name != "nvfp4_stochastic"]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def test_the_package_has_all_that_is_used_of_it() -> None:
    assert kitchen.check() == ()


@each_case("case", STORED, ids=str)
def test_stored_parts_are_byte_equal(case: Case) -> None:
    scale = case.scale
    if (case.file, case.name) == (OLDER, "fp8_e4m3_recalc_bf16"):
        scale = case.parts["weight_scale"]
    before = case.weight.clone()
    packed = quantize(case.weight, case.format, case.settings, case.seed, scale)
    assert torch.equal(case.weight, before)
    assert packed.parts.keys() == case.parts.keys()
    for name, expected in case.parts.items():
        assert torch.equal(as_bytes(packed.parts[name]), expected), name


@each_case("case", STORED, ids=str)
def test_values_are_equal(case: Case) -> None:
    scale = case.parts["weight_scale"] if "fp8" in case.name else case.scale
    packed = quantize(case.weight, case.format, case.settings, case.seed, scale)
    values = packed.unpack(case.weight.dtype)
    assert values.shape == case.weight.shape
    assert values.dtype == case.weight.dtype
    assert torch.equal(values.float(), case.expected["dequant"])
    if not case.weight_only:
        product = torch.nn.functional.linear(case.x, packed, case.bias)
        torch.testing.assert_close(product.float(), case.expected["linear"], rtol=1e-6, atol=1e-6)


def test_rounding_nvfp4_by_chance_differs_only_where_upstream_wraps_around() -> None:
    case = next(c for c in CASES if c.name == "nvfp4_stochastic")
    packed = quantize(case.weight, case.format, case.settings, case.seed)
    for name in ("weight_scale", "weight_scale_2"):
        assert torch.equal(as_bytes(packed.parts[name]), case.parts[name])
    ours, theirs = (torch.stack((w >> 4, w & 15), -1).flatten() for w in (packed.parts["weight"], case.parts["weight"]))
    differ = ours != theirs
    assert 0 < int(differ.sum()) < 30
    assert set((ours[differ] & 7).tolist()) == {7}
    assert set((theirs[differ] & 7).tolist()) == {6}
    assert torch.equal(ours >> 3, theirs >> 3)


def test_the_older_rounding_by_chance_is_that_of_plain_8_bit_weights() -> None:
    case = next(c for c in cases(OLDER) if c.name == "fp8_e4m3_stochastic")
    assert case.seed is not None
    scaled = case.weight * (1.0 / case.parts["weight_scale"])
    assert torch.equal(as_bytes(round_to(scaled, torch.float8_e4m3fn, case.seed)), case.parts["weight"])


def test_every_format_of_upstream_is_known_by_its_name_and_layout() -> None:
    for name, said in document(NEWEST)["quant_algos"].items():
        known = FORMATS[name]
        assert known.layout == said["comfy_tensor_layout"]
        assert known.group_size == int(said.get("group_size", 0))
        assert set(said["parameters"]) <= set(known.part_names)
        assert (
            said["storage_t"].removeprefix("torch.")
            in {
                "F8_E4M3": "float8_e4m3fn",
                "F8_E5M2": "float8_e5m2",
                "U8": "uint8",
                "I8": "int8",
            }[known.parts[0].dtypes[0]]
        )
