"""Decides how the components of a checkpoint run on a device, from its header alone, with reasons.

Combines the rules of `pool.weights.patcher.compute_dtype` and `pool.weights.ops.layer_choice`, and selects the kernels
for a decision. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities, Generation
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.context import LinearKernel
from modelpool.pool.weights.ops.dtypes import TORCH_DTYPES
from modelpool.pool.weights.ops.layer_choice import (
    OperationFlags,
    Operations,
    Products,
    pick_operations,
)
from modelpool.pool.weights.ops.packed import PackedWeight
from modelpool.pool.weights.ops.packed import stored_bytes as stored_bytes_of
from modelpool.pool.weights.patcher.compute_dtype import compute_dtype
from modelpool.pool.weights.patcher.weight_bytes import ModuleWeights
from modelpool.pool.weights.quant.formats import FORMATS
from modelpool.pool.weights.quant.marked_codec import FP8_DTYPES
from modelpool.pool.weights.quant.native_kernels import linear_kernel, reference_kernel

_DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in TORCH_DTYPES.items()})
#: formats that the reference arithmetic multiplies: scaled, and plain
_EIGHT_BIT = (*FP8_DTYPES, "F8_E4M3", "F8_E5M2")
#: safetensors' names of plain 8-bit floats, and the format with the kernels that multiply them
PLAIN_FORMATS: Mapping[str, str] = MappingProxyType({"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"})
#: the plain weights that have kernels
_PLAIN_NATIVE = "F8_E4M3"


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
    """Return the formats of the weights of linear layers: codec names if packed, else safetensors' names of dtypes."""
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
    formats: Mapping[str, StoredFormat], capabilities: DeviceCapabilities, products: Products
) -> LinearKernel | None:
    """Return the kernel that multiplies the quantized weights of a component as `products` requests; None for torch's
    own products with unpacked weights. It declines weights of other formats, which are unpacked."""
    match products:
        case Products.EXACT:
            return None
        case Products.REFERENCE:
            return reference_kernel if any(name in _EIGHT_BIT for name in formats) else None
        case Products.AUTO:
            native = {PLAIN_FORMATS.get(name, name) for name in formats if why_not_native(name, capabilities) is None}
            return linear_kernel(native, capabilities.generation) if native else None


def why_not_native(name: str, capabilities: DeviceCapabilities) -> str | None:
    """Return why the device has no kernel for weights that are stored as `name`, a key of `stored_formats`; None if it
    has one. Each layer is decided by its own format, whatever the formats of the others are."""
    if name in PLAIN_FORMATS and name != _PLAIN_NATIVE:
        return f"only plain weights of type {_PLAIN_NATIVE} are multiplied as they are"
    known = FORMATS.get(PLAIN_FORMATS.get(name, name))
    first: Generation | None = None if known is None else known.native_from
    if first is None:
        return "no card multiplies it"
    if capabilities.generation is None:
        return f"{capabilities.name} has none"
    if capabilities.generation < first:
        needed, found = (".".join(map(str, each)) for each in (first, capabilities.generation))
        return f"it needs generation {needed}, {capabilities.name} is {found}"
    return None


def _main_dtype(stored_bytes: Mapping[str, int]) -> torch.dtype:
    """The floating point type of most bytes; bfloat16, the usual training type, if all weights are quantized."""
    floats = {
        TORCH_DTYPES[name]: size
        for name, size in stored_bytes.items()
        if name in TORCH_DTYPES and TORCH_DTYPES[name].is_floating_point
    }
    return max(floats, key=lambda dtype: floats[dtype], default=torch.bfloat16)
