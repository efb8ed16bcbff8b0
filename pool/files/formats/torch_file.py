"""Reads PyTorch files (.ckpt, .pt, .pth, .bin) as a `Header`: tensor names and byte ranges. Torch-free.

Knows how checkpoints wrap their weights, and checks that the file contains what its pickle declares. No code of a
pickle is run (`torch_pickle`), and nothing is unpacked before the declared sizes are compared with the file's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, BinaryIO

from modelpool.pool.files.formats import torch_legacy, torch_zip
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS, Header, TensorEntry, is_countable
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.files.formats.torch_objects import BadPickle, CodeInPickle, DeclaredTensor, OpaqueObject
from modelpool.pool.files.formats.torch_zip import FileRange
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile, format_bytes

#: keys under which a file may wrap its weights; the first that exists counts
WRAPPERS = (
    "state_dict", "params_ema", "params", "model_state_dict", "model", "module", "weights", "string_to_param",
)  # fmt: skip
#: Tensors may share storages, as tied weights do. A higher ratio is an attack: copies would become separate tensors.
MAX_BYTES_PER_FILE_BYTE = 2
#: tables of an IP-Adapter, with tensors named by table and key: "image_proj.proj.weight"
_IP_ADAPTER_TABLES = frozenset({"image_proj", "ip_adapter"})


def is_torch_file(start: bytes) -> bool:
    """Whether a file that begins with `start` may be a PyTorch file."""
    return start.startswith((torch_zip.MAGIC, torch_legacy.MAGIC[: len(start)] if start else torch_legacy.MAGIC))


def read_torch_header(path: str) -> Header:
    """Read the header of the PyTorch file at `path`; reads no weights.

    Numbers and texts next to the weights become the header's metadata. Raises UnsafeFile for a pickle with code in it,
    CorruptFile for anything else that is not a complete file of named tensors.
    """
    with open_regular(path, "a PyTorch file") as (file, file_bytes):
        try:
            return _header(path, file, file_bytes)
        except CodeInPickle as error:
            raise UnsafeFile(f"{path}: the pickle {error}; no code of it was run, expected weights only") from None
        except BadPickle as error:
            raise CorruptFile(f"{path}: the file {error}, expected a PyTorch file of named tensors") from None


def _header(path: str, file: BinaryIO, file_bytes: int) -> Header:
    start = file.read(len(torch_legacy.MAGIC))
    if start.startswith(torch_zip.MAGIC):
        value, places = torch_zip.read_zip(file, file_bytes)
    elif start == torch_legacy.MAGIC:
        value, places = torch_legacy.read_legacy(file, file_bytes)
    else:
        raise BadPickle(f"begins with {start.hex()}")
    tensors, metadata = weights_of(value)
    entries = [_entry(name, tensor, places) for name, tensor in tensors.items()]
    declared_bytes = sum(e.elements * DTYPE_BITS[e.dtype] // 8 for e in entries)
    if declared_bytes > MAX_BYTES_PER_FILE_BYTE * file_bytes:
        raise BadPickle(
            f"declares {format_bytes(declared_bytes)} of weights in {format_bytes(file_bytes)}, by referring to the "
            f"same numbers repeatedly"
        )
    entries.sort(key=lambda e: (e.begin, e.end, e.name))
    return Header(path, file_bytes, {e.name: e for e in entries}, metadata)


def weights_of(value: Any) -> tuple[dict[str, DeclaredTensor], dict[str, str]]:
    """Return the tensors by name that a pickle's `value` is or wraps, and the numbers and texts next to them.

    Raises BadPickle when the wrapper is ambiguous, or when one of the weights is no tensor.
    """
    if not isinstance(value, dict):
        raise BadPickle(f"holds {_kind(value)}")
    if value.keys() >= _IP_ADAPTER_TABLES and all(isinstance(value[name], dict) for name in _IP_ADAPTER_TABLES):
        value = {
            f"{table}.{name}": tensor for table in sorted(_IP_ADAPTER_TABLES) for name, tensor in value[table].items()
        }
    wrapper = _wrapper(value)
    metadata = {k: v for k, v in value.items() if isinstance(k, str) and k != wrapper and _is_metadata(v)}
    weights = value[wrapper] if wrapper else {k: v for k, v in value.items() if k not in metadata}
    for name, tensor in weights.items():
        if not isinstance(name, str):
            raise BadPickle(f"has weights under a {type(name).__name__}, expected names")
        if not isinstance(tensor, DeclaredTensor):
            raise BadPickle(f"holds {_kind(tensor)} under {brief(name)}, expected a tensor")
    return weights, {name: str(value) for name, value in metadata.items()}


def _wrapper(value: Mapping[Any, Any]) -> str | None:
    """Return the key under which the weights are; None when `value` itself is the weights."""
    if any(isinstance(v, DeclaredTensor) for v in value.values()):
        return None
    inner = [
        k
        for k, v in value.items()
        if isinstance(k, str) and isinstance(v, dict) and any(isinstance(t, DeclaredTensor) for t in v.values())
    ]
    known = next((name for name in WRAPPERS if name in inner), None)
    if known is None and len(inner) > 1:
        raise BadPickle(f"has tensors under each of {brief(inner)}")
    return known or (inner[0] if inner else None)


def _is_metadata(value: Any) -> bool:
    return isinstance(value, (str, float, bool)) or (isinstance(value, int) and abs(value) < 1 << 63)


def _kind(value: Any) -> str:
    return f"an object {value.class_name}" if isinstance(value, OpaqueObject) else f"a {type(value).__name__}"


def _entry(name: str, tensor: DeclaredTensor, places: Mapping[str, FileRange]) -> TensorEntry:
    """Return the entry of a tensor. Raises BadPickle when its storage is missing or too small for it."""
    storage, place = tensor.storage, places.get(tensor.storage.key)
    item_bytes, storage_item_bytes = DTYPE_BITS[tensor.dtype] // 8, DTYPE_BITS[storage.dtype] // 8
    if place is None:
        raise BadPickle(f"has no storage {brief(storage.key)} for its tensor {brief(name)}")
    if place.size_bytes // storage_item_bytes != storage.elements:
        raise BadPickle(
            f"has {place.size_bytes} bytes in the storage of its tensor {brief(name)}, the pickle promises "
            f"{storage.elements} numbers of {storage_item_bytes} bytes"
        )
    if not is_countable(tensor.shape):
        raise BadPickle(f"has a tensor {brief(name)} of shape {brief(tensor.shape)}")
    elements = math.prod(tensor.shape)
    steps = zip(tensor.shape, tensor.strides, strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps) if elements else 0
    room = place.size_bytes // item_bytes
    if tensor.offset + span > room or elements > room:
        raise BadPickle(
            f"has a tensor {brief(name)} of shape {brief(tensor.shape)} and strides {brief(tensor.strides)} from "
            f"number {tensor.offset} of a storage of {room}"
        )
    begin = place.begin + tensor.offset * item_bytes
    strides = None if _in_order(tensor) else tensor.strides
    return TensorEntry(name, tensor.dtype, tensor.shape, begin, begin + span * item_bytes, strides=strides)


def _in_order(tensor: DeclaredTensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return not math.prod(tensor.shape)
        expected *= size
    return True
