"""ggml's types of tensors: their names, and how many values and bytes a block of each has. Torch-free.

The numbers are the `gguf` package's, which is imported when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

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


def is_packed(dtype: str) -> bool:
    """Whether a tensor's type, as a header names it, is one of ggml's that are made of blocks."""
    return dtype not in PLAIN_NAMES and dtype in type_names().values()
