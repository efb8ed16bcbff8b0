"""ggml's types of tensors: their names, and how many values and bytes a block of each has. Torch-free.

The numbers are the `gguf` package's, which is imported when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

from modelpool.pool.formats.safetensors_file import DTYPE_BITS

#: types that are not made of blocks, and what safetensors calls them
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
    """ggml's name of each of its types, by the number that files have for it."""
    return MappingProxyType({int(kind.value): str(kind.name) for kind in package().GGMLQuantizationType})


@cache
def block_of(kind: str) -> tuple[int, int]:
    """How many values a block of the type `kind` has, and how many bytes. Raises KeyError for no type of ggml's."""
    found = package()
    values, block_bytes = found.GGML_QUANT_SIZES[found.GGMLQuantizationType[kind]]
    return int(values), int(block_bytes)


@cache
def is_readable(kind: str) -> bool:
    """Whether there is a way to turn tensors of the type `kind` into numbers: some of ggml's are of activations."""
    if kind in PLAIN_NAMES:
        return True
    import numpy as np  # who only describes files does without

    values, block_bytes = block_of(kind)
    gguf = package()
    try:
        gguf.dequantize(np.zeros((1, block_bytes), dtype=np.uint8), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return values > 1


def is_block_type(dtype: str) -> bool:
    """Whether a tensor's type, as a header names it, is one of ggml's that are made of blocks."""
    return dtype not in DTYPE_BITS and dtype in type_names().values()
