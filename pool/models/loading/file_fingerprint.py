"""Fingerprint of the files of a component: tells within milliseconds whether two machines have the same ones.

Torch-free; reads headers and samples. A content hash of all bytes would take as long as loading the weights: it is
computed in the background (`pool.catalog.registry.node_hashes`).
"""

from __future__ import annotations

import hashlib
import os

from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import MAX_HEADER_BYTES, SIZE_BYTES
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.file_part import FilePart

#: samples of each file, evenly spaced over the ranges of the component, and bytes of each. Training changes nearly
#: every weight, so other weights of the same shapes differ in every sample
SAMPLES = 16
SAMPLE_BYTES = 4096
#: bytes at the start of a file without a header of known size
HEAD_BYTES = 64 << 10


def fingerprint(part: FilePart) -> str:
    """Return a hexadecimal digest of the sizes and headers of the files, and of samples of the component's bytes,
    independent of path and age.

    Raises CorruptFile, naming the file, if one is missing or cannot be read, and what `byte_ranges` raises.
    """
    digest = hashlib.sha256()
    try:
        found = byte_ranges(part)
    except OSError as error:
        raise CorruptFile(f"{part.path}: cannot be read: {error.strerror or error}") from error
    for path, ranges in found.items():
        total_bytes = sum(end - begin for begin, end in ranges)
        digest.update(f"{total_bytes} {len(ranges)}\n".encode())
        with open_regular(path, "a weights file") as (file, size_bytes):
            digest.update(f"{size_bytes} ".encode())
            digest.update(os.pread(file.fileno(), _head_bytes(file.fileno()), 0))
            if ranges and ranges[-1][1] > size_bytes:
                raise CorruptFile(f"{path}: {size_bytes} bytes, expected at least {ranges[-1][1]}")
            for place in range(SAMPLES):
                offset = _offset(ranges, place * max(0, total_bytes - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(os.pread(file.fileno(), SAMPLE_BYTES, offset))
    return digest.hexdigest()


def _head_bytes(descriptor: int) -> int:
    """Return the size of the header of a safetensors file; of another one, of a first part with its description."""
    size_bytes = int.from_bytes(os.pread(descriptor, SIZE_BYTES, 0), "little")
    return SIZE_BYTES + size_bytes if size_bytes <= MAX_HEADER_BYTES else HEAD_BYTES


def _offset(ranges: tuple[ByteRange, ...], place_bytes: int) -> int:
    """Return the offset in the file of a place in the ranges."""
    for begin, end in ranges:
        if place_bytes < end - begin:
            return begin + place_bytes
        place_bytes -= end - begin
    return ranges[-1][1] if ranges else 0
