"""Patch sets: fused weights, the ones left alone, what digests cover, and that all ways give the same weight."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.values.specs.spec import UNPATCHED
from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.patches.dora import DoRA
from modelpool.pool.weights.patches.full_weights import Difference, PatchedWeight, Replacement, padded_difference
from modelpool.pool.weights.patches.lora import LowRankSum
from modelpool.pool.weights.patches.patch_set import DeltaFunction, LowRank, Offset, PatchSet, PatchValue, WeightPatch
from tests.each_case import each_case
from tests.pool.weights.patches.golden_adapters import adapter_cases

CPU = torch.device("cpu")
SHAPE = (12, 10)
OFFSETS = (None, Offset(0, 0, 4), Offset(0, 4, 4), Offset(0, 2, 8), Offset(1, 3, 5))


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def low_rank(
    seed: int, strength: float = 1.0, offset: Offset | None = None, dtype: torch.dtype = torch.float32
) -> WeightPatch:
    rows, columns = SHAPE if offset is None else offset.shape_of(SHAPE)
    value = LowRank(random(rows, 3, seed=seed).to(dtype), random(3, columns, seed=seed + 100).to(dtype), 0.5)
    return WeightPatch("w", f"lora {seed}", value, strength, offset=offset)


def difference(seed: int, strength: float = 1.0) -> WeightPatch:
    return WeightPatch("w", f"diff {seed}", Difference(random(*SHAPE, seed=seed)), strength)


def patched(patches: PatchSet, weight: Tensor, device: torch.device = CPU) -> Tensor:
    return apply_weight_functions(weight, patches.functions("w"), device, torch.float32)


def one_by_one(patches: PatchSet, weight: Tensor) -> Tensor:
    """Each patch alone, in float64."""
    working = weight.double()
    for patch in patches.patches:
        working = patch(working)
    return working


LOW_RANK = st.builds(
    low_rank,
    st.integers(0, 20),
    st.sampled_from([0.0, 1.0, -0.5, 0.3]),
    st.sampled_from(OFFSETS),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
PATCHES = st.lists(
    st.one_of(LOW_RANK, st.builds(difference, st.integers(0, 20), st.sampled_from([0.0, 1.0, 0.25]))), max_size=6
)


@settings(max_examples=60, deadline=None)
@given(PATCHES)
def test_all_at_once_is_one_after_the_other(patches: list[WeightPatch]) -> None:
    made = PatchSet(tuple(patches))
    weight = random(*SHAPE, seed=7)
    assert torch.allclose(patched(made, weight).double(), one_by_one(made, weight), atol=1e-4, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.lists(LOW_RANK, min_size=1, max_size=5))
def test_factors_make_what_the_patches_add(patches: list[WeightPatch]) -> None:
    made = PatchSet(tuple(patches))
    factors = made.low_rank_factors("w", SHAPE)
    if factors is None:
        assert not made.functions("w")
        return
    up, down = factors
    added = one_by_one(made, torch.zeros(SHAPE))
    assert (up.dtype, up.device.type) == (torch.float32, "cpu")
    assert torch.allclose((up @ down).double(), added, atol=1e-4)
    if all(p.offset is None for p in made.patches_for("w")):
        assert made.low_rank_factors("w") is not None
    else:
        assert made.low_rank_factors("w") is None


@settings(max_examples=60, deadline=None)
@given(PATCHES, PATCHES)
def test_what_came_and_went_leaves_no_trace(kept: list[WeightPatch], left: list[WeightPatch]) -> None:
    """A, A and B, A again: equal digests, equal bytes; a set is a value."""
    a = PatchSet(tuple(kept))
    both = a.with_patches(left)
    again = PatchSet(both.patches[: len(kept)])
    weight = random(*SHAPE, seed=7).half()
    before = weight.clone()
    assert (again.digest, again.digest_for(["w"])) == (a.digest, a.digest_for(["w"]))
    first = patched(a, weight)
    patched(both, weight)
    assert torch.equal(patched(again, weight), first)
    assert torch.equal(weight, before)


def test_plain_patches_in_a_row_are_one() -> None:
    lora, diff = low_rank(1), difference(2)
    weakened = replace(low_rank(3), strength_model=0.5)
    made = PatchSet(
        (lora, low_rank(4), low_rank(5, offset=OFFSETS[1]), diff, low_rank(6), weakened, low_rank(7), low_rank(8))
    )
    fused = [type(f.value) for f in made.functions("w")]
    assert fused == [LowRankSum, Difference, LowRank, LowRank, LowRankSum]
    assert made.functions("w")[0].value.working_bytes >= 3 * 4 * (12 + 10)


def test_order_matters() -> None:
    """A replacement takes away what was before it; the digests say so."""
    new = WeightPatch("w", "new", Replacement(random(*SHAPE, seed=5)))
    one, other = PatchSet((new, difference(1))), PatchSet((difference(1), new))
    weight = random(*SHAPE, seed=7)
    assert one.digest != other.digest
    assert torch.equal(patched(other, weight), random(*SHAPE, seed=5))
    assert torch.equal(patched(one, weight), random(*SHAPE, seed=5) + random(*SHAPE, seed=1))


@each_case("name", adapter_cases())
def test_at_strength_zero_no_weight_passes_through_anything(name: str) -> None:
    """But for what acts at any strength: a replacement, and a shape that grows."""
    case = adapter_cases()[name]
    idle = PatchSet(tuple(replace(p, strength=0.0, strength_model=1.0) for p in case.patches))
    if name.startswith("set") or name.endswith(("_pad", "pad_weight")):
        assert idle.functions("k")
        return
    assert (idle.digest, idle.parameters, idle.functions("k")) == (UNPATCHED, frozenset(), ())
    assert len(idle.patches) == len(case.patches)


@each_case("name", adapter_cases())
def test_shapes_are_told_ahead_and_bytes_are_enough(name: str) -> None:
    """On the simulated device: the same numbers, the shape that was said, and no more scratch than was said."""
    case = adapter_cases()[name]
    patches = PatchSet(case.patches)
    assert patches.patched_shape("k", tuple(case.weight.shape)) == tuple(case.expected.shape)
    device = open_device("sim", 0, None)
    weight = case.weight.float().to(device.torch_device)
    for function in patches.functions("k"):
        device.memory.reset_peak()
        before_bytes = device.memory.peak_bytes()
        weight = function(weight)
        assert device.memory.peak_bytes() - before_bytes <= function.value.working_bytes
    assert torch.allclose(weight.cpu(), patched_on_cpu(case.patches, case.weight), atol=1e-6)


def patched_on_cpu(patches: tuple[WeightPatch, ...], weight: Tensor) -> Tensor:
    return apply_weight_functions(weight, PatchSet(patches).functions("k"), CPU, torch.float32)


VARIANTS = {
    "identity": {"identity": "other"},
    "strength": {"strength": 0.5},
    "strength of the model": {"strength_model": 0.5},
    "offset": {"offset": Offset(0, 0, 12)},
    "function": {"function": DeltaFunction("negate", torch.neg)},
    "parameter": {"parameter": "v"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_digests_cover_everything(name: str) -> None:
    patch = low_rank(1)
    other = replace(patch, **VARIANTS[name])  # type: ignore[arg-type] # one field of several types
    assert PatchSet((patch,)).digest != PatchSet((other,)).digest


def test_digests_of_parameters_are_apart() -> None:
    a, b = low_rank(1), replace(low_rank(2), parameter="v")
    assert PatchSet((a, b)).digest_for(["w"]) == PatchSet((a,)).digest_for(["w"])
    assert PatchSet((a, b)).digest_for(["u"]) == UNPATCHED


def test_an_error_names_the_patch_and_the_weight_stays() -> None:
    weight = random(5, 5)
    before = weight.clone()
    made = PatchSet((WeightPatch("w", "file:x", Difference(random(5, 4))),))
    with pytest.raises(PatchFailed, match=r"patch 'file:x' of 'w': .*5 x 4 for a weight of shape \(5, 5\)"):
        patched(made, weight)
    with pytest.raises(PatchFailed, match="patch 'file:x' of 'w'"):
        made.check({"w": (5, 5)})
    assert torch.equal(weight, before)


def test_other_errors_stay_what_they_are_and_name_the_patch() -> None:
    def fail(delta: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    made = PatchSet((replace(low_rank(1), function=DeltaFunction("fail", fail)),))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        patched(made, random(*SHAPE))
    assert caught.value.__notes__ == ["while applying patch 'lora 1' of 'w'"]


@pytest.mark.parametrize("offset", [Offset(0, 10, 5), Offset(2, 0, 1), Offset(0, -1, 2)])
def test_parts_that_are_not_there(offset: Offset) -> None:
    with pytest.raises(PatchFailed, match="expected one with the indices"):
        offset.of(torch.zeros(SHAPE))


def test_a_part_of_a_weight_cannot_grow() -> None:
    patch = WeightPatch("w", "x", padded_difference(random(6, 12)), offset=Offset(0, 0, 4))
    with pytest.raises(PatchFailed, match="expected the shape to stay"):
        patch.patched_shape(SHAPE)


def test_float64_stays_float64() -> None:
    made = PatchSet((low_rank(1), low_rank(2)))
    weight = random(*SHAPE).double()
    result = apply_weight_functions(weight, made.functions("w"), CPU, torch.float64)
    assert torch.allclose(result, one_by_one(made, weight), atol=1e-14)


def test_convolutions_are_summed_too() -> None:
    values = [LowRank(random(8, 2, seed=s), random(2, 27, seed=s), 1.0) for s in (1, 2)]
    made = PatchSet(tuple(WeightPatch("w", str(i), v) for i, v in enumerate(values)))
    weight = random(8, 3, 3, 3)
    assert len(made.functions("w")) == 1
    expected = weight + sum((v.up_OR @ v.down_RI).reshape(weight.shape) for v in values)
    assert torch.allclose(patched(made, weight), expected, atol=1e-5)


def test_a_weaker_model_alone_is_a_patch() -> None:
    made = PatchSet((replace(low_rank(1, 0.0), strength_model=0.5),))
    weight = random(*SHAPE)
    assert made.digest != UNPATCHED
    assert torch.equal(patched(made, weight), 0.5 * weight)


def test_a_low_rank_patch_with_a_function_stays_apart() -> None:
    turned = replace(low_rank(2), function=DeltaFunction("negate", torch.neg))
    made = PatchSet((low_rank(1), turned, low_rank(3)))
    weight = random(*SHAPE)
    assert torch.allclose(patched(made, weight).double(), one_by_one(made, weight), atol=1e-5)
    assert made.low_rank_factors("w", SHAPE) is None


def test_another_lora_in_place_of_one_touches_their_own_weights_only() -> None:
    """A and B, then A and C: what only A is for has the same digest."""
    a = (low_rank(1), replace(low_rank(1), parameter="a"))
    b, c = replace(low_rank(2), parameter="b"), replace(low_rank(3), parameter="c")
    before, after = PatchSet((*a, b)), PatchSet((*a, c))
    changed = {name for name in "wabc" if before.digest_for([name]) != after.digest_for([name])}
    assert changed == {"b", "c"}


@pytest.mark.parametrize("strengths", [(float("nan"), 1.0), (float("inf"), 1.0), (1.0, float("nan"))])
def test_strengths_are_finite(strengths: tuple[float, float]) -> None:
    with pytest.raises(PatchFailed, match=r"patch 'x' of 'w': found strength .* expected finite numbers"):
        WeightPatch("w", "x", Difference(random(2, 2)), strengths[0], strength_model=strengths[1])


def test_a_patch_for_a_parameter_that_is_not_there() -> None:
    with pytest.raises(PatchFailed, match="patch 'lora 1' of 'w': found no such parameter among 1"):
        PatchSet((low_rank(1),)).check({"v": SHAPE})


@pytest.mark.parametrize("offsets", [(None, None, None), (OFFSETS[1], OFFSETS[1], OFFSETS[2])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sum_moves_its_factors_once_and_takes_what_it_said(
    offsets: tuple[Offset | None, ...], dtype: torch.dtype
) -> None:
    """Factors cross the bus side by side, in storage dtype, with their strengths; the numbers are the CPU's."""
    device = open_device("sim", 0, None)
    patches = tuple(low_rank(seed, 0.5, offset, dtype) for seed, offset in enumerate(offsets))
    (function,) = PatchSet(patches).functions("w")
    weight = random(*SHAPE).to(device.torch_device)
    factor_bytes = sum(
        t.nbytes for v in (p.value for p in patches) if isinstance(v, LowRank) for t in (v.up_OR, v.down_RI)
    )
    device.memory.reset_peak()
    before_bytes, before = device.memory.peak_bytes(), device.memory.transfers()
    patched_there = function(weight)
    after = device.memory.transfers()
    assert device.memory.peak_bytes() - before_bytes <= function.value.working_bytes
    assert after.h2d_count - before.h2d_count == (3 if offsets[0] is None else 3 + 2)
    scale_bytes = after.h2d_bytes - before.h2d_bytes - factor_bytes
    assert 0 <= scale_bytes <= 8 * 9
    assert torch.allclose(patched_there.cpu(), patched(PatchSet(patches), random(*SHAPE)), atol=1e-6)


@each_case("offset", OFFSETS)
@each_case("kind", ["low rank", "difference", "dora", "padded"])
def test_what_a_function_on_the_delta_takes_is_counted(kind: str, offset: Offset | None) -> None:
    device = open_device("sim", 0, None)
    shape = SHAPE if offset is None else offset.shape_of(SHAPE)
    low = LowRank(random(shape[0], 2), random(2, shape[1]), 1.0)
    values: dict[str, PatchValue] = {
        "low rank": low,
        "difference": Difference(random(*shape)),
        "dora": DoRA(Difference(random(*shape)), random(shape[0], 1), shape),
        "padded": padded_difference(random(*shape) if offset else random(SHAPE[0] + 6, SHAPE[1])),
    }
    function = DeltaFunction("double", lambda delta: delta * 2)
    patch = WeightPatch("w", "x", values[kind], 0.5, offset=offset, function=function)
    weight = random(*SHAPE).to(device.torch_device)
    device.memory.reset_peak()
    before_bytes = device.memory.peak_bytes()
    patch(weight)
    taken_bytes = device.memory.peak_bytes() - before_bytes
    assert taken_bytes <= patch.working_bytes_for(SHAPE)
    part = patch.patched_shape(SHAPE) if offset is None else shape
    assert patch.working_bytes_for(SHAPE) == values[kind].working_bytes + 12 * part[0] * part[1]
    plain = replace(patch, function=None)
    assert plain.working_bytes_for(SHAPE) == values[kind].working_bytes
    outer = PatchedWeight(random(*SHAPE), (patch,)).working_bytes if kind != "padded" else 0
    assert kind == "padded" or outer - PatchedWeight(random(*SHAPE), (plain,)).working_bytes == 12 * part[0] * part[1]


def test_the_hungriest_low_rank_patch_with_a_function_takes_more_than_its_factors() -> None:
    """Its factors alone would be a fraction of the bytes."""
    device = open_device("sim", 0, None)
    value = LowRank(random(64, 1), random(1, 64), 1.0)
    patch = WeightPatch("w", "x", value, function=DeltaFunction("double", lambda delta: delta * 2))
    weight = random(64, 64).to(device.torch_device)
    device.memory.reset_peak()
    before_bytes = device.memory.peak_bytes()
    patch(weight)
    taken_bytes = device.memory.peak_bytes() - before_bytes
    assert value.working_bytes < taken_bytes <= patch.working_bytes_for((64, 64))


@pytest.mark.parametrize("kind", ["difference", "dora"])
def test_a_function_may_write_into_the_delta(kind: str) -> None:
    tensor, weight = random(*SHAPE), random(*SHAPE, seed=1)
    kept = tensor.clone()
    value: PatchValue = Difference(tensor)
    if kind == "dora":
        value = DoRA(Difference(tensor), random(SHAPE[0], 1, seed=2), SHAPE)
    patch = WeightPatch("w", "x", value, function=DeltaFunction("double", lambda delta: delta.mul_(2)))
    first, second = patch(weight.clone()), patch(weight.clone())
    assert torch.equal(tensor, kept)
    assert torch.equal(first, second)
