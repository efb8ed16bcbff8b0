"""Memory that large bodies took is returned to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from modelpool.actors.http.server import return_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "set":
    return_freed_memory()
large = b"x" * (30 << 20)
del large  # glibc's own threshold is as large from here on
before = resident()
held = []
for _ in range(10):
    large = b"x" * (4 << 20), b"y" * 60_000
    held.append(large)
small = [each[1] for each in held]
del large, held
print(resident() - before)
"""


def kept_bytes(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is that of glibc")
def test_freed_large_blocks_go_back_to_the_system() -> None:
    """After 100 prompts of 60,000 characters, a server kept 139 MB."""
    assert kept_bytes("default") > 20 << 20, "the default keeps them, or this test shows nothing"
    assert kept_bytes("set") < 4 << 20
