"""The one module that imports comfy_kitchen, and what its packed formats have in common.

The package is imported when a format first needs it. On the CPU its pure-torch back end runs, on a GPU its kernels.
`check` says which of the names that this project uses are missing from the installed package.
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

from modelpool.pool.quant.formats import WEIGHT, round_up

Parts: TypeAlias = Mapping[str, Tensor]
Settings: TypeAlias = Mapping[str, object]

#: devices that the package runs on
KNOWN_DEVICES = ("cpu", "cuda")
#: functions of the package that are used, and operations that it registers with torch
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

#: the package's numbers for float types in its operations
DTYPE_CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2})


@functools.cache
def package() -> Any:
    """The package, imported now."""
    import comfy_kitchen  # type: ignore[import-untyped]

    return comfy_kitchen


def check() -> tuple[str, ...]:
    """Names used here that the installed package does not have; () when all is well."""
    there = package()
    operations = torch.ops.comfy_kitchen
    return tuple(
        [name for name in _FUNCTIONS if not callable(getattr(there, name, None))]
        + [name for name in ("get_implementation",) if not hasattr(getattr(there, "registry", None), name)]
        + [name for name in _OPERATIONS if not hasattr(operations, name)]
    )


def float_of(dtype: torch.dtype) -> torch.dtype:
    """The float type that the package computes in for `dtype`."""
    return dtype if dtype in DTYPE_CODES else torch.float32


def blocked_shape(weight: Tensor, columns_a_scale: int) -> tuple[int, int]:
    """The shape of block scales in cuBLAS's order, for a weight with a scale for that many stored columns."""
    return round_up(weight.shape[0], 128), round_up(weight.shape[1] // columns_a_scale, 4)


def column(scale: Tensor) -> Tensor:
    """A scale of each row as a column; one of the whole weight as a number."""
    return scale.reshape(-1, 1) if scale.numel() > 1 else scale.reshape(())


def padded(x: Tensor, multiple: int) -> Tensor:
    """`x` (two dimensions) with zeros up to a multiple of `multiple` rows and columns."""
    rows, columns = x.shape
    return F.pad(x, (0, round_up(columns, multiple) - columns, 0, round_up(rows, multiple) - rows))


def w4a8_parts(parts: Parts) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The parts of an asym_w4a8_int8 weight in the order in which the package takes them."""
    names = ("weight_codebook", "weight_correction")
    return (
        parts[WEIGHT].view(torch.int8),
        parts["weight_s_rel"],
        parts["weight_s_channel"],
        parts.get(names[0]),
        parts.get(names[1]),
    )
