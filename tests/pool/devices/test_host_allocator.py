"""What a process of a CPU worker keeps of the memory that it frees.

Proves: with the settings, steps of a run take their memory from what the steps before freed, without page faults; the
settings of users stay; an engine that ran out gives memory back.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from modelpool.pool.devices import host_allocator
from modelpool.pool.devices.host_allocator import KEPT_BLOCK_BYTES, keep_freed_memory

#: prints the page faults of steps in a thread of their own, and the resident bytes before and after what is kept is
#: released. Each step holds some megabytes together, as activations
STEPS = """
import resource, sys, threading
import psutil
import torch
from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.devices.host_allocator import release_freed_memory
if sys.argv[1] == "kept":
    open_device("cpu", 0, 1 << 30)
def step():
    held = [torch.ones(1 << 18) for _ in range(24)]
def steps():
    for _ in range(8):
        step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
found = []
thread = threading.Thread(target=steps)
thread.start()
thread.join()
process = psutil.Process()
found.append(process.memory_info().rss)
release_freed_memory()
print(*found, process.memory_info().rss)
"""


@pytest.mark.skipif(not host_allocator._is_glibc(), reason="another C library")
def test_steps_take_what_the_steps_before_freed() -> None:
    found = {
        name: [int(word) for word in subprocess.check_output([sys.executable, "-c", STEPS, name]).split()]
        for name in ("as usual", "kept")
    }
    step_pages = 24 * (1 << 20) // 4096
    assert found["as usual"][0] > step_pages, "each step gets pages from the system"
    assert found["kept"][0] < step_pages / 10
    _, before, after = found["kept"]
    assert before - after > 8 << 20, "what is kept can be given back"


def test_settings_of_users_stay() -> None:
    made: list[tuple[int, int]] = []

    def set_option(option: int, value: int) -> None:
        made.append((option, value))

    for given in ({"MALLOC_TRIM_THRESHOLD_": "1"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}):
        assert not keep_freed_memory(given, set_option), given
    assert made == []
    if host_allocator._is_glibc():
        assert keep_freed_memory({}, set_option)
        assert KEPT_BLOCK_BYTES in dict(made).values()
