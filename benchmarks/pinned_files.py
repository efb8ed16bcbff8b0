"""What pinning the pages of a mapped file does on a file system: `python -m benchmarks.pinned_files FOLDER ...`.

A driver pins for a long time and, without its flag for read-only memory, for writing. The kernel does the same for the
buffers that a program registers with io_uring, so this measures it without a GPU: whether it pins, and how many bytes
become private copies. Pins for reading cannot be measured so. Linux on x86-64 and aarch64.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
SIZE_BYTES = 16 * MIB
#: system calls, equal on all recent architectures
_SETUP, _REGISTER = 425, 427
_REGISTER_BUFFERS = 0
_RING_PARAMETERS_BYTES = 120


@dataclass(frozen=True, slots=True)
class PinnedMapping:
    """A measurement.

    mapping       kind of the mapping
    refusal       why the kernel did not pin it; empty if it did
    copied_bytes  that became private memory of this process
    """

    mapping: str
    refusal: str
    copied_bytes: int


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("size_bytes", ctypes.c_size_t))


def pin(address: int, size_bytes: int) -> tuple[int, str]:
    """Pin memory for writing and a long time; returns a file descriptor that holds the pin, and the reason of a
    refusal. Raises OSError if this system has no io_uring."""
    library = ctypes.CDLL(None, use_errno=True)
    ring = int(library.syscall(_SETUP, 4, ctypes.create_string_buffer(_RING_PARAMETERS_BYTES)))
    if ring < 0:
        raise OSError(ctypes.get_errno(), "io_uring_setup")
    vector = _Vector(address, size_bytes)
    failed = library.syscall(_REGISTER, ring, _REGISTER_BUFFERS, ctypes.byref(vector), 1) < 0
    return ring, os.strerror(ctypes.get_errno()) if failed else ""


def copied_bytes(address: int) -> int:
    """Return the private bytes of the mapping at `address`."""
    is_found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_found = begin <= address < end
        elif is_found and first == "Anonymous:":
            return int(rest[0]) << 10
    raise ValueError(f"address {address:#x}: found no mapping, expected one")


def measure(folder: Path) -> Iterator[PinnedMapping]:
    """Pin a new file of `folder`, mapped in each way."""
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(os.urandom(SIZE_BYTES))
        file.flush()
        for name, access, protection in (
            ("private", mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE),
            ("private, read-only", mmap.MAP_PRIVATE, mmap.PROT_READ),
            ("shared", mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),
            ("shared, read-only", mmap.MAP_SHARED, mmap.PROT_READ),
        ):
            address = _mapped(file.fileno(), access, protection)
            ring, refusal = pin(address, SIZE_BYTES)
            yield PinnedMapping(name, refusal, copied_bytes(address))
            os.close(ring)
            _libc().munmap(ctypes.c_void_p(address), ctypes.c_size_t(SIZE_BYTES))


def file_system(folder: Path) -> str:
    """Return the type of the file system of `folder`."""
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if folder.resolve().is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


def _mapped(file: int, access: int, protection: int) -> int:
    address = _libc().mmap(None, SIZE_BYTES, protection, access, file, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(address)


def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return library


def main() -> None:
    """Print a table of the file systems of the given folders."""
    print("| file system | mapping | pinned | became private |\n| --- | --- | --- | --- |")
    for folder in map(Path, sys.argv[1:] or ["."]):
        for found in measure(folder):
            how = found.refusal or "yes"
            share = found.copied_bytes / SIZE_BYTES
            print(f"| {file_system(folder)} | {found.mapping} | {how} | {share:.0%} |")


if __name__ == "__main__":
    main()
