"""What each adapter computes, against its formula written out, and what must hold for any numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import Additive, Padded
from modelpool.pool.weights.patches.dora import DoRA
from modelpool.pool.weights.patches.full_weights import (
    Difference,
    ModelDifference,
    PatchedWeight,
    Replacement,
    padded_difference,
)
from modelpool.pool.weights.patches.glora import glora_of
from modelpool.pool.weights.patches.loha import HadamardFactor, LoHa
from modelpool.pool.weights.patches.lokr import KroneckerFactor, LoKr
from modelpool.pool.weights.patches.lora import LowRank, LowRankSum, TuckerLowRank
from modelpool.pool.weights.patches.oft import BOFT, OFT, cayley
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightPatch


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))) * 0.3


CONV = (8, 6, 3, 3)


def tucker_by_hand(core: Tensor, a_RO: Tensor, b_RI: Tensor) -> Tensor:
    made = torch.zeros(a_RO.shape[1], b_RI.shape[1], *core.shape[2:])
    for r in range(core.shape[0]):
        for s in range(core.shape[1]):
            made += core[r, s] * a_RO[r][:, None, None, None] * b_RI[s][None, :, None, None]
    return made


def test_loha_of_convolutions() -> None:
    flat = LoHa(
        HadamardFactor(random(8, 2), random(2, 54)), HadamardFactor(random(8, 2, seed=1), random(2, 54, seed=1)), 0.5
    )
    expected = 0.5 * (flat.first.a @ flat.first.b) * (flat.second.a @ flat.second.b)
    assert torch.allclose(flat.delta(torch.zeros(CONV)), expected.reshape(CONV), atol=1e-6)
    cores = [HadamardFactor(random(2, 8, seed=s), random(2, 6, seed=s), random(2, 2, 3, 3, seed=s)) for s in (1, 2)]
    hands = [tucker_by_hand(f.core, f.a, f.b) for f in cores if f.core is not None]
    assert torch.allclose(LoHa(*cores, 1.0).delta(torch.zeros(CONV)), hands[0] * hands[1], atol=1e-6)


@pytest.mark.parametrize("outer_is_whole", [True, False])
@pytest.mark.parametrize("inner", ["whole", "decomposed", "core", "3d"])
def test_lokr_is_torchs_kronecker_product(outer_is_whole: bool, inner: str) -> None:
    outer = KroneckerFactor(random(4, 2)) if outer_is_whole else KroneckerFactor(None, random(4, 2), random(2, 2))
    factors = {
        "whole": KroneckerFactor(random(2, 3, 3, 3)),
        "decomposed": KroneckerFactor(None, random(2, 2), random(2, 27)),
        "core": KroneckerFactor(None, random(2, 2), random(2, 3), random(2, 2, 3, 3)),
        "3d": KroneckerFactor(random(2, 3, 3, 3, 3)),
    }
    like = torch.zeros(())
    factor = factors[inner]
    made = factor.compute(like).reshape(2, 3, 3, 3, *([3] if inner == "3d" else []))
    kernel = (1,) * (made.ndim - 2)
    expected = 0.7 * torch.kron(outer.compute(like).reshape(4, 2, *kernel), made.contiguous())
    delta = LoKr(outer, factor, 0.7).delta(torch.zeros(expected.shape))
    assert torch.allclose(delta, expected, atol=1e-6)


@pytest.mark.parametrize("is_old", [False, True])
def test_glora_of_convolutions_turns_channels(is_old: bool) -> None:
    a1, a2, b1, b2 = random(6, 2), random(2, 6), random(8, 2), random(2, 54)
    files = (a2, a1, b2, b1) if is_old else (a1, a2, b1, b2)
    weight = random(*CONV, seed=5)
    expected = 0.5 * (torch.einsum("oikl,ir,rj->ojkl", weight, a1, a2) + (b1 @ b2).reshape(CONV))
    assert torch.allclose(glora_of(*files, 1.0, CONV).delta(weight), expected, atol=1e-6)


def test_glora_that_fits_nothing() -> None:
    with pytest.raises(PatchFailed, match="share no rank"):
        glora_of(random(6, 2), random(3, 6), random(8, 2), random(2, 6), None, (8, 6))
    with pytest.raises(PatchFailed, match="are not for a weight of shape"):
        glora_of(random(6, 2), random(2, 6), random(8, 2), random(2, 5), None, (8, 6))


def test_lora_of_one_dimensional_convolutions() -> None:
    value = LowRank(random(8, 2), random(2, 18), 1.0)
    weight = random(8, 6, 3)
    assert torch.allclose(
        value.apply(weight.clone(), 0.5, None), weight + 0.5 * (value.up_OR @ value.down_RI).reshape(8, 6, 3)
    )


def test_lora_with_a_core_is_two_contractions() -> None:
    value = TuckerLowRank(random(8, 2, 1, 1), random(3, 6, 1, 1), random(2, 3, 3, 3), 0.5)
    core_as = torch.einsum("mnkl,om,ni->oikl", value.core, value.up[..., 0, 0], value.down[..., 0, 0])
    assert torch.allclose(value.delta(torch.zeros(CONV)), 0.5 * core_as, atol=1e-6)


@pytest.mark.parametrize("cap", [0.0, 0.1])
def test_rotations_keep_lengths(cap: float) -> None:
    weight = random(12, 7)
    for value in (OFT(random(3, 4, 4), None, cap, (12, 7)), BOFT(random(1, 3, 4, 4), None, cap, (12, 7))):
        turned = weight + value.delta(weight)
        assert torch.allclose(turned.norm(dim=0), weight.norm(dim=0), atol=1e-5)
        assert not torch.allclose(turned, weight, atol=1e-3)


def test_a_cap_bounds_all_blocks_together() -> None:
    free, capped = cayley(random(3, 4, 4), 0.0), cayley(random(3, 4, 4), 0.05)
    identity = torch.eye(4)

    def skew_norm(turn: Tensor) -> float:
        return torch.linalg.vector_norm((turn - identity) @ torch.linalg.inv(turn + identity)).item()

    assert skew_norm(capped) == pytest.approx(0.05, rel=1e-3)
    assert skew_norm(free) > 0.5
    assert torch.allclose(cayley(random(3, 4, 4), 100.0), free, atol=1e-6)


def test_a_butterfly_of_one_stage_is_block_diagonal_after_a_shuffle() -> None:
    """With b = 2 the first stage pairs neighbours, so it is an OFT with blocks of two."""
    blocks = random(6, 2, 2)
    weight = random(12, 5)
    boft = BOFT(blocks[None], None, 0.0, (12, 5)).delta(weight)
    turn = cayley(blocks, 0.0)
    expected = torch.einsum("kmn,knc->kmc", turn, weight.reshape(6, 2, 5)).reshape(12, 5) - weight
    assert torch.allclose(boft, expected, atol=1e-6)


def test_magnitudes_are_the_lengths_of_the_result() -> None:
    """Of its rows, or of its columns; in a square weight, the shape of the magnitude tells which."""
    weight, numbers = random(6, 6), torch.linspace(0.5, 2, 6)
    for magnitude, axis in ((numbers, 1), (numbers[:, None], 1), (numbers[None], 0)):
        value = DoRA(Difference(random(6, 6, seed=3)), magnitude, (6, 6))
        assert torch.allclose(value.apply(weight.clone(), 1.0, None).norm(dim=axis), numbers, atol=1e-5)


def every_kind() -> dict[str, Additive]:
    lora = LowRank(random(24, 2), random(2, 16), 0.5)
    return {
        "lora": lora,
        "tucker": TuckerLowRank(random(24, 2, 1, 1), random(2, 4, 1, 1), random(2, 2, 2, 2), 1.0),
        "loha": LoHa(HadamardFactor(random(24, 2), random(2, 16)), HadamardFactor(random(24, 2), random(2, 16)), 1.0),
        "loha with cores": LoHa(
            HadamardFactor(random(2, 24), random(2, 4), random(2, 2, 2, 2)),
            HadamardFactor(random(2, 24), random(2, 4), random(2, 2, 2, 2)),
            1.0,
        ),
        "lokr": LoKr(KroneckerFactor(random(4, 4)), KroneckerFactor(random(6, 4)), 1.0),
        "glora": glora_of(random(16, 2), random(2, 16), random(24, 2), random(2, 16), None, (24, 16)),
        "oft": OFT(random(6, 4, 4), random(24, 1), 0.1, (24, 16)),
        "dora": DoRA(lora, random(24, 1), (24, 16)),
        "difference": Difference(random(24, 16)),
    }


@pytest.mark.parametrize("kind", every_kind())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_are_rows_of_the_whole(kind: str, dtype: torch.dtype) -> None:
    value, weight = every_kind()[kind], random(24, 16).to(dtype)
    delta = value.delta(weight)
    assert (delta.dtype, delta.shape) == (dtype, weight.shape)
    for start, count in ((0, 8), (8, 12), (20, 4), (0, 24)):
        part = value.rows(start, count)
        rows = weight[start : start + count]
        assert torch.allclose(part.delta(rows), delta[start : start + count], atol=1e-5)
        with pytest.raises(PatchFailed):
            part.check((count + 1, 16))


@pytest.mark.parametrize("kind", every_kind())
def test_factors_are_not_written(kind: str) -> None:
    value, weight = every_kind()[kind], random(24, 16)
    first = value.apply(weight.clone(), 0.7, None)
    assert torch.equal(value.apply(weight.clone(), 0.7, None), first)
    assert torch.allclose(value.apply(weight.clone(), 0.0, None), weight, atol=1e-6)


@pytest.mark.parametrize("kind", every_kind())
def test_a_strided_weight_is_as_good(kind: str) -> None:
    value, weight = every_kind()[kind], random(24, 16)
    inside = torch.zeros(24, 20)
    inside[:, 2:18] = weight
    assert torch.allclose(value.apply(inside[:, 2:18], 0.7, None), value.apply(weight.clone(), 0.7, None), atol=1e-6)
    assert torch.equal(inside[:, :2], torch.zeros(24, 2))


def test_padding() -> None:
    weight = random(4, 3)
    value = Padded(LowRank(random(5, 2), random(2, 6), 1.0), (5, 6))
    padded = torch.zeros(5, 6)
    padded[:4, :3] = weight
    assert torch.allclose(value.apply(weight, 0.5, None), padded + 0.5 * value.value.delta(padded))
    for shape in ((6, 3), (4, 3, 1)):
        with pytest.raises(PatchFailed, match="expected one that fits into"):
            value.patched_shape(shape)
    assert torch.equal(padded_difference(random(5, 6)).apply(weight, 0.0, None), padded)


@pytest.mark.parametrize(
    "value",
    [
        Difference(torch.ones(3, 2)),
        Replacement(torch.ones(3, 2)),
        ModelDifference(torch.ones(3, 2), torch.ones(3, 2)),
        PatchedWeight(torch.ones(3, 2)),
        BOFT(torch.ones(1, 2, 2, 2), None, 0.0, (4, 2)),
        OFT(torch.ones(2, 2, 2), None, 0.0, (4, 2)),
        DoRA(Difference(torch.ones(3, 2)), torch.ones(5, 1), (3, 2)),
        LoKr(KroneckerFactor(torch.ones(1, 2)), KroneckerFactor(torch.ones(3, 1)), 1.0),
    ],
    ids=lambda v: type(v).__name__,
)
def test_other_shapes_are_refused(value: Additive) -> None:
    for shape in ((3, 3), (2, 3), (3,)):
        with pytest.raises(PatchFailed):
            value.patched_shape(shape)
        with pytest.raises(PatchFailed):
            value.apply(torch.ones(shape), 1.0, None)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_factors_in_any_float_type_are_summed(dtype: torch.dtype) -> None:
    made = PatchSet(
        tuple(
            WeightPatch("w", str(s), LowRank(random(8, 2, seed=s).to(dtype), random(2, 6, seed=s).to(dtype), 1.0))
            for s in (1, 2)
        )
    )
    (function,) = made.functions("w")
    assert isinstance(function.value, LowRankSum)
    expected = torch.zeros(8, 6)
    for patch in made.patches:
        expected = patch(expected)
    assert torch.allclose(function(torch.zeros(8, 6)), expected, atol=1e-6)
    factors = made.low_rank_factors("w")
    assert factors is not None
    assert torch.allclose(factors[0] @ factors[1], expected, atol=1e-6)


def test_a_butterfly_is_blended_stage_by_stage() -> None:
    """Half a strength: each stage is halfway between its rotation and none, and the rescaling halfway to one."""
    blocks, rescale, weight = random(2, 2, 4, 4), 1 + random(8, 1), random(8, 5)
    value = BOFT(blocks, rescale, 0.0, (8, 5))
    identity = torch.eye(4)
    turn = 0.5 * cayley(blocks, 0.0) + 0.5 * identity
    rows = weight
    for stage, half in ((0, 2), (1, 4)):
        order = torch.arange(8).reshape(-1, 2, half).transpose(1, 2).reshape(-1)
        mixed = torch.block_diag(*turn[stage]) @ rows[order]
        rows = torch.empty_like(mixed).index_copy_(0, order, mixed)
    assert torch.allclose(value.apply(weight.clone(), 0.5, None), rows * (0.5 + 0.5 * rescale), atol=1e-6)
    assert torch.allclose(value.apply(weight.clone(), 0.0, None), weight, atol=1e-6)


def test_scratch_is_told_of_weights_that_dwarf_their_blocks() -> None:
    device = open_device("sim", 0, None)
    weight = random(8, 400)
    for value in (BOFT(random(1, 2, 4, 4), None, 0.0, (8, 400)), OFT(random(2, 4, 4), None, 0.0, (8, 400))):
        there = weight.to(device.torch_device)
        device.memory.reset_peak()
        before_bytes = device.memory.peak_bytes()
        value.apply(there, 0.5, None)
        taken_bytes = device.memory.peak_bytes() - before_bytes
        assert 0.4 * value.working_bytes < taken_bytes <= value.working_bytes
