"""Opens a device of any kind, with accounting of its memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from modelpool.pool.devices.accelerator_memory import AcceleratorMemory, memory_calls
from modelpool.pool.devices.allocator_settings import PROBE_BYTES, prepare_segments
from modelpool.pool.devices.capabilities import detect_capabilities
from modelpool.pool.devices.host_allocator import keep_freed_memory, release_freed_memory
from modelpool.pool.devices.kind_names import AUTO, RAY_COUNTS, DeviceKind, choose_kind
from modelpool.pool.devices.memory_limits import HostMemory, HostMemoryReader
from modelpool.pool.devices.memory_wait import MemoryWait
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.sim import sim_layers
from modelpool.pool.devices.torch_api.torch_private import set_allocator_settings
from modelpool.pool.devices.torch_modules import FindModule, device_count, device_module, device_name, torch_device
from modelpool.pool.devices.transfers import TransferCounters, TransferLedger
from modelpool.pool.values.core.errors import UserError, unknown_name

__all__ = ["CpuMemory", "DeviceKind", "DeviceMemory", "OpenDevice", "SimMemory", "device_kind", "open_device"]

#: default memory of a simulated device
DEFAULT_SIM_BYTES = 1 << 30
#: default budget of a CPU "device", as a fraction of free host memory
CPU_SHARE = 0.5


class DeviceMemory(Protocol):
    """Memory accounting of one device for this process."""

    #: counts weights streamed by the casting layers; None if the device counts by itself
    ledger: TransferLedger | None

    def total_bytes(self) -> int:
        """Return the memory for this process: its budget, or what was free when the device was opened if that was
        less."""
        ...

    def free_bytes(self) -> int:
        """Return the memory that the device could still give to this process, including unused memory that it holds; a
        budget is not considered.

        For a device defined by its budget (sim, cpu), the rest of the budget.
        """
        ...

    def peak_bytes(self) -> int:
        """Return the peak since `reset_peak`; 0 if it is not measured."""
        ...

    def reset_peak(self) -> None:
        """Restart `peak_bytes` from current use."""
        ...

    def cached_bytes(self) -> int:
        """Return the memory that the allocator holds and no tensor uses; 0 if it is not measured."""
        ...

    def release_cached(self) -> None:
        """Return the allocator's cache to the driver."""
        ...

    def refusals(self) -> int:
        """Return how often the allocator had no memory, including when torch did something else instead; 0 if it is
        not counted."""
        ...

    def may_grow(self) -> bool:
        """Return whether `grow` would take memory now. Asks the driver; changes nothing, on any thread."""
        ...

    def grow(self) -> bool:
        """Take memory that was in use by other processes when the device was opened, up to the budget, if much of it is
        free now. Returns whether `total_bytes` has grown."""
        ...

    def close(self) -> None:
        """Lift the limits that this engine put on the process. Idempotent."""
        ...

    def transfers(self) -> TransferCounters:
        """Return the counts of bytes that crossed the bus."""
        ...


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """An open device, ready for computation.

    linear  computes a linear layer from input, weight and bias, or returns None to decline; None for torch's
    layer   the same for other layers: `function(layer, input, weight, bias)`, one operation of torch
    """

    kind: DeviceKind
    torch_device: torch.device
    name: str
    memory: DeviceMemory
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor | None] | None = None
    layer: Callable[..., torch.Tensor | None] | None = None


class _FixedMemory:
    """The part of memory without an allocator that caches, and with a fixed budget."""

    def cached_bytes(self) -> int:
        """Nothing is cached, or unknown: the C library serves other tensors from it."""
        return 0

    def release_cached(self) -> None:
        """Nothing is cached."""

    def refusals(self) -> int:
        """Every one is an error."""
        return 0

    def may_grow(self) -> bool:
        return False

    def grow(self) -> bool:
        """Its memory is the budget."""
        return False

    def close(self) -> None:
        """The device keeps its budget."""


class SimMemory(_FixedMemory):
    """Memory of a simulated device, which counts exactly."""

    def __init__(self, index: int) -> None:
        self._index = index
        self.ledger: TransferLedger | None = None

    def total_bytes(self) -> int:
        return sim.memory_stats(self._index).budget_bytes

    def free_bytes(self) -> int:
        sim.require(self._index)
        stats = sim.memory_stats(self._index)
        return stats.budget_bytes - stats.used_bytes - stats.foreign_bytes

    def peak_bytes(self) -> int:
        return sim.memory_stats(self._index).peak_bytes

    def reset_peak(self) -> None:
        sim.reset_peak(self._index)

    def transfers(self) -> TransferCounters:
        stats = sim.memory_stats(self._index)
        return TransferCounters(stats.h2d_bytes, stats.h2d_count, stats.d2h_bytes, stats.d2h_count)


class CpuMemory(_FixedMemory):
    """Host memory as a device. Allocations are not counted there: only plans enforce the budget."""

    def __init__(self, budget_bytes: int | None, host: Callable[[], HostMemory] | None = None) -> None:
        self.ledger: TransferLedger | None = TransferLedger()
        self._host = host = host or HostMemoryReader()
        self._total_bytes = budget_bytes or int(host().available_bytes * CPU_SHARE)

    def total_bytes(self) -> int:
        return self._total_bytes

    def free_bytes(self) -> int:
        return min(self._total_bytes, self._host().available_bytes)

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        """Nothing is counted."""

    def release_cached(self) -> None:
        """Returns what the C library keeps."""
        release_freed_memory()

    def transfers(self) -> TransferCounters:
        assert self.ledger is not None
        return self.ledger.counters()


def device_kind(name: str, find_module: FindModule = device_module) -> DeviceKind:
    """Return the device kind `name`. "cuda" is ROCm if torch was built for it, which torch also calls cuda. "auto" is
    the kind of the GPU that Ray assigned to this process.

    Raises UnknownName.
    """
    if name == AUTO:
        return choose_kind(None, [kind for kind in RAY_COUNTS if _has_devices(kind, find_module)], has_gpus=True)
    if name not in {kind.value for kind in DeviceKind}:
        raise unknown_name("device kind", name, [kind.value for kind in DeviceKind])
    kind = DeviceKind(name)
    is_rocm = kind is DeviceKind.CUDA and find_module(DeviceKind.ROCM) is not None
    return choose_kind(kind, [DeviceKind.ROCM] if is_rocm else [], has_gpus=True)


def prepare_allocator(kind: DeviceKind, index: int = 0) -> None:
    """Choose the settings of this process's allocator for device `index` of `kind`, as `prepare_segments`. Nothing
    changes while it holds memory there: an earlier engine has chosen, and that memory would serve the probe."""
    if torch.cuda.memory_reserved(index):
        return
    prepare_segments(kind, lambda: _allocate_once(index), set_allocator_settings, os.environ)


def _allocate_once(index: int) -> None:
    """Allocate and write a little memory of a CUDA device, and give it back."""
    torch.zeros(PROBE_BYTES, dtype=torch.uint8, device=torch.device("cuda", index))
    torch.cuda.synchronize(index)
    torch.cuda.empty_cache()


def _has_devices(kind: DeviceKind, find_module: FindModule) -> bool:
    try:
        return device_count(find_module(kind)) > 0
    except UserError:
        return False  # reported by `modelpool doctor`


def open_device(
    kind: str,
    index: int,
    budget_bytes: int | None,
    find_module: FindModule = device_module,
    waiting: MemoryWait | None = None,
) -> OpenDevice:
    """Open the device of this kind with at most `budget_bytes` (None: all of its memory) for this process.

    `find_module` returns the torch module of a kind. Waits for processes that are ending there, at most as `waiting`
    says (None: the default), if less than that is free. If tensors are in host memory, this process keeps what they
    free. Raises UserError for an unknown kind or a missing device.
    """
    match device_kind(kind, find_module):
        case DeviceKind.SIM:
            keep_freed_memory()
            sim.configure(index, budget_bytes or DEFAULT_SIM_BYTES)
            place = torch.device("sim", index)
            return OpenDevice(
                DeviceKind.SIM, place, "simulated GPU", SimMemory(index), sim_layers.linear, sim_layers.layer
            )
        case DeviceKind.CPU:
            keep_freed_memory()
            return OpenDevice(DeviceKind.CPU, torch.device("cpu"), "CPU", CpuMemory(budget_bytes))
        case found:
            module = find_module(found)
            count = device_count(module)
            if index >= count:
                hint = f"; is {found.facts.package} installed?" if module is None and found.facts.package else ""
                title = found.facts.title
                raise UserError(f"device {found.value}:{index}: found {count} of kind {title} in this process{hint}")
            if module is torch.cuda:
                prepare_allocator(found, index)
            calls = memory_calls(found, module, index)
            shares = detect_capabilities(found, index, find_module=find_module).shares_host_memory
            if calls.driver is not None and not shares and not calls.reserved():
                (waiting or MemoryWait()).until_settled(f"{found.value}:{index}", calls.driver, budget_bytes)
            memory = AcceleratorMemory(calls, budget_bytes)
            place = torch_device(found, module, index)
            return OpenDevice(found, place, device_name(found, module, index), memory)
