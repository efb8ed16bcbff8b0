"""What a process of a CPU worker keeps of the memory that it frees.

Proves: with the settings, steps of a run take their memory from what the steps before freed, without page faults; the
settings of users stay; a device that ran out gives memory back.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from modelpool.pool.devices import device_kinds, host_allocator
from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.devices.host_allocator import KEPT_BLOCK_BYTES, keep_freed_memory

#: prints the page faults of steps in a thread of their own. Each step holds some megabytes together, as activations
STEPS = """
import resource, sys, threading
import torch
from modelpool.pool.devices.device_kinds import open_device
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
print(*found)
"""


@pytest.mark.skipif(not host_allocator._is_glibc(), reason="another C library")
def test_steps_take_what_the_steps_before_freed() -> None:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    environment["OMP_NUM_THREADS"] = "1"
    faults = {
        name: int(subprocess.check_output([sys.executable, "-c", STEPS, name], env=environment))
        for name in ("as usual", "kept")
    }
    step_pages = 24 * (1 << 20) // 4096
    assert faults["as usual"] > step_pages, "each step gets pages from the system"
    assert faults["kept"] < step_pages / 10


def test_a_cpu_device_that_ran_out_gives_back_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(device_kinds, "release_freed_memory", lambda: given_back.append(True))
    open_device("cpu", 0, 1 << 30).memory.release_cached()
    assert given_back == [True]


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
