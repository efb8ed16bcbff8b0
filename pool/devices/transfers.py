"""Counts bytes that cross between host and device. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferCounters:
    """Bytes and copies, host to device and back."""

    h2d_bytes: int = 0
    h2d_count: int = 0
    d2h_bytes: int = 0
    d2h_count: int = 0


class TransferLedger:
    """Counter for the code that moves weights, on devices that do not count by themselves."""

    def __init__(self) -> None:
        self._h2d_bytes = 0
        self._h2d_count = 0

    def add_h2d(self, size_bytes: int) -> None:
        """One copy to the device."""
        self._h2d_bytes += size_bytes
        self._h2d_count += 1

    def counters(self) -> TransferCounters:
        """The counts so far."""
        return TransferCounters(h2d_bytes=self._h2d_bytes, h2d_count=self._h2d_count)
