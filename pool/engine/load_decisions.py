"""Decides how the components of a checkpoint run on a device, from its header alone, with reasons.

Combines the rules of `pool.patcher.compute_dtype` and `pool.ops.layer_choice`, and selects the kernels for a decision.
Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.ops.context import LinearKernel
from modelpool.pool.ops.cublas_half import cublas_half_linear
from modelpool.pool.ops.dtypes import TORCH_DTYPES
from modelpool.pool.ops.layer_choice import (
    FP8_WEIGHTS,
    OperationFlags,
    Operations,
    OperationsKind,
    dtype_name,
    pick_operations,
)
from modelpool.pool.patcher.compute_dtype import compute_dtype
from modelpool.pool.quant.formats import FORMATS
from modelpool.pool.quant.native_kernels import linear_kernel
from modelpool.pool.specs.spec import Role


def component_operations(
    role: Role,
    stored_bytes: Mapping[str, int],
    capabilities: DeviceCapabilities,
    flags: OperationFlags | None = None,
) -> Operations:
    """Return the kind of layers for a component on a device with these capabilities.

    `stored_bytes` has the bytes of the component in the file by safetensors type name, or by format for quantized
    weights, as in `ComponentInfo.dtypes`. The type of most bytes decides.
    """
    quantized = {name: FORMATS[name].native_from for name in stored_bytes if name in FORMATS}
    storage = _main_dtype(stored_bytes)
    dtype = compute_dtype(role, storage, capabilities)
    return pick_operations(storage, dtype, capabilities, quantized, flags)


def linear_kernel_for(operations: Operations, capabilities: DeviceCapabilities) -> LinearKernel | None:
    """Return the kernel of linear layers for this decision, for `pool.ops.compute`; None for torch's own."""
    match operations.kind:
        case OperationsKind.FP8_MATMUL:
            return linear_kernel({dtype_name(FP8_WEIGHTS)}, capabilities.generation)
        case OperationsKind.MIXED_PRECISION:
            return linear_kernel(operations.native, capabilities.generation) if operations.native else None
        case OperationsKind.CUBLAS_HALF:
            return cublas_half_linear()
        case _:
            return None


def _main_dtype(stored_bytes: Mapping[str, int]) -> torch.dtype:
    """The floating point type of most bytes; bfloat16, the usual training type, if all weights are quantized."""
    floats = {
        TORCH_DTYPES[name]: size
        for name, size in stored_bytes.items()
        if name in TORCH_DTYPES and TORCH_DTYPES[name].is_floating_point
    }
    return max(floats, key=lambda dtype: floats[dtype], default=torch.bfloat16)
