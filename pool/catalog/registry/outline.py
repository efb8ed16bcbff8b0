"""Outlines: files of full size that contain only the parts that describe a model: header, markers, tokenizer.

An outline is sparse and takes some hundred KiB on the disk. It is read like the file itself wherever only descriptions
are needed: the header, the smallest tensors, and tokenizers inside weights. Its other bytes are zeros, so no run may
ever read one: outlines are in a folder of their own, and workers never get its paths.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from modelpool.pool.files.formats.byte_ranges import ByteRange, merge_ranges
from modelpool.pool.files.formats.gguf_entries import MAGIC as GGUF_MAGIC
from modelpool.pool.files.formats.safetensors_file import MAX_HEADER_BYTES, SIZE_BYTES, Header
from modelpool.pool.files.formats.weights_file import read_single_header
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.weights.keymaps.adapter_keys import looks_like_lora

#: bytes of the first read, which contains most headers
FIRST_BYTES = 512 << 10
#: a GGUF header has no length: it is read in growing parts, up to this size
_MAX_GGUF_BYTES = 256 << 20
#: tensors up to this size are numbers: factors, strengths, ranges of noise
_MAX_NUMBER_BYTES = 64
#: larger tensors that describe a model, by the ends of their names; larger than this they are something else
_DESCRIBING_ENDS = (
    "tokenizer_json",
    "spiece_model",
    "tekken_model",
    "comfy_quant",
    "scaled_fp8",
    "quant_state.bitsandbytes__nf4",
    "quant_state.bitsandbytes__fp4",
    "output_blocks.11.1.transformer_blocks.0.norm1.bias",
    "edm_mean",
    "edm_std",
    "control_noise_refiner.0.before_proj.bias",
    "control_type",
)
_MAX_DESCRIBING_BYTES = 64 << 20
#: ranges closer to each other than this are read in one request
_JOINED_BYTES = 128 << 10

#: returns the bytes of a range of the file
ReadRange = Callable[[int, int], bytes]


def write_outline(path: Path, size_bytes: int, read: ReadRange) -> int:
    """Write the outline of a file of weights to `path`, which must not exist. Return the bytes that were read.

    A file that is no complete file of weights gets an outline of its beginning; reading the outline finds the
    problem. Raises as `read`, and OSError.
    """
    with open(path, "xb") as file:
        written = _Written(file.fileno(), read)
        os.ftruncate(file.fileno(), size_bytes)
        start = written.fetch(0, min(FIRST_BYTES, size_bytes))
        if start.startswith(GGUF_MAGIC):
            _write_gguf_start(path, size_bytes, written)
        elif len(start) >= SIZE_BYTES:
            end = SIZE_BYTES + int.from_bytes(start[:SIZE_BYTES], "little")
            if len(start) < end <= min(size_bytes, SIZE_BYTES + MAX_HEADER_BYTES):
                written.fetch(len(start), end)
        try:
            header = read_single_header(str(path))
        except CorruptFile:
            return written.bytes
        for begin, end in _joined(describing_ranges(header)):
            if end > len(start):
                written.fetch(max(begin, len(start)), end)
        return written.bytes


def describing_ranges(header: Header) -> tuple[ByteRange, ...]:
    """Return the ranges of the tensors that describe a model, in order; none of an adapter, which has numbers in every
    layer, and is fetched completely to be described."""
    if looks_like_lora(header.tensors):
        return ()
    return merge_ranges(
        [
            (entry.begin, entry.end)
            for entry in header.tensors.values()
            if entry.storage_bytes <= _MAX_NUMBER_BYTES
            or (entry.storage_bytes <= _MAX_DESCRIBING_BYTES and entry.name.endswith(_DESCRIBING_ENDS))
        ]
    )


class _Written:
    def __init__(self, file: int, read: ReadRange) -> None:
        self._file, self._read = file, read
        self.bytes = 0

    def fetch(self, begin: int, end: int) -> bytes:
        """Copy a range of the file to the outline."""
        found = self._read(begin, end)
        os.pwrite(self._file, found, begin)
        self.bytes += len(found)
        return found


def _write_gguf_start(path: Path, size_bytes: int, written: _Written) -> None:
    """Read until the header is complete: until it ends before the first tensor, and that is within what was read."""
    have = min(FIRST_BYTES, size_bytes)
    while have < min(size_bytes, _MAX_GGUF_BYTES):
        try:
            header = read_single_header(str(path))
            if header.tensors and min(entry.begin for entry in header.tensors.values()) <= have:
                return
        except CorruptFile:
            pass  # the zeros after what was read are no header
        more = min(size_bytes, 2 * have)
        written.fetch(have, more)
        have = more


def _joined(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    joined: list[ByteRange] = []
    for begin, end in ranges:
        if joined and begin - joined[-1][1] <= _JOINED_BYTES:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
