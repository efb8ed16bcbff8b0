"""The books of one simulated device: bytes in use against a budget, peak, and what was moved.

Knows numbers only; does not know what a tensor is, nor torch's dispatcher.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SimMemoryStats:
    """One reading of a simulated device's books."""

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
    """The books of simulated device `index`.

    Exact at every moment: a storage is in `used_bytes` from the moment that it is charged until it is freed, and a
    charge that would pass the budget changes nothing. Safe to use from several threads, and from a destructor that the
    garbage collector runs in the middle of a charge: each number is written by one statement under a re-entrant lock.
    What another process holds is part of the budget that nothing here can have. Copies from the host can be made to
    fail, for tests of what then happens.
    """

    __slots__ = (
        "_allocation_count",
        "_budget_bytes",
        "_copies_until_failure",
        "_d2h_bytes",
        "_d2h_count",
        "_foreign_bytes",
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
        self._room_bytes = budget_bytes  # the budget less what is foreign
        self._copies_until_failure: int | None = None
        self._used_bytes = 0
        self._peak_bytes = 0
        self._lock = threading.RLock()
        self.reset_counters()

    def require(self, size_bytes: int) -> None:
        """Raise torch.OutOfMemoryError unless `size_bytes` more would fit. Takes nothing."""
        if self._used_bytes + size_bytes > self._room_bytes:
            raise self._out_of_memory(size_bytes)

    def count_h2d(self, size_bytes: int) -> None:
        """Count one copy of `size_bytes` from the host. Raises torch.OutOfMemoryError where it was told to fail."""
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
        """Change the budget. Raises ValueError when more than that is in use, here and by others."""
        with self._lock:
            taken_bytes = self._used_bytes + self._foreign_bytes
            if taken_bytes > budget_bytes:
                raise ValueError(
                    f"budget_bytes of sim:{self.index}: found {budget_bytes}, expected at least the "
                    f"{taken_bytes} bytes in use"
                )
            self._budget_bytes = budget_bytes
            self._room_bytes = budget_bytes - self._foreign_bytes

    def set_foreign(self, foreign_bytes: int) -> None:
        """Let another process hold so many bytes of the budget. Raises ValueError where they are not free."""
        with self._lock:
            free_bytes = self._budget_bytes - self._used_bytes
            if not 0 <= foreign_bytes <= free_bytes:
                raise ValueError(
                    f"foreign_bytes of sim:{self.index}: found {foreign_bytes}, expected 0 to the {free_bytes} bytes "
                    "that this process does not use"
                )
            self._foreign_bytes = foreign_bytes
            self._room_bytes = self._budget_bytes - foreign_bytes

    def fail_copy(self, after: int | None) -> None:
        """Let `after` more copies from the host go well and the next one fail, once; None takes that back."""
        with self._lock:
            self._copies_until_failure = after

    def reset_peak(self) -> None:
        """Let the peak start again from what is in use now."""
        with self._lock:
            self._peak_bytes = self._used_bytes

    def reset_counters(self) -> None:
        """Let allocations and transfers start again from zero."""
        with self._lock:
            self._allocation_count = 0
            self._h2d_bytes = 0
            self._h2d_count = 0
            self._d2h_bytes = 0
            self._d2h_count = 0

    def stats(self) -> SimMemoryStats:
        """All numbers, of one moment."""
        with self._lock:
            return SimMemoryStats(
                budget_bytes=self._budget_bytes,
                used_bytes=self._used_bytes,
                peak_bytes=self._peak_bytes,
                allocation_count=self._allocation_count,
                h2d_bytes=self._h2d_bytes,
                h2d_count=self._h2d_count,
                d2h_bytes=self._d2h_bytes,
                d2h_count=self._d2h_count,
                foreign_bytes=self._foreign_bytes,
            )

    def _fail_or_go_on(self, size_bytes: int) -> None:
        assert self._copies_until_failure is not None, "no failure was asked for"
        if self._copies_until_failure == 0:
            self._copies_until_failure = None
            raise torch.OutOfMemoryError(f"sim:{self.index}: this copy of {size_bytes} bytes was told to fail")
        self._copies_until_failure -= 1

    def _out_of_memory(self, size_bytes: int) -> torch.OutOfMemoryError:
        return torch.OutOfMemoryError(
            f"sim:{self.index} is out of memory: tried to allocate {size_bytes} bytes with {self._used_bytes} bytes "
            f"in use of a budget of {self._budget_bytes} bytes"
            + (f", of which {self._foreign_bytes} belong to another process" if self._foreign_bytes else "")
        )


class SimAllocation:
    """`size_bytes` of a ledger, in use for as long as this value lives. Raises torch.OutOfMemoryError, taking nothing.

    The destructor is the simulated device's `free`: it stands where a C++ destructor calls CUDA's allocator. The pool's
    own decisions about memory never rest on it. One is made for every tensor that is computed, so the bookkeeping is
    written out here instead of in methods of the ledger.
    """

    __slots__ = ("_ledger", "_size_bytes")

    def __init__(self, ledger: SimLedger, size_bytes: int) -> None:
        self._ledger = ledger
        self._size_bytes = 0  # until it is taken: the destructor runs after a refusal, too
        with ledger._lock:
            if ledger._used_bytes + size_bytes > ledger._room_bytes:
                raise ledger._out_of_memory(size_bytes)
            ledger._used_bytes += size_bytes
            self._size_bytes = size_bytes
            ledger._allocation_count += 1
            if ledger._used_bytes > ledger._peak_bytes:
                ledger._peak_bytes = ledger._used_bytes

    def __del__(self) -> None:
        ledger = self._ledger
        with ledger._lock:
            ledger._used_bytes -= self._size_bytes
