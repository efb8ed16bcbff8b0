"""The kinds of device that a pool runs on, and one opened device with an account of its memory.

Knows how each kind is asked for its memory; decides nothing about what is kept there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import psutil
import torch

from pool.devices import sim
from pool.devices.transfers import TransferCounters, TransferLedger
from pool.errors import UserError, unknown_name

#: what a simulated device has when no budget is given
DEFAULT_SIM_BYTES = 1 << 30
#: the share of free host memory that a CPU "device" takes when no budget is given
CPU_SHARE = 0.5


class DeviceKind(Enum):
    """Where a worker computes."""

    CUDA = "cuda"
    SIM = "sim"
    CPU = "cpu"


class DeviceMemory(Protocol):
    """The account of one device's memory, of this process's making."""

    #: told of streamed weights by the casting layers; None where the device counts by itself
    ledger: TransferLedger | None

    def total_bytes(self) -> int:
        """What this process may use."""
        ...

    def free_bytes(self) -> int:
        """What it may still use now."""
        ...

    def peak_bytes(self) -> int:
        """The most that was in use at once since `reset_peak`; 0 where nobody counts."""
        ...

    def reset_peak(self) -> None:
        """Start `peak_bytes` again from what is in use."""
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
        stats = sim.memory_stats(self._index)
        return stats.budget_bytes - stats.used_bytes

    def peak_bytes(self) -> int:
        return sim.memory_stats(self._index).peak_bytes

    def reset_peak(self) -> None:
        sim.reset_peak(self._index)

    def transfers(self) -> TransferCounters:
        stats = sim.memory_stats(self._index)
        return TransferCounters(stats.h2d_bytes, stats.h2d_count, stats.d2h_bytes, stats.d2h_count)


class CudaMemory:
    """torch's caching allocator and the driver. Bytes that the allocator caches count as free."""

    def __init__(self, index: int, budget_bytes: int | None) -> None:
        self._index = index
        self.ledger: TransferLedger | None = TransferLedger()
        free_bytes, card_bytes = torch.cuda.mem_get_info(index)
        self._total_bytes = min(budget_bytes or free_bytes, free_bytes)
        torch.cuda.set_per_process_memory_fraction(min(1.0, self._total_bytes / card_bytes), index)

    def total_bytes(self) -> int:
        return self._total_bytes

    def free_bytes(self) -> int:
        driver_free_bytes, _ = torch.cuda.mem_get_info(self._index)
        allocated_bytes = torch.cuda.memory_allocated(self._index)
        cached_bytes = torch.cuda.memory_reserved(self._index) - allocated_bytes
        return min(driver_free_bytes + cached_bytes, self._total_bytes - allocated_bytes)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._index)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._index)

    def transfers(self) -> TransferCounters:
        assert self.ledger is not None
        return self.ledger.counters()


class CpuMemory:
    """Host memory as a device. Nobody counts allocations there, so the budget holds by the plan alone."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.ledger: TransferLedger | None = TransferLedger()
        self._total_bytes = budget_bytes or int(psutil.virtual_memory().available * CPU_SHARE)

    def total_bytes(self) -> int:
        return self._total_bytes

    def free_bytes(self) -> int:
        return min(self._total_bytes, int(psutil.virtual_memory().available))

    def peak_bytes(self) -> int:
        return 0

    def reset_peak(self) -> None:
        """Nothing is counted."""

    def transfers(self) -> TransferCounters:
        assert self.ledger is not None
        return self.ledger.counters()


def open_device(kind: str, index: int, budget_bytes: int | None) -> OpenDevice:
    """The device of this kind, with at most `budget_bytes` (None: all that it has) for this process.

    Raises UserError for an unknown kind or a device that is not there.
    """
    if kind not in {k.value for k in DeviceKind}:
        raise unknown_name("device kind", kind, [k.value for k in DeviceKind])
    match DeviceKind(kind):
        case DeviceKind.SIM:
            sim.configure(index, budget_bytes or DEFAULT_SIM_BYTES)
            return OpenDevice(DeviceKind.SIM, torch.device("sim", index), "simulated GPU", SimMemory(index))
        case DeviceKind.CUDA:
            if index >= torch.cuda.device_count():
                raise UserError(f"device cuda:{index}: found {torch.cuda.device_count()} CUDA devices in this process")
            memory = CudaMemory(index, budget_bytes)
            name = torch.cuda.get_device_name(index)
            return OpenDevice(DeviceKind.CUDA, torch.device("cuda", index), name, memory)
        case DeviceKind.CPU:
            return OpenDevice(DeviceKind.CPU, torch.device("cpu"), "CPU", CpuMemory(budget_bytes))
