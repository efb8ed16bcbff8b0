"""A stand-in for `torch.cuda` over the simulated device: a card of 80 GiB with a caching allocator, a workspace of
cuBLAS for each stream that multiplies, and the streams and events of `StreamChecker`.

The allocator reserves what was used at the peak, until its cache is emptied or its cap is reached; workspaces count as
tensors. A copy of the source tree (`stand_in_tree`) uses this module in the place of `torch.cuda`. It has no graphs.
"""

# ruff: noqa: N802 - torch's own names

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from modelpool.pool.devices.pinned_memory import StagingRing
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.sim import tensor as sim_tensor
from tests.pool.devices.stream_checker import CheckedEvent, CheckedStream, StreamChecker, install

GIB = 1 << 30
TOTAL_BYTES = int(79.2 * GIB)
CONTEXT_BYTES = int(0.55 * GIB)
#: as on Hopper
WORKSPACE_BYTES = 32 << 20
SEGMENT_BYTES = 2 << 20
#: file descriptors of mapped files cannot be pinned: the error of a driver on such a system
NOT_SUPPORTED = 801
_MATMULS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm"})

OutOfMemoryError = torch.OutOfMemoryError


class _State:
    """What the process's CUDA state would be. `foreign_bytes` are used by other processes."""

    fraction = 1.0
    reserved_bytes = 0
    foreign_bytes = 0
    workspaces: dict[str, torch.Tensor | None]

    def __init__(self) -> None:
        self.workspaces = {}


state = _State()
checker = StreamChecker(int(os.environ.get("STAND_IN_SEED", "1")))


def _start() -> None:
    install(pytest.MonkeyPatch())  # for the life of the process
    sim.configure(0, TOTAL_BYTES - CONTEXT_BYTES)
    StreamChecker.active = checker
    run, stage = sim_tensor.run, StagingRing.stage
    rings: set[int] = set()

    def run_with_workspace(op: Any, args: Any, kwargs: Any) -> Any:
        stream = checker.current().name
        if op._schema.name.removeprefix("aten::") in _MATMULS and stream not in state.workspaces:
            state.workspaces[stream] = None  # the allocation is no product
            state.workspaces[stream] = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="sim:0")
        return run(op, args, kwargs)

    def watched_stage(self: StagingRing, *given: Any) -> Any:
        if id(self) not in rings:
            rings.add(id(self))
            checker.watch_ring(self)
        return stage(self, *given)

    sim_tensor.run = sim.run = run_with_workspace  # type: ignore[attr-defined]
    StagingRing.stage = watched_stage  # type: ignore[method-assign]


_start()


def _used_bytes() -> int:
    return sim.memory_stats(0).used_bytes


def _note_peak() -> None:
    peak_bytes = max(sim.memory_stats(0).peak_bytes, _used_bytes())
    state.reserved_bytes = max(state.reserved_bytes, -(-peak_bytes // SEGMENT_BYTES) * SEGMENT_BYTES)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_name(index: Any = 0) -> str:
    return "NVIDIA H100 80GB HBM3"


def get_device_properties(index: Any = 0) -> Any:
    return SimpleNamespace(
        major=9,
        minor=0,
        total_memory=TOTAL_BYTES,
        uuid="0000",
        is_integrated=False,
        name=get_device_name(),
        multi_processor_count=132,
    )


def get_device_capability(index: Any = 0) -> tuple[int, int]:
    return (9, 0)


def is_bf16_supported() -> bool:
    return True


def device(place: Any) -> AbstractContextManager[None]:
    return nullcontext()


def mem_get_info(index: Any = 0) -> tuple[int, int]:
    _note_peak()
    return max(0, TOTAL_BYTES - CONTEXT_BYTES - state.reserved_bytes - state.foreign_bytes), TOTAL_BYTES


def memory_allocated(index: Any = 0) -> int:
    return _used_bytes()


def memory_reserved(index: Any = 0) -> int:
    _note_peak()
    return state.reserved_bytes


def max_memory_allocated(index: Any = 0) -> int:
    return sim.memory_stats(0).peak_bytes


def max_memory_reserved(index: Any = 0) -> int:
    return memory_reserved()


def reset_peak_memory_stats(index: Any = 0) -> None:
    _note_peak()
    sim.reset_peak(0)


def set_per_process_memory_fraction(fraction: float, index: Any = 0) -> None:
    state.fraction = fraction
    sim.configure(0, max(_used_bytes(), min(TOTAL_BYTES - CONTEXT_BYTES, int(fraction * TOTAL_BYTES))))


def get_per_process_memory_fraction(index: Any = 0) -> float:
    return state.fraction


def empty_cache() -> None:
    checker.empty_cache()
    state.reserved_bytes = -(-_used_bytes() // SEGMENT_BYTES) * SEGMENT_BYTES
    sim.reset_peak(0)


def memory_stats(index: Any = 0) -> dict[str, int]:
    return {"num_ooms": 0}


def free_workspaces() -> None:
    """As torch's private function."""
    state.workspaces.clear()


def Stream(place: Any = None) -> CheckedStream:
    return checker.new_stream()


class TimedEvent(CheckedEvent):
    """An event with the time of its record."""

    recorded_at = 0.0

    def record(self, stream: CheckedStream | None = None) -> None:
        super().record(stream)
        self.recorded_at = time.perf_counter()

    def elapsed_time(self, end: TimedEvent) -> float:
        return 1000 * (end.recorded_at - self.recorded_at)


def Event(enable_timing: bool = False, blocking: bool = False) -> TimedEvent:
    return TimedEvent(checker)


def current_stream(place: Any = None) -> CheckedStream:
    return checker.current()


def stream(chosen: CheckedStream) -> AbstractContextManager[None]:
    return checker.on(chosen)


def synchronize(place: Any = None) -> None:
    for each in checker.streams:
        each.synchronize()


def is_current_stream_capturing() -> bool:
    return False


def _sleep(cycles: int) -> None:
    """Nothing takes time."""


def cudart() -> Any:
    return SimpleNamespace(
        cudaHostRegister=lambda address, size_bytes, flags: NOT_SUPPORTED, cudaHostUnregister=lambda address: 0
    )
