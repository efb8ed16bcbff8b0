"""Pages of a mapped file put into this process' page table ahead of their use, in the background.

A file that is in the machine's memory still costs a fault for every few pages of a fresh mapping, a tenth of a second
for two gigabytes, in the middle of the first run. The kernel does it in one go, beside the building of the module.
Linux 5.14 and newer; advisory: elsewhere nothing happens.
Source of the number: Linux, include/uapi/asm-generic/mman-common.h
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Sequence

import torch

from pool.checkpoints.files.ranges import ByteRange

_POPULATE_READ = 22
#: of a mapping, in one call: whoever changes the process' mappings meanwhile waits for no longer than this takes
_BLOCK_BYTES = 16 << 20

Wanted = Sequence[tuple[torch.UntypedStorage, Sequence[ByteRange]]]


def begin_populating(wanted: Wanted) -> threading.Thread | None:
    """Put these ranges of mappings into the page table from now on; returns at once.

    The thread that does it, which nobody has to wait for and which keeps the mappings until it is done; None where the
    system has no such call.
    """
    if not sys.platform.startswith("linux"):
        return None
    thread = threading.Thread(target=populate, args=(wanted,), name="page tables", daemon=True)
    thread.start()
    return thread


def populate(wanted: Wanted) -> bool:
    """Put these ranges of mappings into the page table; whether the system did. Reads nothing that is in memory."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for storage, ranges in wanted:
        address = storage.data_ptr()
        for begin, end in ranges:
            for at in range(begin - begin % mmap.PAGESIZE, end, _BLOCK_BYTES):
                if advise(address + at, min(_BLOCK_BYTES, end - at), _POPULATE_READ):
                    return False  # an older kernel, or a file that became shorter: its user finds out
    return True
