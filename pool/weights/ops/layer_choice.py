"""Selects the kind of layers that a component runs with, and explains the choice. Pure.

Knows dtypes, device capabilities and flags; neither models nor files. Other modules implement the kinds:
`pool.weights.ops.layers` casting, `pool.weights.quant` 8-bit products and packed weights. Source of the order:
comfyui-behaviour facts, section 1, `pick_operations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from modelpool.pool.devices.capabilities import DeviceCapabilities, Generation

#: dtype of the weights that can be multiplied in 8 bits
FP8_WEIGHTS = torch.float8_e4m3fn


class OperationsKind(StrEnum):
    """Kinds of layer computation."""

    PLAIN = "plain"
    """Weights are used as stored; casting layers cost the same as torch's."""
    MANUAL_CAST = "manual_cast"
    """Weights are converted to the compute dtype at each use."""
    FP8_MATMUL = "fp8_matmul"
    """Linear layers multiply 8-bit weights with inputs quantized to 8 bits; the others convert."""
    MIXED_PRECISION = "mixed_precision"
    """Each layer as stored in its file: packed in its format, or plain."""


class Products(StrEnum):
    """How linear layers with quantized weights multiply (`[pool] products`)."""

    EXACT = "exact"
    """With unpacked weights: the same numbers on every device."""
    AUTO = "auto"
    """With quantized weights and inputs where the device has kernels for the format: faster, and less exact."""
    REFERENCE = "reference"
    """As a GPU with kernels for 8-bit floats does, on any device, in float32: to examine the images that it makes."""


@dataclass(frozen=True, slots=True)
class OperationFlags:
    """Options that users can set.

    fp8_matmul     multiply in 8 bits where card and weights allow it; faster, and less exact
    no_fp8_matmul  never do so; overrides fp8_matmul
    """

    fp8_matmul: bool = False
    no_fp8_matmul: bool = False


@dataclass(frozen=True, slots=True)
class Operations:
    """The chosen kind.

    compute_dtype  dtype of the computation
    reasons        why this kind and not another, as text, in the order of the decisions
    native         formats of quantized weights that the card multiplies packed
    emulated       formats that are unpacked at each use instead
    """

    kind: OperationsKind
    compute_dtype: torch.dtype
    reasons: tuple[str, ...]
    native: frozenset[str] = field(default_factory=frozenset)
    emulated: frozenset[str] = field(default_factory=frozenset)

    def __str__(self) -> str:
        return f"{self.kind} in {dtype_name(self.compute_dtype)}, because {'; '.join(self.reasons)}"


def pick_operations(
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype | None,
    capabilities: DeviceCapabilities,
    quantization: Mapping[str, Generation | None] | None = None,
    flags: OperationFlags | None = None,
) -> Operations:
    """Choose the kind of layers for weights stored in `storage_dtype`.

    `compute_dtype` None means `storage_dtype`. `quantization` maps each format of the file's packed weights to the
    generation of cards from which it is multiplied natively (None: by none). Never fails: whatever a card cannot do is
    computed in another way.
    """
    flags = flags or OperationFlags()
    dtype = compute_dtype or storage_dtype
    if quantization:
        return _mixed(dtype, capabilities, quantization, flags)
    no_fp8 = _why_no_fp8(storage_dtype, capabilities, flags)
    if no_fp8 is None:
        name = dtype_name(storage_dtype)
        reason = f"the weights are {name}, 8-bit products are requested and {capabilities.name} has them"
        return Operations(OperationsKind.FP8_MATMUL, dtype, (reason,))
    reasons = []
    if flags.fp8_matmul:
        reasons.append(f"no 8-bit products although requested: {no_fp8}")
    if dtype == storage_dtype:
        reasons.append(f"the weights are stored and computed in {dtype_name(dtype)}")
        return Operations(OperationsKind.PLAIN, dtype, tuple(reasons))
    reasons.append(f"the weights are stored in {dtype_name(storage_dtype)} and computed in {dtype_name(dtype)}")
    return Operations(OperationsKind.MANUAL_CAST, dtype, tuple(reasons))


def _mixed(
    dtype: torch.dtype,
    capabilities: DeviceCapabilities,
    quantization: Mapping[str, Generation | None],
    flags: OperationFlags,
) -> Operations:
    native, reasons = set(), [f"the file has quantized layers ({', '.join(sorted(quantization))})"]
    for name, first in sorted(quantization.items()):
        why_not = _why_not_native(first, capabilities, flags)
        if why_not is None:
            native.add(name)
            reasons.append(f"{name} is multiplied packed")
        else:
            reasons.append(f"{name} is unpacked at each use: {why_not}")
    emulated = frozenset(quantization) - native
    return Operations(OperationsKind.MIXED_PRECISION, dtype, tuple(reasons), frozenset(native), emulated)


def _why_not_native(first: Generation | None, capabilities: DeviceCapabilities, flags: OperationFlags) -> str | None:
    if not flags.fp8_matmul or flags.no_fp8_matmul:
        return "products of quantized numbers are not requested"
    if first is None:
        return "no card multiplies it"
    if capabilities.generation is None:
        return f"{capabilities.name} does not multiply it"
    if capabilities.generation < first:
        return f"it needs generation {_text(first)}, {capabilities.name} is {_text(capabilities.generation)}"
    return None


def _why_no_fp8(storage: torch.dtype, capabilities: DeviceCapabilities, flags: OperationFlags) -> str | None:
    if flags.no_fp8_matmul:
        return "they are disabled"
    if not flags.fp8_matmul:
        return "they are not requested"
    if storage is not FP8_WEIGHTS:
        return f"the weights are {dtype_name(storage)}, expected {dtype_name(FP8_WEIGHTS)}"
    if not capabilities.fp8_matmul:
        return f"{capabilities.name} has none"
    return None


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch."."""
    return str(dtype).removeprefix("torch.")


def _text(generation: Generation) -> str:
    return ".".join(str(part) for part in generation)
