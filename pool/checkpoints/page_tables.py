"""Pages of mapped files brought into memory and into this process' page table ahead of their use, in the background.

A file that is in the machine's memory still costs a fault for every few pages of a fresh mapping, a tenth of a second
for two gigabytes, in the middle of the first run; the kernel does it in one go, beside the building of the module. One
that is not is read on the way, with the read-ahead of faults, and so into large pages. Asking for its ranges instead
(`pool.checkpoints.reading_ahead`) leaves small ones behind, with which reading takes seven times the kernel's time for
2.5 GB (0.22 against 0.03 s) and every later mapping, in any process, ten times as long to fill (0.40 against 0.04 s).
Linux 5.14 and newer. Source of the number: Linux, include/uapi/asm-generic/mman-common.h
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
import threading
from collections.abc import Callable, Sequence

import torch

from pool.checkpoints.files.ranges import ByteRange

_POPULATE_READ = 22
#: of a mapping, in one call: whoever changes the process' mappings meanwhile waits for no longer than this takes
_BLOCK_BYTES = 2 << 20

Wanted = Sequence[tuple[torch.UntypedStorage, Sequence[ByteRange]]]


def begin_populating(wanted: Wanted, otherwise: Callable[[], object]) -> threading.Thread:
    """Bring these ranges of mappings into memory and into the page table from now on; returns at once.

    The thread that does it, which nobody has to wait for and which keeps the mappings until it is done. Where the
    system has no such call it calls `otherwise`.
    """

    def bring() -> None:
        if not populate(wanted):
            otherwise()

    thread = threading.Thread(target=bring, name="page tables", daemon=True)
    thread.start()
    return thread


def populate(wanted: Wanted) -> bool:
    """Bring these ranges of mappings into memory and the page table; whether the system did, or a file became
    shorter, as its user will find out."""
    if not sys.platform.startswith("linux"):
        return False
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for storage, ranges in wanted:
        address = storage.data_ptr()
        for begin, end in ranges:
            for at in range(begin - begin % mmap.PAGESIZE, end, _BLOCK_BYTES):
                if advise(address + at, min(_BLOCK_BYTES, end - at), _POPULATE_READ):
                    return ctypes.get_errno() == errno.EFAULT
    return True
