"""Imports comfy_kitchen (the only module that does) and defines the helpers that its packed formats share.

The package is imported at first use. On the CPU its pure-torch back end runs, on a GPU its kernels. `check` returns the
names used by this project that the installed package lacks.
Source: comfy_kitchen 0.2.40, https://github.com/Comfy-Org/comfy-kitchen (Apache-2.0).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.weights.quant.formats import WEIGHT, round_up

Parts: TypeAlias = Mapping[str, Tensor]
Settings: TypeAlias = Mapping[str, object]

#: devices that the package supports
KNOWN_DEVICES = ("cpu", "cuda")
#: functions of the package used here, and its registered torch operations
_FUNCTIONS = (
    "convrot_w4a4_linear",
    "dequantize_convrot_w4a4_weight",
    "dequantize_mxfp8",
    "dequantize_nvfp4",
    "dequantize_w4a8_int8_weight",
    "from_blocked",
    "int8_linear",
    "quantize_convrot_w4a4_weight",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "quantize_w4a8_int8_weight",
    "scaled_mm_mxfp8",
    "scaled_mm_nvfp4",
    "stochastic_rounding_fp8",
    "w4a8_int8_linear",
)
_OPERATIONS = ("dequantize_int8_convrot_weight_dtype",)

#: the package's codes of float types in its operations
DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})


@functools.cache
def package() -> Any:
    """Import and return the package."""
    import comfy_kitchen  # type: ignore[import-untyped]

    return comfy_kitchen


def check() -> tuple[str, ...]:
    """Return the names used here that the installed package lacks; () if complete."""
    installed = package()
    operations = torch.ops.comfy_kitchen
    return tuple(
        [name for name in _FUNCTIONS if not callable(getattr(installed, name, None))]
        + [name for name in ("get_implementation",) if not hasattr(getattr(installed, "registry", None), name)]
        + [name for name in _OPERATIONS if not hasattr(operations, name)]
    )


def float_of(dtype: torch.dtype) -> torch.dtype:
    """Return the float type in which the package computes for `dtype`."""
    return dtype if dtype in DTYPE_CODES else torch.float32


def blocked_shape(weight: Tensor, columns_a_scale: int) -> tuple[int, int]:
    """Return the shape of block scales in cuBLAS's order, for a weight with one scale per `columns_a_scale` stored
    columns."""
    return round_up(weight.shape[0], 128), round_up(weight.shape[1] // columns_a_scale, 4)


def column(scale: Tensor) -> Tensor:
    """Return a scale per row as a column; a scale of the complete weight as a number."""
    return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())


def padded(x: Tensor, multiple: int) -> Tensor:
    """Pad `x` (two dimensions) with zeros to a multiple of `multiple` rows and columns."""
    rows, columns = x.shape
    return F.pad(x, (0, round_up(columns, multiple) - columns, 0, round_up(rows, multiple) - rows))


def w4a8_parts(parts: Parts) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the parts of an asym_w4a8_int8 weight in the package's argument order."""
    names = ("weight_codebook", "weight_correction")
    return (
        parts[WEIGHT].view(torch.int8),
        parts["weight_s_rel"],
        parts["weight_s_channel"],
        parts.get(names[0]),
        parts.get(names[1]),
    )
