"""Prefetches byte ranges of mapped files into memory and into this process's page table, in a background thread.

Ranges that are not in memory are requested from the system a window ahead of populating the page table: this keeps the
disk busy and fills memory by single pages. Reading through the mapping instead fills memory in blocks of up to 2 MiB,
which every later mapping enters into its page table in a tenth of the time (0.04 against 0.40 s for 2.5 GB). But on a
virtual machine with a host that reclaims free blocks, each page of such a block costs a host page fault at its first
touch: 8 microseconds, or four seconds for two gigabytes, in the middle of the first run (benchmarks/RESULTS.md).
A file that is in memory still costs a page fault for every few pages of a fresh mapping, a tenth of a second for two
gigabytes; the kernel populates the page table in one go, while the module is being built. Linux 5.14 and newer.
Source of the constant: Linux, include/uapi/asm-generic/mman-common.h
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from modelpool.pool.files.formats.byte_ranges import ByteRange
from modelpool.pool.files.formats.page_cache import advise_willneed, in_memory
from modelpool.pool.values.core.errors import UserError

_POPULATE_READ = 22
#: per madvise call: threads that change the process's mappings wait at most for one call
_BLOCK_BYTES = 2 << 20
#: prefetched ahead of populating the page table: enough to keep a disk busy, and little enough that readers of other
#: bytes do not wait long behind it
_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PrefetchRanges:
    """Ranges of one mapped file, in file order."""

    path: str
    storage: torch.UntypedStorage
    ranges: Sequence[ByteRange]


def start_prefetch(parts: Sequence[PrefetchRanges]) -> threading.Thread:
    """Start bringing these ranges into memory and the page table; return after sampling each file, without waiting for
    a disk.

    Returns the thread, which need not be joined and keeps the mappings until it is done. Advisory: where the system
    cannot prefetch, or a file is gone or became shorter, readers of the bytes get the error. A file that was deleted
    after it was mapped is read through its mapping.
    """

    # sampled here: a thread next to one that builds a module runs rarely, and 64 samples took it a third of a second
    # (its requests are small for the same reason, which keeps a fast disk below its full speed for that time)
    cold = [not in_memory(part.path, part.ranges) for part in parts]

    def prefetch() -> None:
        for part, is_cold in zip(parts, cold, strict=True):
            _prefetch(part, is_cold)

    thread = threading.Thread(target=prefetch, name="read ahead", daemon=True)
    thread.start()
    return thread


def _prefetch(part: PrefetchRanges, is_cold: bool) -> None:
    """`is_cold`: part of it is not in memory."""
    if not is_cold:
        populate(part.storage, part.ranges)
        return
    windows, populates = list(_windows(part.ranges)), True
    for place, window in enumerate(windows):
        with contextlib.suppress(OSError, UserError):
            advise_willneed(part.path, windows[:2] if place == 0 else windows[place + 1 : place + 2])
        populates = populates and populate(part.storage, (window,))


def _windows(ranges: Sequence[ByteRange]) -> Iterator[ByteRange]:
    for begin, end in ranges:
        for at in range(begin, end, _WINDOW_BYTES):
            yield at, min(at + _WINDOW_BYTES, end)


def populate(storage: torch.UntypedStorage, ranges: Sequence[ByteRange]) -> bool:
    """Bring these ranges of a mapping into memory and the page table. Return whether the system did so; also True when
    the file became shorter, which its reader will notice."""
    if not sys.platform.startswith("linux"):
        return False
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = storage.data_ptr()
    for begin, end in ranges:
        for at in range(begin - begin % mmap.PAGESIZE, end, _BLOCK_BYTES):
            if advise(address + at, min(_BLOCK_BYTES, end - at), _POPULATE_READ):
                return ctypes.get_errno() == errno.EFAULT
    return True
