"""Every format computes the same on every device, survives cutting by rows, looking rows up, and going back to storage.

Proves besides: rounding by chance is unbiased and a function of the weight's name; scales found anew hold what was
patched; and what a format does not take is refused by name.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.core.errors import BadQuantization
from modelpool.pool.weights.ops.packed import PackedWeight, packed_weight, stored_bytes
from modelpool.pool.weights.patches.stochastic_rounding import seed_of
from modelpool.pool.weights.quant.formats import FORMATS
from modelpool.pool.weights.quant.kitchen_quantize import CHUNK_SCRATCH_BYTES, CHUNK_VALUES
from modelpool.pool.weights.quant.marked_codec import codec
from modelpool.pool.weights.quant.quantize import (
    PER_ROW,
    can_requantize,
    quantize,
    requantize,
    requantize_scratch_bytes,
)
from tests.pool.weights.quant.golden_cases import draw

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8": ("float8_e4m3fn", {}),
    "fp8 e5m2": ("float8_e5m2", {}),
    "fp8 rows": ("float8_e4m3fn", {PER_ROW: True}),
    "mxfp8": ("mxfp8", {}),
    "nvfp4": ("nvfp4", {}),
    "int8": ("int8_tensorwise", {}),
    "int8 rows": ("int8_tensorwise", {PER_ROW: True}),
    "int8 rotated": ("int8_tensorwise", {"convrot": True, "convrot_groupsize": 64}),
    "w4a4": ("convrot_w4a4", {}),
    "w4a8": ("asym_w4a8_int8", {}),
    "w6a8": ("asym_w4a8_int8", {"bits": 6, "codebook": False}),
    "w4a8 asymmetric": ("asym_w4a8_int8", {"symmetric": False, "codebook": False, "float_scales": True}),
}
#: relative errors measured on normal numbers, rounded up (comfyui-behaviour facts, section 2.1)
WORST = {
    "fp8": 0.028, "fp8 e5m2": 0.055, "fp8 rows": 0.028, "mxfp8": 0.028, "nvfp4": 0.1, "int8": 0.012,
    "int8 rows": 0.009, "int8 rotated": 0.009, "w4a4": 0.15, "w4a8": 0.08, "w6a8": 0.03, "w4a8 asymmetric": 0.1,
}  # fmt: skip
EVERY = pytest.mark.parametrize("form", FORMS)


def pack(form: str, rows: int = 64, seed: int | None = None, dtype: torch.dtype = torch.float32) -> PackedWeight:
    name, options = FORMS[form]
    return quantize(draw([rows, 256], 3, 0.05, dtype), name, options, seed)


def error(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values.double() - exact.double()).norm() / exact.double().norm())


def same(form: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal; but turning rotated rows back is a matrix product: a library orders its sums by the count of rows."""
    rotated = form == "int8 rotated" or form.startswith("w")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if rotated else 0)


@EVERY
def test_values_are_near_the_weight_in_every_dtype(form: str) -> None:
    exact, packed = draw([64, 256], 3, 0.05, torch.float32), pack(form)
    assert error(packed.unpack(torch.float32), exact) < WORST[form]
    for dtype, rounding in ((torch.float64, 1e-7), (torch.float16, 2e-3), (torch.bfloat16, 8e-3)):
        values = packed.unpack(dtype)
        assert values.dtype == dtype
        assert error(values, packed.unpack(torch.float32)) < rounding
    assert stored_bytes(packed) < exact.nbytes / 2.5


@pytest.mark.parametrize("form", ["fp8", "fp8 e5m2"])
def test_small_weights_are_as_near_in_float16(form: str) -> None:
    """Their scales, or the inverses, are not what float16 can hold."""
    name, options = FORMS[form]
    tiny = draw([64, 256], 3, 1e-4, torch.float32)
    assert error(quantize(tiny, name, options).unpack(torch.float16), tiny) < WORST[form]
    least = torch.full((4, 4), 2.0**-24, dtype=torch.float16)
    packed = quantize(least, name, options)
    assert float(packed.parts["weight_scale"]) >= 0.999999 / 65504
    assert torch.isfinite(packed.unpack(torch.float16)).all()


@pytest.mark.parametrize("form", ["int8", "int8 rows"])
def test_small_float16_weights_are_as_near_as_integers(form: str) -> None:
    name, options = FORMS[form]
    small = draw([64, 256], 3, 1e-4, torch.float16)
    assert error(quantize(small, name, options).unpack(torch.float32), small) < WORST[form]


@EVERY
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "by chance"])
def test_a_simulated_device_makes_the_same_bytes_and_values(form: str, seed: int | None) -> None:
    sim.install()
    sim.configure(0, 1 << 24)
    used_bytes = sim.memory_stats(0).used_bytes
    name, options = FORMS[form]
    weight, here = draw([64, 256], 3, 0.05, torch.float32), pack(form, seed=seed)
    there = quantize(weight.to("sim:0"), name, options, seed)
    assert there.device.type == "sim"
    for part in here.parts:
        assert torch.equal(there.parts[part].cpu().float(), here.parts[part].float()), part
    assert torch.equal(there.unpack(torch.float32).cpu(), here.unpack(torch.float32))
    assert torch.equal(here.to("sim:0").unpack(torch.float16).cpu(), here.unpack(torch.float16))  # type: ignore[attr-defined]
    del there
    assert sim.memory_stats(0).used_bytes == used_bytes  # no table of the package stays behind


@pytest.mark.parametrize("form", ["fp8", "fp8 e5m2", "int8", "int8 rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_unpacking_takes_no_more_memory_than_it_says(form: str, dtype: torch.dtype) -> None:
    sim.install()
    sim.configure(0, 1 << 24)
    there = pack(form).to("sim:0")
    assert isinstance(there, PackedWeight)
    before_bytes = sim.memory_stats(0).used_bytes
    sim.reset_peak(0)
    values = there.unpack(dtype)
    taken_bytes = sim.memory_stats(0).peak_bytes - before_bytes - values.nbytes
    assert taken_bytes <= there.scratch_bytes(dtype) + 1024  # and the factors


@EVERY
def test_rows_are_the_rows(form: str) -> None:
    packed = pack(form, rows=300 // 4 * 4 if FORMATS[FORMS[form][0]].pads_to == 1 else 320)
    values, step = packed.unpack(torch.float32), packed.codec.row_step
    for start, end in ((0, 128), (128, 256), (128, packed.shape[0]), (0, packed.shape[0]), (step, 2 * step)):
        rows = packed[start:end]
        assert isinstance(rows, PackedWeight)
        same(form, rows.unpack(torch.float32), values[start:end])
        assert rows.parts["weight"].untyped_storage().data_ptr() == packed.parts["weight"].untyped_storage().data_ptr()
    cut = packed[1:3]
    assert isinstance(cut, PackedWeight) == (step == 1)
    same(form, cut.unpack(torch.float32) if isinstance(cut, PackedWeight) else cut, values[1:3])


@EVERY
def test_an_embedding_looks_up_the_same_rows(form: str) -> None:
    packed, ids = pack(form), torch.tensor([[3, 60], [0, 3]])
    looked_up = packed.rows_for(ids, torch.float32)
    same(form, looked_up, packed.unpack(torch.float32)[ids])


@EVERY
def test_going_back_to_storage_keeps_the_form(form: str) -> None:
    packed = pack(form)
    same = requantize(packed.unpack(torch.float32), packed)
    assert same.codec is packed.codec
    assert {k: (p.dtype, p.shape) for k, p in same.parts.items()} == {
        k: (p.dtype, p.shape) for k, p in packed.parts.items()
    }
    # the largest number of most formats is not one of the format's own multiples after unpacking: near, not equal
    assert error(same.unpack(torch.float32), packed.unpack(torch.float32)) < WORST[form]
    larger = packed.unpack(torch.float32) * 40
    assert error(requantize(larger, packed).unpack(torch.float32), larger) < WORST[form]


def test_what_is_no_code_is_kept_when_a_weight_goes_back() -> None:
    packed = pack("fp8")
    known = packed_weight(packed.codec, {**packed.parts, "input_scale": torch.tensor(0.3)}, packed.shape, packed.dtype)
    assert requantize(packed.unpack(torch.float32), known).parts["input_scale"] is known.parts["input_scale"]


def test_what_is_made_elsewhere_does_not_go_back() -> None:
    packed = pack("fp8")
    other = packed_weight(codec("awq_w4a16"), packed.parts, packed.shape, packed.dtype)
    assert can_requantize(packed)
    assert not can_requantize(other)
    with pytest.raises(BadQuantization, match=r"^a\.weight: found a weight packed as awq_w4a16, expected"):
        requantize(torch.ones(64, 256), other, name="a.weight")


@EVERY
def test_rounding_by_chance_is_a_function_of_the_seed_and_unbiased(form: str) -> None:
    first, again, other = (pack(form, seed=seed_of(name)) for name in ("a.weight", "a.weight", "b.weight"))
    assert torch.equal(first.parts["weight"].float(), again.parts["weight"].float())
    assert not torch.equal(first.parts["weight"].float(), other.parts["weight"].float())
    exact, nearest = draw([64, 256], 3, 0.05, torch.float32), pack(form)
    mean = torch.stack([pack(form, seed=seed).unpack(torch.float32) for seed in range(1, 25)]).mean(0)
    assert error(mean, exact) < error(nearest.unpack(torch.float32), exact)


@EVERY
def test_zeros_and_the_seed_zero_do_no_harm(form: str) -> None:
    name, options = FORMS[form]
    for seed in (None, 0):
        values = quantize(torch.zeros(64, 256), name, options, seed).unpack(torch.float32)
        assert torch.equal(values, torch.zeros(64, 256))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["float8_e4m3fn", "float8_e5m2", "int8_tensorwise"]), st.floats(-20, 20), st.integers(1, 40))
def test_no_number_of_a_scaled_format_is_farther_off_than_half_a_step(name: str, exponent: float, rows: int) -> None:
    weight = draw([rows, 7], rows, 10.0**exponent, torch.float32)
    packed = quantize(weight, name)
    values = packed.unpack(torch.float32)
    largest = weight.abs().amax()
    relative = {"float8_e4m3fn": 1 / 16, "float8_e5m2": 1 / 8, "int8_tensorwise": 0.0}[name]
    absolute = (
        largest * {"float8_e4m3fn": 2**-10 / 448, "float8_e5m2": 2**-17 / 57344, "int8_tensorwise": 0.5 / 127}[name]
    )
    assert ((values - weight).abs() <= (weight.abs() * relative + absolute) * 1.001).all()


BAD: dict[str, tuple[torch.Tensor, str, dict[str, Any], str]] = {
    "unknown": (torch.ones(4, 4), "float8", {}, "unknown format 'float8'; did you mean"),
    "calibrated": (torch.ones(4, 4), "awq_w4a16", {}, "requires calibration elsewhere"),
    "setting": (torch.ones(4, 4), "int8_tensorwise", {"rotated": True}, r"found settings \['rotated'\]"),
    "rank": (torch.ones(4, 4, 1), "nvfp4", {}, r"found shape \(4, 4, 1\), expected two dimensions"),
    "columns": (
        torch.ones(4, 100),
        "convrot_w4a4",
        {},
        "found 100 columns, expected a multiple of convrot",
    ),
    "rotation": (torch.ones(4, 128), "convrot_w4a4", {"convrot_groupsize": 128}, "expected a power of 4"),
    "numbers": (torch.full((4, 4), torch.inf), "float8_e4m3fn", {}, "infinite or undefined numbers"),
    "undefined": (torch.full((4, 4), torch.nan), "int8_tensorwise", {}, "infinite or undefined numbers"),
    "type": (torch.ones(4, 4, dtype=torch.int32), "float8_e4m3fn", {}, "found torch.int32 of shape"),
    "empty": (torch.ones(0, 4), "float8_e4m3fn", {}, r"of shape \(0, 4\)"),
}


def row_errors(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (values - exact).norm(dim=1) / exact.norm(dim=1)


@pytest.mark.parametrize("form", ["fp8 rows", "int8 rows"])
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "by chance"])
def test_rows_of_very_different_sizes_keep_their_own_scales_when_they_go_back(form: str, seed: int | None) -> None:
    name, options = FORMS[form]
    weight = draw([64, 256], 3, 0.05, torch.float32) * torch.logspace(-6, 0, 64).unsqueeze(1)
    packed = quantize(weight, name, options)
    assert row_errors(packed.unpack(torch.float32), weight).max() < 0.04
    back = requantize(weight, packed, seed)
    assert row_errors(back.unpack(torch.float32), weight).max() < 0.06
    assert stored_bytes(back) == stored_bytes(packed)


def stored_as(packed: PackedWeight, **forms: tuple[torch.dtype, tuple[int, ...]]) -> PackedWeight:
    """`packed` with parts of other dtypes and shapes: codes as the same bits, scales as near numbers."""
    parts = dict(packed.parts)
    for name, (dtype, shape) in forms.items():
        part = parts[name]
        parts[name] = (part.view(dtype) if dtype.itemsize == 1 else part.to(dtype)).reshape(shape)
    return packed_weight(packed.codec, parts, packed.shape, packed.dtype)


AS_OTHERS_STORE_THEM = {
    "fp8 (1,)": ("fp8", {"weight_scale": (torch.float32, (1,))}),
    "fp8 half": ("fp8", {"weight_scale": (torch.float16, ())}),
    "e5m2 half": ("fp8 e5m2", {"weight_scale": (torch.float16, (1, 1))}),
    "fp8 rows half": ("fp8 rows", {"weight_scale": (torch.bfloat16, (64,))}),
    "int8 bfloat16": ("int8", {"weight_scale": (torch.bfloat16, (1,))}),
    "int8 rows": ("int8 rows", {"weight_scale": (torch.float16, (64,))}),
    "rotated": ("int8 rotated", {"weight_scale": (torch.float16, (64,))}),
    "mxfp8 bytes": ("mxfp8", {"weight_scale": (torch.uint8, (128, 8))}),
    "nvfp4 (1,)": ("nvfp4", {"weight_scale_2": (torch.float32, (1,))}),
    "w4a4 bytes": ("w4a4", {"weight": (torch.uint8, (64, 128)), "weight_scale": (torch.float16, (64, 1))}),
    "w4a8 bytes": ("w4a8", {"weight": (torch.uint8, (64, 128))}),
}


@pytest.mark.parametrize("case", AS_OTHERS_STORE_THEM)
def test_a_weight_goes_back_with_the_shapes_and_types_that_it_was_stored_with(case: str) -> None:
    form, changes = AS_OTHERS_STORE_THEM[case]
    like = stored_as(pack(form), **changes)
    exact = draw([64, 256], 4, 0.05, torch.float32)
    back = requantize(exact, like)
    assert {k: (p.dtype, p.shape) for k, p in back.parts.items()} == {
        k: (p.dtype, p.shape) for k, p in like.parts.items()
    }
    assert error(back.unpack(torch.float32), exact) < WORST[form] * 1.1


def test_rotated_columns_with_one_scale_for_all_do_not_go_back() -> None:
    packed = pack("int8 rotated")
    one = packed_weight(packed.codec, {**packed.parts, "weight_scale": torch.tensor(0.001)}, packed.shape, packed.dtype)
    assert can_requantize(packed)
    assert not can_requantize(one)
    assert requantize_scratch_bytes(one) == 0


@EVERY
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "by chance"])
def test_going_back_to_storage_takes_no_more_memory_than_it_says(form: str, seed: int | None) -> None:
    """What the CPU's allocator saw, the insides of the package included."""
    like = pack(form, rows=2048)
    values = like.unpack(torch.float32) * 1.1
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        back = requantize(values, like, seed)
    events = sorted((e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=_start)
    alive_bytes = list(itertools.accumulate(e.nbytes() for e in events))
    assert alive_bytes[-1] >= stored_bytes(back)
    taken_bytes = max(alive_bytes) - stored_bytes(back)
    assert taken_bytes <= requantize_scratch_bytes(like) <= 3 * taken_bytes + (CHUNK_VALUES * CHUNK_SCRATCH_BYTES)


def _start(event: Any) -> int:
    return int(event.start_ns())


@pytest.mark.parametrize("form", ["fp8", "fp8 e5m2", "fp8 rows", "int8", "int8 rows"])
@pytest.mark.parametrize("seed", [None, 5], ids=["nearest", "by chance"])
def test_a_simulated_device_sees_no_more_taken_than_said(form: str, seed: int | None) -> None:
    sim.install()
    sim.configure(0, 1 << 26)
    like = pack(form, rows=1024).to("sim:0")
    assert isinstance(like, PackedWeight)
    values = like.unpack(torch.float32)
    before_bytes = sim.memory_stats(0).used_bytes
    sim.reset_peak(0)
    back = requantize(values, like, seed)
    taken_bytes = sim.memory_stats(0).peak_bytes - before_bytes - stored_bytes(back)
    assert values.nbytes <= taken_bytes <= requantize_scratch_bytes(like)


BAD_SCALES: dict[str, tuple[str, torch.Tensor, str]] = {
    "zero": ("fp8", torch.tensor(0.0), "from 0 to 0, expected finite floating point numbers above 0"),
    "undefined": ("fp8", torch.tensor(torch.nan), "from nan to nan, expected finite"),
    "infinite": ("int8", torch.tensor(torch.inf), "from inf to inf, expected finite"),
    "one zero row": ("int8", torch.arange(64.0), "from 0 to 63, expected finite"),
    "below zero": ("fp8 e5m2", torch.tensor(-1.0), "from -1 to -1"),
    "shape": ("fp8", torch.ones(63), r"found a scale of shape \(63,\), expected \(\) or .*\(64, 1\)"),
    "columns": ("int8", torch.ones(1, 256), r"found a scale of shape \(1, 256\)"),
    "type": ("int8", torch.tensor(1), "torch.int64 from 1 to 1"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_a_scale_that_is_none_is_refused_by_name(case: str) -> None:
    form, scale, message = BAD_SCALES[case]
    with pytest.raises(BadQuantization, match=f"^blocks.3.weight: .*{message}"):
        quantize(torch.ones(64, 256), FORMS[form][0], scale=scale, name="blocks.3.weight")


@pytest.mark.parametrize("case", BAD)
def test_what_a_format_does_not_take_is_refused_by_name(case: str) -> None:
    weight, name, options, message = BAD[case]
    with pytest.raises(BadQuantization, match=f"^blocks.3.weight: .*{message}"):
        quantize(weight, name, options, name="blocks.3.weight")
