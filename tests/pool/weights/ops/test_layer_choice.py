"""The chosen kind of layers, with its reasons."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from modelpool.pool.devices.capabilities import DeviceCapabilities, cuda_capabilities, host_capabilities
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.layer_choice import OperationFlags, OperationsKind, pick_operations

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GIB = 1 << 30
CPU = host_capabilities(DeviceKind.CPU, 16 * GIB)
SIM = host_capabilities(DeviceKind.SIM, GIB)
A100 = cuda_capabilities("NVIDIA A100", (8, 0), 40 * GIB)
ADA = cuda_capabilities("NVIDIA GeForce RTX 4090", (8, 9), 24 * GIB)
BLACKWELL = cuda_capabilities("NVIDIA B200", (10, 0), 180 * GIB)
FP8 = OperationFlags(fp8_matmul=True)
FORMATS = {"float8_e4m3fn": (8, 9), "nvfp4": (10, 0), "of no card": None}


@pytest.mark.parametrize(
    ("storage", "compute_dtype", "device", "flags", "kind", "because"),
    [
        (HALF, HALF, ADA, None, "plain", "stored and computed in float16"),
        (HALF, None, ADA, None, "plain", "stored and computed in float16"),
        (FULL, FULL, CPU, None, "plain", "stored and computed in float32"),
        (HALF, FULL, CPU, None, "manual_cast", "stored in float16 and computed in float32"),
        (E4M3, FULL, SIM, None, "manual_cast", "stored in float8_e4m3fn and computed in float32"),
        (E4M3, BRAIN, ADA, None, "manual_cast", "computed in bfloat16"),
        (E4M3, BRAIN, ADA, FP8, "fp8_matmul", "8-bit products are requested and NVIDIA GeForce RTX 4090 has them"),
        (E4M3, BRAIN, A100, FP8, "manual_cast", "although requested: NVIDIA A100 has none"),
        (E4M3, FULL, CPU, FP8, "manual_cast", "although requested: CPU has none"),
        (E5M2, BRAIN, ADA, FP8, "manual_cast", "the weights are float8_e5m2, expected float8_e4m3fn"),
        (E4M3, BRAIN, ADA, OperationFlags(True, True), "manual_cast", "disabled"),
    ],
)  # fmt: skip
def test_the_kind_and_why(
    storage: torch.dtype,
    compute_dtype: torch.dtype | None,
    device: DeviceCapabilities,
    flags: OperationFlags | None,
    kind: str,
    because: str,
) -> None:
    found = pick_operations(storage, compute_dtype, device, flags=flags)
    assert found.kind == kind
    assert because in str(found)
    assert found.compute_dtype is (compute_dtype or storage)


@pytest.mark.parametrize(
    ("device", "flags", "native"),
    [
        (CPU, FP8, set()),
        (A100, FP8, set()),
        (ADA, FP8, {"float8_e4m3fn"}),
        (BLACKWELL, FP8, {"float8_e4m3fn", "nvfp4"}),
        (BLACKWELL, None, set()),
        (BLACKWELL, OperationFlags(True, True), set()),
    ],
)
def test_quantized_files_run_mixed(device: DeviceCapabilities, flags: OperationFlags | None, native: set[str]) -> None:
    found = pick_operations(BRAIN, BRAIN, device, FORMATS, flags)
    assert found.kind is OperationsKind.MIXED_PRECISION
    assert found.native == native
    assert found.emulated == FORMATS.keys() - native
    assert len(found.reasons) == 1 + len(FORMATS)


def test_a_generation_that_is_too_old_is_named() -> None:
    assert "nvfp4 is unpacked at each use: it needs generation 10.0, NVIDIA GeForce RTX 4090 is 8.9" in str(
        pick_operations(BRAIN, BRAIN, ADA, FORMATS, FP8)
    )


DTYPES = st.sampled_from([HALF, BRAIN, FULL, E4M3, E5M2])


@given(
    DTYPES,
    st.sampled_from([None, HALF, BRAIN, FULL]),
    st.sampled_from([CPU, SIM, A100, ADA, BLACKWELL]),
    st.builds(OperationFlags, st.booleans(), st.booleans()),
)
def test_any_question_has_an_answer_and_a_reason(
    storage: torch.dtype, compute_dtype: torch.dtype | None, device: DeviceCapabilities, flags: OperationFlags
) -> None:
    found = pick_operations(storage, compute_dtype, device, flags=flags)
    assert found.reasons
    if found.kind is OperationsKind.FP8_MATMUL:
        assert (flags.fp8_matmul, flags.no_fp8_matmul, device.fp8_matmul) == (True, False, True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)], ids=str)
def test_a_linear_kernel_computes_what_it_accepts(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(6, 4, bias=bias, dtype=HALF).requires_grad_(False)
    swap_to_casting(layer)
    x = torch.randn(shape, dtype=HALF)
    products = []

    def kernel(x: Tensor, weight: Tensor, offset: Tensor | None) -> Tensor | None:
        if x.dtype is not HALF:
            return None
        products.append(x.shape)
        out = x @ weight.T
        return out if offset is None else out + offset

    with compute(torch.device("cpu"), HALF, linear=kernel):
        torch.testing.assert_close(layer(x), nn.functional.linear(x, *layer._parameters.values()), rtol=0.01, atol=0.01)
        assert len(products) == 1
        layer(x.float())  # declined: computed as ever
        set_weight_functions(layer, "weight", (lambda w: w.add_(1),))
        patched = layer(x)
    assert len(products) == 1
    weight, offset = layer._parameters["weight"], layer._parameters["bias"]
    torch.testing.assert_close(patched, nn.functional.linear(x, weight + 1, offset), rtol=0.01, atol=0.01)
