"""Bytes of mapped files brought into memory and into this process' page table ahead of their use, in the background.

What is not in the machine's memory is asked for by its ranges, some ahead of where the page table is: that keeps the
disk busy, and fills memory by the page. Reading through the mapping instead fills it in blocks of up to 2 MiB, which
every later mapping puts into its page table in a tenth of the time (0.04 against 0.40 s for 2.5 GB). But on a virtual
machine whose host takes back the blocks that are free, each page of such a block costs a fault of the host at its first
touch: 8 microseconds, four seconds for two gigabytes, in the middle of the first run (benchmarks/RESULTS.md).
A file that is in memory still costs a fault for every few pages of a fresh mapping, a tenth of a second for two
gigabytes; the kernel puts them into the page table in one go, beside the building of the module. Linux 5.14 and newer.
Source of the number: Linux, include/uapi/asm-generic/mman-common.h
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

from modelpool.pool.core.errors import UserError
from modelpool.pool.formats.byte_ranges import ByteRange
from modelpool.pool.formats.page_cache import ask_for, in_memory

_POPULATE_READ = 22
#: of a mapping, in one call: whoever changes the process' mappings meanwhile waits for no longer than this takes
_BLOCK_BYTES = 2 << 20
#: the most of a range that is asked for ahead of where the page table is: enough to keep a disk busy, and little enough
#: that whoever needs other bytes of it first does not wait long behind them
_WINDOW_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """Ranges of one mapped file, in the order of the file."""

    path: str
    storage: torch.UntypedStorage
    ranges: Sequence[ByteRange]


def begin_bringing(wanted: Sequence[Wanted]) -> threading.Thread:
    """Bring these ranges into memory and into the page table from now on; returns once some places of each file were
    looked at, without waiting for a disk.

    The thread that does it, which nobody has to wait for and which keeps the mappings until it is done. Advisory: where
    the system cannot, or a file is gone or became shorter, whoever uses the bytes finds out. One that is gone by then
    comes through its mapping.
    """

    # looked at here: beside one that builds a module a thread gets its turn rarely, and 64 looks took it a third of a
    # second (what it asks for it asks for in as small pieces, which keeps a fast disk from its full speed meanwhile)
    cold = [not in_memory(part.path, part.ranges) for part in wanted]

    def bring() -> None:
        for part, asks in zip(wanted, cold, strict=True):
            _bring(part, asks)

    thread = threading.Thread(target=bring, name="read ahead", daemon=True)
    thread.start()
    return thread


def _bring(wanted: Wanted, asks: bool) -> None:
    """`asks`: part of it is not in memory."""
    if not asks:
        populate(wanted.storage, wanted.ranges)
        return
    windows, populates = list(_windows(wanted.ranges)), True
    for place, window in enumerate(windows):
        with contextlib.suppress(OSError, UserError):
            ask_for(wanted.path, windows[:2] if place == 0 else windows[place + 1 : place + 2])
        populates = populates and populate(wanted.storage, (window,))


def _windows(ranges: Sequence[ByteRange]) -> Iterator[ByteRange]:
    for begin, end in ranges:
        for at in range(begin, end, _WINDOW_BYTES):
            yield at, min(at + _WINDOW_BYTES, end)


def populate(storage: torch.UntypedStorage, ranges: Sequence[ByteRange]) -> bool:
    """Bring these ranges of a mapping into memory and the page table; whether the system did, or the file became
    shorter, as its user will find out."""
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
