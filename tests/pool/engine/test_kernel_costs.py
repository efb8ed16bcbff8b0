"""The kernels for quantized weights: which of them a device has, what each costs, and that runs use the one that the
configuration requests."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from examples.shapes.checker import matches, read_image
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.devices.capabilities import cuda_capabilities, host_capabilities
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.engine.kernel_costs import KernelCost, kernel_costs
from modelpool.pool.engine.load_decisions import StoredFormat, products_kernel, stored_formats
from modelpool.pool.weights.ops.layer_choice import Products
from modelpool.pool.weights.patcher.weight_bytes import module_weights
from modelpool.pool.weights.quant.native_kernels import fp8_linear, linear_kernel, reference_kernel, reference_product
from modelpool.pool.weights.quant.quantize import quantize
from tests.pool.weights.quant.test_checkpoints import PROMPT, SHAPES, draw, quantized

GIB = 1 << 30
CPU = host_capabilities(DeviceKind.CPU, GIB)
AMPERE = cuda_capabilities("NVIDIA A100", (8, 0), 80 * GIB)
ADA = cuda_capabilities("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB)
BLACKWELL = cuda_capabilities("NVIDIA B200", (10, 0), 180 * GIB)
STORED = StoredFormat(layers=3, values=1000, stored_bytes=1100)


def by_kernel(costs: tuple[KernelCost, ...]) -> dict[str, KernelCost]:
    return {cost.kernel: cost for cost in costs}


@pytest.mark.parametrize(
    ("name", "card", "products", "used", "why"),
    [
        ("float8_e4m3fn", ADA, Products.AUTO, "native", "products = 'auto'"),
        ("F8_E4M3", ADA, Products.AUTO, "native", "products = 'auto'"),
        ("float8_e4m3fn", ADA, Products.EXACT, "unpack", "products = 'exact'"),
        ("float8_e4m3fn", AMPERE, Products.AUTO, "unpack", "it needs generation 8.9, NVIDIA A100 is 8.0"),
        ("F8_E5M2", ADA, Products.AUTO, "unpack", "only plain weights of type F8_E4M3"),
        ("nvfp4", ADA, Products.AUTO, "unpack", "it needs generation 10.0"),
        ("nvfp4", BLACKWELL, Products.AUTO, "native", "products = 'auto'"),
        ("bitsandbytes_nf4", BLACKWELL, Products.AUTO, "unpack", "no card multiplies it"),
        ("Q4_K", BLACKWELL, Products.AUTO, "unpack", "no card multiplies it"),
        ("int8_tensorwise", CPU, Products.AUTO, "unpack", "CPU has none"),
        ("float8_e4m3fn", CPU, Products.REFERENCE, "reference", "products = 'reference'"),
        ("nvfp4", CPU, Products.REFERENCE, "unpack", "CPU has none"),
    ],
)
def test_one_kernel_is_used_and_the_others_say_why_not(
    name: str, card: object, products: Products, used: str, why: str
) -> None:
    costs = kernel_costs({name: STORED, "BF16": STORED}, 2, card, products)  # type: ignore[arg-type]
    assert [cost.kernel for cost in costs if cost.is_used] == [used]
    found = by_kernel(costs)
    assert why in found["native" if used == "unpack" else used].why
    assert found["unpack"].traffic_bytes == 1100 + 2 * 2 * 1000
    assert found["native"].traffic_bytes == 1100
    assert found["native"].rate > found["unpack"].rate == 1.0
    assert all(cost.layers == 3 for cost in costs)


def test_what_plans_show_is_what_engines_decide() -> None:
    """Of every format and card, the kernel is native if and only if the engine has one."""
    for name in ("float8_e4m3fn", "F8_E4M3", "F8_E5M2", "nvfp4", "int8_tensorwise", "awq_w4a16", "bitsandbytes_nf4"):
        for card in (CPU, AMPERE, ADA, BLACKWELL):
            for products in (Products.EXACT, Products.AUTO):
                used = by_kernel(kernel_costs({name: STORED}, 2, card, products))["native"].is_used
                kernel = products_kernel({name: STORED}, card, products)
                assert (kernel is not None) == used, (name, card.name, products)


def test_each_layer_is_decided_by_its_own_format() -> None:
    """Of files with several formats, what plans show is what engines do: the kernel takes the weights of every format
    that the card multiplies, whichever has most bytes, and no others."""
    weight = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    stored = {"F8_E4M3": weight.to(torch.float8_e4m3fn), "BF16": weight.bfloat16()}
    stored |= {name: quantize(weight, name) for name in ("float8_e4m3fn", "mxfp8")}
    x, failures = torch.randn(3, 32), []
    for first, second in itertools.permutations(stored, 2):
        formats = {first: StoredFormat(1, 400, 400), second: StoredFormat(1, 300, 600)}
        used = {
            cost.format
            for cost in kernel_costs(formats, 2, ADA, Products.AUTO)
            if cost.kernel == "native" and cost.is_used
        }
        kernel = products_kernel(formats, ADA, Products.AUTO)
        taken = {name for name in formats if kernel is not None and kernel(x, stored[name], None) is not None}
        if not used == taken == formats.keys() & {"F8_E4M3", "float8_e4m3fn"}:
            failures.append((first, second, used, taken))
    assert not failures


def test_formats_are_counted_by_layer() -> None:
    module = nn.Sequential(nn.Linear(32, 16), nn.Linear(32, 16), nn.LayerNorm(16))
    packed = quantize(module[1].weight, "float8_e4m3fn")
    module[1].weight = nn.Parameter(packed, requires_grad=False)
    assert stored_formats(module_weights(module)) == {
        "F32": StoredFormat(1, 512, 2048),
        "float8_e4m3fn": StoredFormat(1, 512, 516),
    }


@pytest.mark.parametrize("per_row", [False, True])
def test_the_reference_is_what_torchs_kernel_computes(per_row: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(32, 64, generator=generator), torch.randn(32, generator=generator)
    x = torch.randn(2, 5, 64, generator=generator)
    packed = quantize(weight, "float8_e4m3fn", {"per_row": per_row})
    kernel = linear_kernel({"float8_e4m3fn"})(x, packed, bias)
    found = reference_kernel(x, packed, bias)
    assert kernel is not None
    assert found is not None
    torch.testing.assert_close(found, kernel, rtol=1e-5, atol=1e-4)
    exact = nn.functional.linear(x, packed.unpack(torch.float32), bias)
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0.6)
    plain = weight.to(torch.float8_e4m3fn)
    expected = fp8_linear(x, plain, bias, product=reference_product)
    assert torch.equal(reference_kernel(x, plain, bias), expected)  # type: ignore[arg-type]
    assert reference_kernel(x, weight, bias) is None


def test_the_configured_products_make_correct_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a file of scaled 8-bit floats: the image is near the exact one, and not the same."""
    save_file(
        quantized(load_file(SHAPES / "models/shapes.safetensors"), "float8_e4m3fn", {}), tmp_path / "fp8.safetensors"
    )
    catalog = Catalog([tmp_path], [], "sim")
    opened = Engine.open

    def open_with(settings: EngineSettings) -> Engine:
        return opened(replace(settings, products=Products.REFERENCE))

    exact = draw(catalog, "fp8", "cpu")
    monkeypatch.setattr(Engine, "open", staticmethod(open_with))
    quick = draw(catalog, "fp8", "cpu")
    assert matches(read_image(quick), PROMPT)
    assert not np.array_equal(quick, exact)
    assert np.abs(quick.astype(int) - exact).mean() < 6
