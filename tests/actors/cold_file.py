"""Files that are on a disk and not in memory, and how much of one is in memory. Linux only."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

PAGE = mmap.PAGESIZE


def cold_file(path: Path, size_bytes: int) -> Path:
    """A file of random bytes, none of which is in memory. Skips the test as `cold` does."""
    path.write_bytes(os.urandom(size_bytes))
    return cold(path)


def cold(path: Path) -> Path:
    """Have nothing of the file in memory. Skips the test where that cannot be had: such a file system is itself in
    memory."""
    if not hasattr(os, "posix_fadvise"):
        pytest.skip("this system has no way to drop a file from memory")
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if resident_pages(path).any():
        pytest.skip("this file system keeps its files in memory")
    return path


def resident_pages(path: Path) -> np.ndarray:
    """For each page of the file, whether it is in memory."""
    mapped = np.memmap(path, dtype=np.uint8, mode="r")
    pages = -(-mapped.nbytes // PAGE)
    found = np.zeros(pages, dtype=np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.mincore(
        ctypes.c_void_p(mapped.ctypes.data), ctypes.c_size_t(mapped.nbytes), ctypes.c_void_p(found.ctypes.data)
    )
    assert not failed, os.strerror(ctypes.get_errno())
    return (found & 1).astype(bool)
