"""Keeps memory that activations have freed in this process, where tensors of a device are in host memory. Torch-free.

Torch takes each tensor of a CPU from the C library, which gives large blocks back to the system at once and gets them
back page by page, all zeros: 1,300 page faults and 2 ms of 40 for a small image in batches of eight. Kept memory serves
the next step of a run, as the caches of GPU allocators do.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Mapping

#: larger blocks go back to the system when they are freed: the largest size that glibc allows to keep
KEPT_BLOCK_BYTES = 32 << 20
#: free memory at the end of each heap that is kept; a thread that computes has one
KEPT_BYTES = 64 << 20
#: options of glibc's mallopt
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
#: environment variables by which users choose themselves
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TUNABLES = "GLIBC_TUNABLES"


def keep_freed_memory(
    environment: Mapping[str, str] = os.environ, set_option: Callable[[int, int], object] | None = None
) -> bool:
    """Have the allocator of this process keep freed blocks up to `KEPT_BLOCK_BYTES`; return whether it does.

    Does nothing without glibc, and if the environment has settings of the user. `set_option` is `mallopt`."""
    has_settings = any(name in environment for name in _VARIABLES) or "malloc" in environment.get(_TUNABLES, "")
    if has_settings or not _is_glibc():
        return False
    change = set_option or ctypes.CDLL(None).mallopt
    change(_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    change(_TRIM_THRESHOLD, KEPT_BYTES)
    return True


def release_freed_memory() -> None:
    """Give the freed memory of this process back to the system. Does nothing without glibc."""
    if _is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
