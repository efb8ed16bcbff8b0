"""Opens a device of any kind: one opened device with an account of its memory.

Decides nothing about what is kept there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from modelpool.pool.core.errors import UserError, unknown_name
from modelpool.pool.devices.accelerator_memory import AcceleratorMemory, memory_calls
from modelpool.pool.devices.kind_names import AUTO, RAY_COUNTS, DeviceKind, choose_kind
from modelpool.pool.devices.memory_limits import HostMemory, host_memory
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.torch_modules import FindModule, device_count, device_module, device_name, torch_device
from modelpool.pool.devices.transfers import TransferCounters, TransferLedger

__all__ = ["CpuMemory", "DeviceKind", "DeviceMemory", "OpenDevice", "SimMemory", "device_kind", "open_device"]

#: what a simulated device has when no budget is given
DEFAULT_SIM_BYTES = 1 << 30
#: the share of free host memory that a CPU "device" takes when no budget is given
CPU_SHARE = 0.5


class DeviceMemory(Protocol):
    """The account of one device's memory, of this process's making."""

    #: told of streamed weights by the casting layers; None where the device counts by itself
    ledger: TransferLedger | None

    def total_bytes(self) -> int:
        """What this process may use: its budget, or what was free when the device was opened if that was less."""
        ...

    def free_bytes(self) -> int:
        """What the device could give to this process now; what it has and does not use is counted, a budget is not.

        Of a device that is made of its budget (sim, cpu), what is left of that.
        """
        ...

    def peak_bytes(self) -> int:
        """The most that was in use at once since `reset_peak`; 0 where nobody counts."""
        ...

    def reset_peak(self) -> None:
        """Start `peak_bytes` again from what is in use."""
        ...

    def release_cached(self) -> None:
        """Give back to the driver what the allocator keeps for tensors to come."""
        ...

    def transfers(self) -> TransferCounters:
        """What has crossed the bus."""
        ...


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """One device, ready to be computed on."""

    kind: DeviceKind
    torch_device: torch.device
    name: str
    memory: DeviceMemory


class SimMemory:
    """A simulated device counts by itself, exactly."""

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

    def release_cached(self) -> None:
        """Nothing is cached."""

    def transfers(self) -> TransferCounters:
        stats = sim.memory_stats(self._index)
        return TransferCounters(stats.h2d_bytes, stats.h2d_count, stats.d2h_bytes, stats.d2h_count)


class CpuMemory:
    """Host memory as a device. Nobody counts allocations there, so the budget holds by the plan alone."""

    def __init__(self, budget_bytes: int | None, host: Callable[[], HostMemory] = host_memory) -> None:
        self.ledger: TransferLedger | None = TransferLedger()
        self._host = host
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
        """Nothing is cached."""

    def transfers(self) -> TransferCounters:
        assert self.ledger is not None
        return self.ledger.counters()


def device_kind(name: str, find_module: FindModule = device_module) -> DeviceKind:
    """The kind called `name`. "cuda" is ROCm where torch was built for it: torch calls both so. "auto" is the kind of
    the GPU that Ray gave to this process.

    Raises UnknownName.
    """
    if name == AUTO:
        return choose_kind(None, [kind for kind in RAY_COUNTS if _has_devices(kind, find_module)], has_gpus=True)
    if name not in {kind.value for kind in DeviceKind}:
        raise unknown_name("device kind", name, [kind.value for kind in DeviceKind])
    kind = DeviceKind(name)
    is_rocm = kind is DeviceKind.CUDA and find_module(DeviceKind.ROCM) is not None
    return choose_kind(kind, [DeviceKind.ROCM] if is_rocm else [], has_gpus=True)


def _has_devices(kind: DeviceKind, find_module: FindModule) -> bool:
    try:
        return device_count(find_module(kind)) > 0
    except UserError:
        return False  # `modelpool doctor` tells of it


def open_device(kind: str, index: int, budget_bytes: int | None, find_module: FindModule = device_module) -> OpenDevice:
    """The device of this kind, with at most `budget_bytes` (None: all that it has) for this process.

    `find_module` finds torch's module for a kind. Raises UserError for an unknown kind or a device that is not there.
    """
    match device_kind(kind, find_module):
        case DeviceKind.SIM:
            sim.configure(index, budget_bytes or DEFAULT_SIM_BYTES)
            return OpenDevice(DeviceKind.SIM, torch.device("sim", index), "simulated GPU", SimMemory(index))
        case DeviceKind.CPU:
            return OpenDevice(DeviceKind.CPU, torch.device("cpu"), "CPU", CpuMemory(budget_bytes))
        case found:
            module = find_module(found)
            count = device_count(module)
            if index >= count:
                hint = f"; is {found.facts.package} installed?" if module is None and found.facts.package else ""
                title = found.facts.title
                raise UserError(f"device {found.value}:{index}: found {count} of kind {title} in this process{hint}")
            memory = AcceleratorMemory(memory_calls(found, module, index), budget_bytes)
            place = torch_device(found, module, index)
            return OpenDevice(found, place, device_name(found, module, index), memory)
