"""ggml's tensor types: names, and values and bytes per block. Torch-free.

The numbers come from the `gguf` package, which is imported at the first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS

#: types without blocks, and safetensors' names of them
PLAIN_NAMES: Mapping[str, str] = MappingProxyType(
    {name: name for name in ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")}
)


@cache
def package() -> Any:
    """The `gguf` package."""
    import gguf

    return gguf


@cache
def type_names() -> Mapping[int, str]:
    """ggml's names of its types, by the type number used in files."""
    return MappingProxyType({int(kind.value): str(kind.name) for kind in package().GGMLQuantizationType})


@cache
def block_size(kind: str) -> tuple[int, int]:
    """Return (values, bytes) per block of the type `kind`. Raises KeyError for an unknown type."""
    found = package()
    values, block_bytes = found.GGML_QUANT_SIZES[found.GGMLQuantizationType[kind]]
    return int(values), int(block_bytes)


@cache
def is_readable(kind: str) -> bool:
    """Whether tensors of the type `kind` can be dequantized: some of ggml's types are for activations only."""
    if kind in PLAIN_NAMES:
        return True
    import numpy as np  # imported late: reading headers does not need it

    values, block_bytes = block_size(kind)
    gguf = package()
    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return values > 1


def is_block_type(dtype: str) -> bool:
    """Whether `dtype`, as a header names it, is one of ggml's block types."""
    return dtype not in DTYPE_BITS and dtype in type_names().values()
