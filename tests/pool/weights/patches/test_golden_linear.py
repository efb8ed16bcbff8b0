"""A patched Linear in five storage types: the stored bytes and the outputs that ComfyUI gets, merged and on the fly."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.patches.full_weights import Difference
from modelpool.pool.weights.patches.patch_set import LowRank, PatchSet, WeightPatch
from modelpool.pool.weights.patches.stochastic_rounding import round_to, seed_of
from tests.pool.weights.patches.golden_adapters import GOLDEN

GOLDEN_TENSORS = load_file(GOLDEN / "patcher.safetensors")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
STRENGTH, ALPHA = 0.7, 2.0


@dataclass(frozen=True)
class Row:
    """One storage type's inputs."""

    weight: Tensor
    bias: Tensor
    patches: PatchSet
    x: Tensor

    def merged(self, name: str) -> Tensor:
        """A parameter with its patches, stored again as it was stored."""
        stored = {"layer.weight": self.weight, "layer.bias": self.bias}[name]
        patched = apply_weight_functions(stored, self.patches.functions(name), torch.device("cpu"), torch.float32)
        return round_to(patched, stored.dtype, seed_of(name))


def row_of(dtype: torch.dtype) -> Row:
    generator = torch.Generator().manual_seed(9)
    shapes = ((24, 16), (24,), (24, 4), (4, 16), (24,), (3, 16))
    weight, bias, up, down, bias_delta, x = (torch.randn(s, generator=generator) for s in shapes)
    lora = LowRank(up * 0.1, down * 0.1, ALPHA / 4)
    patches = (
        WeightPatch("layer.weight", "lora", lora, STRENGTH),
        WeightPatch("layer.bias", "bias", Difference(bias_delta * 0.1), STRENGTH),
    )
    return Row(weight.to(dtype), bias.to(dtype), PatchSet(patches), x)


def run(weight: Tensor, bias: Tensor, x: Tensor, patches: PatchSet) -> Tensor:
    layer = nn.Linear(16, 24)
    layer.weight, layer.bias = (nn.Parameter(t, requires_grad=False) for t in (weight, bias))
    swap_to_casting(layer)
    for name in ("weight", "bias"):
        set_weight_functions(layer, name, patches.functions(f"layer.{name}"))
    with torch.no_grad(), compute(torch.device("cpu"), torch.float32):
        y = layer(x)
        assert isinstance(y, Tensor)
        return y


def golden(dtype: torch.dtype, name: str) -> Tensor:
    return GOLDEN_TENSORS[f"{str(dtype).removeprefix('torch.')}.{name}"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_bytes(dtype: torch.dtype) -> None:
    row = row_of(dtype)
    for name in ("weight", "bias"):
        found, expected = row.merged(f"layer.{name}"), golden(dtype, name)
        if dtype is torch.float32:
            assert torch.allclose(found, expected, atol=1e-6, rtol=0)
        elif dtype.itemsize == 1:
            assert torch.equal(found.view(torch.uint8), expected)
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs(dtype: torch.dtype) -> None:
    """Plain, merged and computed on the fly; sums of 16 products around 1 differ by a few float32 roundings."""
    row = row_of(dtype)
    found = {
        "y_base": run(row.weight, row.bias, row.x, PatchSet()),
        "y_merged": run(row.merged("layer.weight"), row.merged("layer.bias"), row.x, PatchSet()),
        "y_lowvram": run(row.weight, row.bias, row.x, row.patches),
    }
    for name, y in found.items():
        assert torch.allclose(y, golden(dtype, name), atol=4e-6, rtol=0), name


def test_on_the_fly_is_merged_bit_for_bit_in_float32() -> None:
    row = row_of(torch.float32)
    merged = run(row.merged("layer.weight"), row.merged("layer.bias"), row.x, PatchSet())
    assert torch.equal(run(row.weight, row.bias, row.x, row.patches), merged)
