"""Computes the hashes that identify files of weights. Torch-free.

Knows the SHA-256 and the three short hashes of Civitai. Stores nothing (`pool.catalog.registry.registry_store` does).

AutoV1  SHA-256 of the 64 KiB at 1 MiB, first 8 digits: the old hash of A1111. Files that end before have none
AutoV2  SHA-256 of the complete file, first 10 digits
AutoV3  SHA-256 of a safetensors file without its header, first 12 digits. Unchanged when metadata are edited
"""

from __future__ import annotations

import hashlib
import os
import string
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from typing import TypeAlias

from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.files.formats.safetensors_file import MAX_HEADER_BYTES, SIZE_BYTES
from modelpool.pool.models.loading.content_digest import RangeDigests
from modelpool.pool.values.core.errors import MIB

#: called with the number of bytes read, many times for a large file
OnBytes: TypeAlias = Callable[[int], None]

#: bytes of one read: they are still in the CPU cache when they are hashed. On 2 virtual cores in 2026, 512 MiB took
#: 0.42 s with 1 MiB, 0.45 with 4, 0.59 with 8, 0.61 with 32; the kernel reads ahead in any case
CHUNK_BYTES = 1 * MIB
AUTOV1_BEGIN, AUTOV1_BYTES = 1 * MIB, 64 << 10
AUTOV1_DIGITS, AUTOV2_DIGITS, AUTOV3_DIGITS, SHA256_DIGITS = 8, 10, 12, 64


@dataclass(frozen=True, slots=True)
class FileHashes:
    """The hashes of one file, in lower case.

    sha256         of the complete file
    autov1         eight digits; empty for a file that ends before the hashed bytes
    data_sha256    of the bytes after the header; empty if not requested
    """

    sha256: str
    autov1: str = ""
    data_sha256: str = ""

    @property
    def autov2(self) -> str:
        """The first digits of the SHA-256."""
        return self.sha256[:AUTOV2_DIGITS]

    @property
    def autov3(self) -> str:
        """The first digits of the hash of the data; empty if unknown."""
        return self.data_sha256[:AUTOV3_DIGITS]

    def matches_digits(self, digits: str) -> bool:
        """Whether `digits`, as returned by `as_digits`, are one of these hashes."""
        match len(digits):
            case length if length == AUTOV1_DIGITS:
                return digits == self.autov1
            case length if length == AUTOV2_DIGITS:
                return digits == self.autov2
            case length if length == AUTOV3_DIGITS:
                # some tools show twelve digits of the complete file's hash
                return digits in (self.autov3, self.sha256[:AUTOV3_DIGITS])
            case length if length == SHA256_DIGITS:
                return digits in (self.sha256, self.data_sha256)
        return False


def as_digits(name: str) -> str | None:
    """Return `name` as the digits of a hash, in lower case; None if it does not look like a hash."""
    digits = name.strip().lower()
    is_length = len(digits) in (AUTOV1_DIGITS, AUTOV2_DIGITS, AUTOV3_DIGITS, SHA256_DIGITS)
    return digits if is_length and set(digits) <= set(string.hexdigits) else None


def hash_file(
    path: str | os.PathLike[str],
    with_data: bool,
    on_bytes: OnBytes = lambda count: None,
    tensors: RangeDigests | None = None,
) -> FileHashes:
    """Read the file at `path` once, from start to end, and hash it.

    `with_data` also computes the hash of the data, which doubles the time if the CPU and not the disk is the
    bottleneck; `tensors` gets all bytes, in a second thread. Raises CorruptFile if the file cannot be read.
    """
    with open_regular(path, "a file to hash") as (file, _):
        if hasattr(os, "posix_fadvise"):  # completely and in order: the kernel reads further ahead
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        data_begin = _data_begin(file) if with_data else None
        if tensors is None:
            return _hash(file, data_begin, on_bytes)
        with ThreadPoolExecutor(1, thread_name_prefix="digests") as executor:
            return _hash(file, data_begin, on_bytes, lambda *chunk: executor.submit(tensors.update, *chunk))


def _data_begin(file: BufferedReader) -> int | None:
    """Return the offset of the data of a safetensors file; None for a file that cannot be one."""
    header_bytes = int.from_bytes(file.read(SIZE_BYTES), "little")
    file.seek(0)
    return SIZE_BYTES + header_bytes if header_bytes <= MAX_HEADER_BYTES else None


def _hash(
    file: BufferedReader,
    data_begin: int | None,
    on_bytes: OnBytes,
    submit: Callable[[memoryview, int], Future[None]] | None = None,
) -> FileHashes:
    whole, data, autov1 = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    place = autov1_bytes = 0
    while count := file.readinto(buffer):
        chunk = buffer[:count]
        pending = None if submit is None else submit(chunk, place)
        whole.update(chunk)
        if data_begin is not None:
            data.update(chunk[max(0, data_begin - place) :])
        window = chunk[max(0, AUTOV1_BEGIN - place) : max(0, AUTOV1_BEGIN + AUTOV1_BYTES - place)]
        autov1.update(window)
        autov1_bytes += len(window)
        place += count
        if pending is not None:
            pending.result()  # before the buffer is filled again
        on_bytes(count)
    return FileHashes(
        sha256=whole.hexdigest(),
        autov1=autov1.hexdigest()[:AUTOV1_DIGITS] if autov1_bytes else "",
        data_sha256=data.hexdigest() if data_begin is not None else "",
    )
