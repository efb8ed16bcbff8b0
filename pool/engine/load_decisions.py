"""Decides how the components of a checkpoint run on a device, from its header alone, with reasons.

Combines the rules of `pool.patcher.compute_dtype` and `pool.ops.layer_choice`, and selects the kernels for a decision.
Reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.ops.context import LinearKernel
from modelpool.pool.ops.cublas_half import cublas_half_linear
from modelpool.pool.ops.dtypes import TORCH_DTYPES
from modelpool.pool.ops.layer_choice import (
    FP8_WEIGHTS,
    OperationFlags,
    Operations,
    OperationsKind,
    Products,
    dtype_name,
    pick_operations,
)
from modelpool.pool.ops.packed import PackedWeight
from modelpool.pool.ops.packed import stored_bytes as stored_bytes_of
from modelpool.pool.patcher.compute_dtype import compute_dtype
from modelpool.pool.patcher.weight_bytes import ModuleWeights
from modelpool.pool.quant.formats import FORMATS
from modelpool.pool.quant.native_kernels import linear_kernel, reference_kernel
from modelpool.pool.quant.quant_codec import FP8_DTYPES
from modelpool.pool.specs.spec import Role

_DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})
#: formats that the reference arithmetic multiplies: scaled, and plain
_EIGHT_BIT = (*FP8_DTYPES, "F8_E4M3", "F8_E5M2")


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


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The matrices of linear layers that a component stores in one format.

    layers        number of them
    values        of these matrices
    stored_bytes  of them
    """

    layers: int
    values: int
    stored_bytes: int


def stored_formats(weights: Iterable[ModuleWeights]) -> dict[str, StoredFormat]:
    """Return the formats of the weights of linear layers: those of packed weights, and safetensors' names of dtypes."""
    found: dict[str, StoredFormat] = {}
    for owner in weights:
        weight = owner.parameters.get("weight")
        if weight is None or not isinstance(owner.module, nn.Linear):
            continue
        name = weight.codec.name if isinstance(weight, PackedWeight) else _DTYPE_NAMES.get(weight.dtype, "")
        before = found.get(name, StoredFormat(0, 0, 0))
        found[name] = StoredFormat(
            before.layers + 1, before.values + weight.numel(), before.stored_bytes + stored_bytes_of(weight)
        )
    return found


def products_kernel(
    role: Role, formats: Mapping[str, StoredFormat], capabilities: DeviceCapabilities, products: Products
) -> LinearKernel | None:
    """Return the kernel that multiplies the quantized weights of a component as `products` requests; None for torch's
    own products with unpacked weights."""
    match products:
        case Products.EXACT:
            return None
        case Products.REFERENCE:
            return reference_kernel if any(name in _EIGHT_BIT for name in formats) else None
        case Products.AUTO:
            sizes = {name: found.stored_bytes for name, found in formats.items()}
            flags = OperationFlags(fp8_matmul=True)
            return linear_kernel_for(component_operations(role, sizes, capabilities, flags), capabilities)


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
