"""Memory of an accelerator with a torch allocator, of any vendor.

One class; vendors differ in a value, `MemoryCalls`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.memory_limits import HostMemory, host_memory
from modelpool.pool.devices.torch_api.torch_private import free_workspaces
from modelpool.pool.devices.transfers import TransferCounters, TransferLedger

#: largest cap: torch reports 1 for a process that is not limited
MOST_SHARE = 1 - 1e-9
#: assumed memory of a device that does not report it, without a budget
UNREPORTED_BYTES = 1 << 30
#: a process takes more of a device in steps of at least this fraction of it: each step changes plans and predictions
GROWTH_SHARE = 1 / 32


@dataclass(frozen=True, slots=True)
class MemoryCalls:
    """Functions that query the memory of one device. All in bytes.

    driver      free and total, including other processes; None if the device does not report it
    allocated   in tensors of this process
    reserved    taken from the driver by this process, for tensors and the allocator's cache
    peak        maximum in tensors since `reset_peak`
    cap         limit this process to a fraction (0 to 1) of the device
    capped      the fraction that this process is limited to, 1 if it is not limited; None if unknown
    release     return the allocator's cache to the driver
    refusals    how often the allocator had no memory
    forget      free the workspaces of libraries on all devices of the process, which count as tensors; they are made
                again when needed
    others      whether an engine of the process uses another device
    """

    driver: Callable[[], tuple[int, int]] | None
    allocated: Callable[[], int]
    reserved: Callable[[], int]
    peak: Callable[[], int]
    reset_peak: Callable[[], None]
    cap: Callable[[float], None]
    capped: Callable[[], float | None]
    release: Callable[[], None]
    refusals: Callable[[], int] = lambda: 0
    forget: Callable[[], None] = lambda: None
    others: Callable[[], bool] = lambda: False


def memory_calls(
    kind: DeviceKind, module: Any, index: int, host: Callable[[], HostMemory] = host_memory
) -> MemoryCalls:
    """Return the calls for device `index` of `kind`, in its torch `module`."""
    if not kind.facts.reports_memory:
        return _SILENT
    return _mps_calls(module, host) if kind is DeviceKind.MPS else _usual_calls(module, index)


class AcceleratorMemory:
    """One accelerator, by torch's caching allocator and its driver. Bytes cached by the allocator count as free."""

    def __init__(self, calls: MemoryCalls, budget_bytes: int | None) -> None:
        """Use at most `budget_bytes` (None: currently free memory), enforced by the allocator if possible."""
        self._calls = calls
        #: what this engine adds to the cap of the process
        self._share = 0.0
        #: held by the process before its first engine
        self._before_bytes = 0
        self._budget_bytes = budget_bytes
        self.ledger: TransferLedger | None = TransferLedger()
        if calls.driver is None:
            self._total_bytes = budget_bytes or UNREPORTED_BYTES
            return
        free_bytes, device_bytes = calls.driver()
        self._total_bytes = min(budget_bytes or free_bytes, free_bytes)
        if 0 < self._total_bytes < device_bytes:  # some backends treat 0 as no limit
            # the cap is the process's: other engines keep theirs, and memory reserved without an engine stays
            others, share = calls.capped(), self._total_bytes / device_bytes
            if others is not None:
                self._before_bytes = 0 if others < 1 else calls.reserved()
                held = others if others < 1 else self._before_bytes / device_bytes
                share = min(MOST_SHARE, held + share)
                self._share = share - (others if others < 1 else 0.0)
            calls.cap(share)

    def total_bytes(self) -> int:
        """As `DeviceMemory`."""
        return self._total_bytes

    def free_bytes(self) -> int:
        """As `DeviceMemory`: free memory of the driver plus the cache of the allocator."""
        allocated_bytes = self._calls.allocated()
        if self._calls.driver is None:
            return max(0, self._total_bytes - allocated_bytes)
        driver_free_bytes, _ = self._calls.driver()
        return driver_free_bytes + max(0, self._calls.reserved() - allocated_bytes)

    def peak_bytes(self) -> int:
        """As `DeviceMemory`."""
        return self._calls.peak()

    def reset_peak(self) -> None:
        """As `DeviceMemory`."""
        self._calls.reset_peak()

    def cached_bytes(self) -> int:
        """As `DeviceMemory`."""
        return max(0, self._calls.reserved() - self._calls.allocated())

    def release_cached(self) -> None:
        """As `DeviceMemory`."""
        self._calls.release()

    def refusals(self) -> int:
        """As `DeviceMemory`."""
        return self._calls.refusals()

    def may_grow(self) -> bool:
        """As `DeviceMemory`."""
        return self._growth()[0] > 0

    def grow(self) -> bool:
        """As `DeviceMemory`, in steps of `GROWTH_SHARE` of the device."""
        grown_bytes, device_bytes = self._growth()
        if not grown_bytes:
            return False
        capped = self._calls.capped()
        self._total_bytes += grown_bytes
        if capped is None:
            self._calls.cap(min(MOST_SHARE, self._total_bytes / device_bytes))
        elif self._share:
            share = min(MOST_SHARE, capped + grown_bytes / device_bytes)
            self._share += share - capped
            self._calls.cap(share)
        return True

    def _growth(self) -> tuple[int, int]:
        """Return how much more memory there is for this engine, 0 if that is less than a step, and the device's."""
        if self._calls.driver is None:
            return 0, 0
        free_bytes, device_bytes = self._calls.driver()
        capped = self._calls.capped()
        # other engines of the process have their part of its cap
        others_bytes = 0 if capped is None or not self._share else int((capped - self._share) * device_bytes)
        room_bytes = free_bytes + self._calls.reserved() - others_bytes - self._before_bytes
        grown_bytes = min(self._budget_bytes or room_bytes, room_bytes) - self._total_bytes
        return (grown_bytes if grown_bytes >= GROWTH_SHARE * device_bytes else 0), device_bytes

    def close(self) -> None:
        """As `DeviceMemory`: takes the memory of this engine off the cap of the process. The last one lifts it, and
        frees the workspaces of libraries: before, captured graphs may write them."""
        share, self._share = self._share, 0.0
        if not share:
            return
        with suppress(RuntimeError):  # a lost device has no cap
            left = (self._calls.capped() or 0.0) - share
            is_last = left <= 1 - MOST_SHARE
            self._calls.cap(1.0 if is_last else left)
            if is_last and not self._calls.others():
                self._calls.forget()
            if is_last:
                self._calls.release()

    def transfers(self) -> TransferCounters:
        """As `DeviceMemory`: the counts of the ledger."""
        assert self.ledger is not None
        return self.ledger.counters()


def _usual_calls(module: Any, index: int) -> MemoryCalls:
    """The function names of torch.cuda, which other backends share."""
    return MemoryCalls(
        driver=lambda: _pair(module.mem_get_info(index)),
        allocated=lambda: int(module.memory_allocated(index)),
        reserved=lambda: int(module.memory_reserved(index)),
        peak=lambda: int(module.max_memory_allocated(index)),
        reset_peak=lambda: _nothing(module.reset_peak_memory_stats(index)),
        cap=lambda share: _capped(module, share, index),
        capped=lambda: _cap_of(module, index),
        release=lambda: _nothing(module.empty_cache()),
        refusals=lambda: _refusals(module, index),
        forget=free_workspaces if module is torch.cuda else lambda: None,
        others=lambda: any(
            (_cap_of(module, other) or 1) < 1 for other in range(module.device_count()) if other != index
        ),
    )


def _mps_calls(module: Any, host: Callable[[], HostMemory]) -> MemoryCalls:
    """Apple's GPU uses host memory, up to the recommended maximum. Its peak is not measured."""

    def driver() -> tuple[int, int]:
        most_bytes = int(module.recommended_max_memory())
        unused_bytes = most_bytes - int(module.driver_allocated_memory())
        return max(0, min(unused_bytes, host().available_bytes)), most_bytes

    return MemoryCalls(
        driver=driver,
        allocated=lambda: int(module.current_allocated_memory()),
        reserved=lambda: int(module.driver_allocated_memory()),
        peak=lambda: 0,
        reset_peak=lambda: None,
        cap=lambda share: _nothing(module.set_per_process_memory_fraction(share)),
        capped=lambda: None,
        release=lambda: _nothing(module.empty_cache()),
    )


_SILENT = MemoryCalls(
    driver=None,
    allocated=lambda: 0,
    reserved=lambda: 0,
    peak=lambda: 0,
    reset_peak=lambda: None,
    cap=lambda share: None,
    capped=lambda: None,
    release=lambda: None,
)


def _pair(found: Any) -> tuple[int, int]:
    free_bytes, device_bytes = found
    return int(free_bytes), int(device_bytes)


def _capped(module: Any, share: float, index: int) -> None:
    cap = getattr(module, "set_per_process_memory_fraction", None)
    if cap is not None:
        cap(share, index)


def _cap_of(module: Any, index: int) -> float | None:
    ask = getattr(module, "get_per_process_memory_fraction", None)
    return None if ask is None else float(ask(index))


def _refusals(module: Any, index: int) -> int:
    stats = getattr(module, "memory_stats", None)
    return 0 if stats is None else int(stats(index).get("num_ooms", 0))


def _nothing(_: object) -> None:
    return None
