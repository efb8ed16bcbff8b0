"""What a checkpoint's component would run with on a device, and why."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities, cuda_capabilities, host_capabilities
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.engine.load_decisions import StoredFormat, component_operations, products_kernel
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.layer_choice import OperationFlags, Products
from tests.pool.zoo import store_in

GIB = 1 << 30
CPU = host_capabilities(DeviceKind.CPU, GIB)
ADA = cuda_capabilities("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB)


@pytest.mark.parametrize(
    ("role", "stored", "device", "said"),
    [
        (Role.DIFFUSION_MODEL, {"F16": 100}, CPU, "manual_cast in float32, because the weights are stored in"),
        (Role.DIFFUSION_MODEL, {"F32": 100}, CPU, "plain in float32, because the weights are stored"),
        (Role.DIFFUSION_MODEL, {"F16": 100, "F32": 10, "I64": 999}, ADA, "plain in float16"),
        (Role.VAE, {"F16": 100}, ADA, "manual_cast in bfloat16"),
        (Role.TEXT_ENCODER, {"BF16": 100}, ADA, "manual_cast in float32"),
        (Role.DIFFUSION_MODEL, {"F8_E4M3": 100, "F16": 1}, ADA, "fp8_matmul in float16"),
        (Role.DIFFUSION_MODEL, {"nvfp4": 100, "BF16": 9}, ADA, "mixed_precision in bfloat16, because the file has"),
        (Role.DIFFUSION_MODEL, {"int8_tensorwise": 100}, CPU, "CPU does not multiply it"),
    ],
)
def test_decisions(role: Role, stored: dict[str, int], device: DeviceCapabilities, said: str) -> None:
    flags = None if "because the weights" in said else OperationFlags(fp8_matmul=True)
    assert said in str(component_operations(role, stored, device, flags))


def test_a_decision_for_8_bit_products_is_carried_out() -> None:
    """On a pretend card, by torch's own kernel on the CPU."""
    kernel = products_kernel({"F8_E4M3": StoredFormat(1, 512, 512)}, ADA, Products.AUTO)
    assert kernel is not None
    layer = nn.Linear(32, 16).requires_grad_(False)
    store_in(layer, torch.float8_e4m3fn)
    plain, x = layer._parameters["weight"], torch.randn(3, 32)
    swap_to_casting(layer)
    with compute(torch.device("cpu"), torch.float32, linear=kernel):
        quick = layer(x)
    with compute(torch.device("cpu"), torch.float32):
        exact = layer(x)
    assert not torch.equal(quick, exact), "the input was not quantized"
    torch.testing.assert_close(quick, exact, rtol=0.1, atol=0.3)
    assert layer._parameters["weight"] is plain


def test_other_formats_leave_torchs_arithmetic() -> None:
    for name in ("F16", "nvfp4"):
        assert products_kernel({name: StoredFormat(1, 512, 512)}, ADA, Products.AUTO) is None


def test_formats_that_a_card_multiplies_get_their_kernel() -> None:
    blackwell = cuda_capabilities("NVIDIA B200", (10, 0), 180 * GIB)
    decided = component_operations(Role.DIFFUSION_MODEL, {"nvfp4": 9}, blackwell, OperationFlags(fp8_matmul=True))
    assert decided.native == {"nvfp4"}
    assert products_kernel({"nvfp4": StoredFormat(1, 512, 512)}, blackwell, Products.AUTO) is not None
