"""Memory accounting of one simulated device: bytes in use against a budget, peak, and transfers.

Numbers only; independent of tensors and torch's dispatcher.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SimMemoryStats:
    """Memory statistics of a simulated device at one moment."""

    budget_bytes: int
    used_bytes: int  # bytes of the storages that are alive
    peak_bytes: int  # highest `used_bytes` since the last `reset_peak`
    allocation_count: int  # storages made since the last `reset_counters`
    h2d_bytes: int  # copied from the host since the last `reset_counters`
    h2d_count: int
    d2h_bytes: int  # copied to the host since the last `reset_counters`
    d2h_count: int
    foreign_bytes: int = 0  # of the budget, what another process holds; never part of `used_bytes`


class SimLedger:
    """Memory accounting of simulated device `index`.

    Always exact: a storage is in `used_bytes` from its charge until it is freed, and a charge that would exceed the
    budget changes nothing. Thread-safe, also for a destructor that the garbage collector runs during a charge: it only
    appends to `_freed`, without the lock, and each later read or write of the use subtracts these bytes first. Bytes of
    another (simulated) process reduce the budget. Copies from the host can be made to fail, for tests.
    """

    __slots__ = (
        "_allocation_count",
        "_budget_bytes",
        "_copies_until_failure",
        "_d2h_bytes",
        "_d2h_count",
        "_foreign_bytes",
        "_freed",
        "_h2d_bytes",
        "_h2d_count",
        "_lock",
        "_peak_bytes",
        "_room_bytes",
        "_used_bytes",
        "index",
    )

    def __init__(self, index: int, budget_bytes: int) -> None:
        self.index = index
        self._budget_bytes = budget_bytes
        self._foreign_bytes = 0
        self._room_bytes = budget_bytes  # the budget less the foreign bytes
        self._copies_until_failure: int | None = None
        self._used_bytes = 0
        self._freed: deque[int] = deque()  # bytes of freed storages that are still part of `_used_bytes`
        self._peak_bytes = 0
        self._lock = threading.RLock()
        self.reset_counters()

    def require(self, size_bytes: int) -> None:
        """Raise torch.OutOfMemoryError unless `size_bytes` more would fit. Takes nothing."""
        with self._lock:
            if self._use() + size_bytes > self._room_bytes:
                raise self._out_of_memory(size_bytes)

    def count_h2d(self, size_bytes: int) -> None:
        """Count one copy of `size_bytes` from the host. Raises torch.OutOfMemoryError if it was set to fail."""
        with self._lock:
            if self._copies_until_failure is not None:
                self._fail_or_go_on(size_bytes)
            self._h2d_bytes += size_bytes
            self._h2d_count += 1

    def count_d2h(self, size_bytes: int) -> None:
        """Count one copy of `size_bytes` to the host."""
        with self._lock:
            self._d2h_bytes += size_bytes
            self._d2h_count += 1

    def set_budget(self, budget_bytes: int) -> None:
        """Change the budget. Raises ValueError if more is in use, here and by others."""
        with self._lock:
            taken_bytes = self._use() + self._foreign_bytes
            if taken_bytes > budget_bytes:
                raise ValueError(
                    f"budget_bytes of sim:{self.index}: found {budget_bytes}, expected at least the "
                    f"{taken_bytes} bytes in use"
                )
            self._budget_bytes = budget_bytes
            self._room_bytes = budget_bytes - self._foreign_bytes

    def set_foreign(self, foreign_bytes: int) -> None:
        """Simulate another process that holds `foreign_bytes` of the budget. Raises ValueError if they are not free."""
        with self._lock:
            free_bytes = self._budget_bytes - self._use()
            if not 0 <= foreign_bytes <= free_bytes:
                raise ValueError(
                    f"foreign_bytes of sim:{self.index}: found {foreign_bytes}, expected 0 to the {free_bytes} bytes "
                    "that this process does not use"
                )
            self._foreign_bytes = foreign_bytes
            self._room_bytes = self._budget_bytes - foreign_bytes

    def fail_copy(self, after: int | None) -> None:
        """Make one copy from the host fail after `after` successful ones; None cancels that."""
        with self._lock:
            self._copies_until_failure = after

    def reset_peak(self) -> None:
        """Restart the peak from current use."""
        with self._lock:
            self._peak_bytes = self._use()

    def reset_counters(self) -> None:
        """Reset the counts of allocations and transfers."""
        with self._lock:
            self._allocation_count = 0
            self._h2d_bytes = 0
            self._h2d_count = 0
            self._d2h_bytes = 0
            self._d2h_count = 0

    def stats(self) -> SimMemoryStats:
        """Return all numbers of one moment."""
        with self._lock:
            return SimMemoryStats(
                budget_bytes=self._budget_bytes,
                used_bytes=self._use(),
                peak_bytes=self._peak_bytes,
                allocation_count=self._allocation_count,
                h2d_bytes=self._h2d_bytes,
                h2d_count=self._h2d_count,
                d2h_bytes=self._d2h_bytes,
                d2h_count=self._d2h_count,
                foreign_bytes=self._foreign_bytes,
            )

    def _use(self) -> int:
        """The bytes in use, without the freed ones. Called under the lock."""
        freed = self._freed
        while freed:
            size_bytes = freed.popleft()  # apart: a destructor that reads the account may run during the call
            self._used_bytes -= size_bytes
        return self._used_bytes

    def _fail_or_go_on(self, size_bytes: int) -> None:
        assert self._copies_until_failure is not None, "no failure is set"
        if self._copies_until_failure == 0:
            self._copies_until_failure = None
            raise torch.OutOfMemoryError(f"sim:{self.index}: this copy of {size_bytes} bytes was set to fail")
        self._copies_until_failure -= 1

    def _out_of_memory(self, size_bytes: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"sim:{self.index} is out of memory: tried to allocate {size_bytes} bytes with {self._used_bytes} bytes "
            f"in use of a budget of {self._budget_bytes} bytes"
            + (f", of which {self._foreign_bytes} belong to another process" if self._foreign_bytes else "")
        )


class SimAllocation:
    """`size_bytes` of a ledger, in use while this object lives. Raises torch.OutOfMemoryError, taking nothing.

    Its destructor is the `free` of the simulated device, like a C++ destructor that calls the CUDA allocator. Memory
    decisions of the pool never depend on it. One is created for every computed tensor, so the accounting is inlined
    here.
    """

    __slots__ = ("_ledger", "_size_bytes")

    def __init__(self, ledger: SimLedger, size_bytes: int) -> None:
        self._ledger = ledger
        self._size_bytes = 0  # until it is taken: the destructor runs after a refusal, too
        with ledger._lock:
            used_bytes = (ledger._use() if ledger._freed else ledger._used_bytes) + size_bytes
            if used_bytes > ledger._room_bytes:
                raise ledger._out_of_memory(size_bytes)
            ledger._used_bytes = used_bytes
            self._size_bytes = size_bytes
            ledger._allocation_count += 1
            if used_bytes > ledger._peak_bytes:
                ledger._peak_bytes = used_bytes

    def __del__(self) -> None:
        self._ledger._freed.append(self._size_bytes)
