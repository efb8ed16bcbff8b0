"""Writes a safetensors file tensor by tensor, with at most one tensor's bytes in memory. Torch-free.

Knows the file format as `pool.files.formats.safetensors_file` reads it: header size, JSON header, then the tensors end
to end. Each tensor provides its type, shape and bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelpool.pool.files.formats.atomic_write import atomic_file
from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS, MAX_HEADER_BYTES, METADATA_KEY, SIZE_BYTES, Shape
from modelpool.pool.values.core.errors import OutputFailed, UnusableField, counted

#: the header is padded with spaces to a multiple of this, so that the first tensor is aligned for any type
_ALIGNED_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """One tensor to write.

    dtype   safetensors' name of its type, "F16"
    blocks  returns its bytes in order, in blocks of any size; called once, when the tensor is written
    """

    name: str
    dtype: str
    shape: Shape
    blocks: Callable[[], Iterable[bytes | memoryview]] = field(compare=False)

    @property
    def storage_bytes(self) -> int:
        """Bytes in the file. Raises UnusableField for a type unknown to the format, and for a fraction of a byte."""
        if self.dtype not in DTYPE_BITS:
            raise UnusableField(f"tensor {self.name!r}: found type {self.dtype!r}, expected one of {list(DTYPE_BITS)}")
        bits = math.prod(self.shape) * DTYPE_BITS[self.dtype]
        if bits % 8:
            raise UnusableField(f"tensor {self.name!r}: {bits} bits are not a whole number of bytes")
        return bits // 8


def write_safetensors(
    path: Path,
    tensors: Sequence[TensorToWrite],
    metadata: Mapping[str, str] | None = None,
    *,
    overwrite: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> int:
    """Write `tensors` to `path` in their order, or in the order of `aligned` if one would be misaligned.

    Atomic: see `atomic_file`. Calls `on_bytes` with the size of each block written. Returns the file's size. Raises
    OutputFailed as `atomic_file` does, UnusableField for duplicate names, for metadata that are not texts and for a
    header beyond the format's limit.
    """
    ordered = aligned(tensors)
    header = _header(ordered, metadata or {})
    with atomic_file(path, overwrite=overwrite) as file:
        file.write(len(header).to_bytes(SIZE_BYTES, "little") + header)
        for tensor in ordered:
            written_bytes = 0
            for block in tensor.blocks():
                file.write(block)
                written_bytes += len(block)
                if on_bytes is not None:
                    on_bytes(len(block))
            expected = tensor.storage_bytes
            assert written_bytes == expected, f"{path}: {tensor.name}: {written_bytes} bytes, promised {expected}"
    return SIZE_BYTES + len(header) + sum(tensor.storage_bytes for tensor in ordered)


def aligned(tensors: Sequence[TensorToWrite]) -> tuple[TensorToWrite, ...]:
    """Return `tensors` in their order if each begins at a multiple of its type's size; else the wider types first.

    A misaligned tensor cannot be used in a memory mapping: every process would copy it.
    """
    at = 0
    for tensor in tensors:
        if at % _item_bytes(tensor):
            return tuple(sorted(tensors, key=_item_bytes, reverse=True))
        at += tensor.storage_bytes
    return tuple(tensors)


def _item_bytes(tensor: TensorToWrite) -> int:
    return max(DTYPE_BITS.get(tensor.dtype, 8) // 8, 1)


def _header(tensors: Sequence[TensorToWrite], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {}
    if metadata:
        for key, value in metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise UnusableField(f"metadata {key!r}: found {value!r}, expected pairs of texts")
        header[METADATA_KEY] = dict(metadata)
    end = 0
    for tensor in tensors:
        if tensor.name in header or tensor.name == METADATA_KEY:
            raise UnusableField(f"tensor {tensor.name!r}: occurs twice, expected each name once")
        begin, end = end, end + tensor.storage_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UnusableField(f"a name or a metadata text cannot be written as UTF-8: {error}") from None
    text += b" " * (-len(text) % _ALIGNED_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise OutputFailed(f"the header would have {counted(len(text), 'byte')}, the format allows {MAX_HEADER_BYTES}")
    return text
