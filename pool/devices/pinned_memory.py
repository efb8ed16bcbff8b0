"""Pinned host memory: its budget, pages of mapped files pinned in place, and a small staging ring for copies.

Copies from pinned memory are faster and overlap with compute, but the kernel cannot reclaim it. So there is a budget,
and weights are never copied completely into pinned memory: either the pages of their file are pinned in place, or they
pass through a ring of a few buffers. Pinning a page of a private mapping of a file (copy on write) makes the kernel
copy it for this process, which would double host memory: such pages are never pinned in place. Events are provided by
the caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor

from modelpool.pool.devices.memory_limits import HostMemory

_LOG = logging.getLogger(__name__)

#: maximum fraction of total memory that may be pinned. Source: comfyui-behaviour facts, section 0
PINNED_SHARE = 0.95
#: memory left to other processes: half of the free memory, but at least this. Source: the same, section 11
KEPT_FREE_BYTES = 2 << 30
PAGE_BYTES = 4096
#: one buffer of the staging ring, and how many: while one is filled, several are being copied from
SLOT_BYTES = 16 << 20
SLOTS = 8
#: tensors that share a buffer begin at multiples of this
ALIGN_BYTES = 64

#: where Linux lists the mappings of this process
OWN_MAPPINGS = Path("/proc/self/maps")


def pinned_budget_bytes(memory: HostMemory) -> int:
    """Return the bytes that a process may pin on a host with this memory. Pure."""
    kept_bytes = max(memory.available_bytes // 2, KEPT_FREE_BYTES)
    return max(0, min(memory.available_bytes - kept_bytes, int(memory.total_bytes * PINNED_SHARE)))


class PinnedLedger:
    """Counts pinned bytes against a budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.pinned_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Count `size_bytes` as pinned, if within the budget. Returns whether it is."""
        if self.pinned_bytes + size_bytes > self.budget_bytes:
            return False
        self.pinned_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        """Count `size_bytes` as free again."""
        assert size_bytes <= self.pinned_bytes, f"{size_bytes} bytes given back, {self.pinned_bytes} are pinned"
        self.pinned_bytes -= size_bytes


class HostRegister(Protocol):
    """Driver calls that pin memory in place, as in `torch.cuda.cudart()`."""

    def pin(self, address: int, size_bytes: int) -> bool:
        """Pin complete pages. Returns False if the driver refuses."""
        ...

    def unpin(self, address: int) -> None:
        """Undo `pin` of the pages at `address`."""
        ...


@dataclass(frozen=True, slots=True)
class PinnedRange:
    """Pages pinned in place, starting at `address`."""

    address: int
    size_bytes: int


class PinnedPages:
    """Pages of mapped files that are pinned in place. Release with `close`.

    After the first refusal the driver is not called again: its reasons (a file system, a sandbox) apply to all pages.
    Linux refuses pins for writing of files on disks, in shared mappings as well; it takes them in memory file systems.
    Unpinned weights are copied through the ring.
    """

    def __init__(self, register: HostRegister, ledger: PinnedLedger) -> None:
        self._register = register
        self._ledger = ledger
        self._ranges: list[PinnedRange] = []
        #: reason of the refusal of the driver; empty if it has not refused
        self.refusal = ""

    @property
    def refused(self) -> bool:
        """Whether the driver refused once."""
        return self.refusal != ""

    def pin(self, weights: Tensor) -> bool:
        """Pin the pages of `weights`, a host tensor. Returns whether they are pinned.

        Pin the bytes of a complete file at once rather than tensor by tensor: neighbours share pages. Pages that
        pinning would copy are skipped (`is_copied_when_pinned`).
        """
        wanted = _pages(weights)
        if self.holds(weights):
            return True
        if self.refused or wanted.size_bytes == 0 or any(_overlap(wanted, held) for held in self._ranges):
            return False
        if is_copied_when_pinned(wanted.address) or not self._ledger.take(wanted.size_bytes):
            return False
        refusal = self._refusal(wanted)
        if refusal:
            self._ledger.give_back(wanted.size_bytes)
            self.refusal = refusal
            _LOG.info("%s; copies go through a ring of buffers", refusal)
            return False
        self._ranges.append(wanted)
        return True

    def holds(self, weights: Tensor) -> bool:
        """Whether all bytes of `weights` are in pinned pages."""
        begin = weights.data_ptr()
        end = begin + weights.nbytes
        return any(held.address <= begin and end <= held.address + held.size_bytes for held in self._ranges)

    def _refusal(self, wanted: PinnedRange) -> str:
        """Call the driver; returns the reason of a refusal, empty if it pinned."""
        reason = "the driver does not pin the pages of mapped files here"
        try:
            return "" if self._register.pin(wanted.address, wanted.size_bytes) else reason
        except RuntimeError as error:
            return f"{reason} ({error})"

    def close(self) -> None:
        """Unpin everything. Idempotent."""
        for held in self._ranges:
            self._register.unpin(held.address)
            self._ledger.give_back(held.size_bytes)
        self._ranges.clear()


def is_copied_when_pinned(address: int, mappings: Path = OWN_MAPPINGS) -> bool:
    """Return whether the page at `address` belongs to a private mapping of a file.

    Source: Linux breaks the sharing of such pages before it pins them (mm/gup.c, since 6.2); measured on tmpfs, ext4
    and overlay (`benchmarks.pinned_files`). False if the list of mappings cannot be read.
    """
    try:
        lines = mappings.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        places, permissions, _, _, inode, *_ = line.split()
        begin, end = (int(place, 16) for place in places.split("-"))
        if begin <= address < end:
            return permissions.endswith("p") and inode != "0"
    return False


class Waitable(Protocol):
    """An event that the host can wait for."""

    def synchronize(self) -> None:
        """Wait for the event."""
        ...

    def query(self) -> bool:
        """Return whether the event has happened."""
        ...


@dataclass(slots=True)
class Slot:
    """One buffer of a ring.

    used_bytes  filled since it was last waited for
    copies      events of the copies from it since then, on any streams
    """

    buffer: Tensor
    used_bytes: int = 0
    copies: list[Waitable] = field(default_factory=list)

    def copied(self, event: Waitable) -> None:
        """Note a copy from the part that was filled last; `event` happens when it is done."""
        self.copies.append(event)

    @property
    def is_busy(self) -> bool:
        """Whether a copy from it is still in flight."""
        return not all(event.query() for event in self.copies)

    def wait(self) -> None:
        """Wait for all copies from it; it is empty then."""
        for event in self.copies:
            event.synchronize()
        self.copies.clear()
        self.used_bytes = 0


class StagingRing:
    """A few pinned buffers that host bytes pass through in turn; small tensors share one. Release with `close`.

    Several threads may use it: each holds `lock` from `stage` until it has called `Slot.copied`. Invariant: a part of a
    buffer is written again only after all copies from that buffer are done.
    """

    def __init__(self, slots: list[Slot], ledger: PinnedLedger, shortfall: str = "") -> None:
        """`shortfall` is the reason for fewer slots than requested; empty if there are all."""
        self.shortfall = shortfall
        self.lock = Lock()
        self._slots = slots
        self._ledger = ledger
        self._next = 0

    @classmethod
    def allocate(
        cls,
        ledger: PinnedLedger,
        slot_bytes: int = SLOT_BYTES,
        slots: int = SLOTS,
        pinned: Callable[[int], Tensor] | None = None,
    ) -> StagingRing:
        """Allocate as many buffers as budget and driver allow, up to `slots`; possibly none.

        `pinned` allocates a pinned buffer of a given size, and raises RuntimeError if it cannot.
        """
        make = pinned or _pinned_buffer
        made: list[Slot] = []
        shortfall = ""
        for _ in range(slots):
            if not ledger.take(slot_bytes):
                shortfall = f"{len(made)} of {slots} staging buffers: the host has too little free memory to pin more"
                break
            try:
                made.append(Slot(make(slot_bytes)))
            except RuntimeError as error:
                ledger.give_back(slot_bytes)
                shortfall = f"{len(made)} of {slots} staging buffers: no more memory can be pinned ({error})"
                break
        if shortfall:
            _LOG.info("%s", shortfall)
        return cls(made, ledger, shortfall)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def slot_bytes(self) -> int:
        """Size of one buffer; 0 if there is none."""
        return self._slots[0].buffer.numel() if self._slots else 0

    @property
    def would_wait(self) -> bool:
        """Whether the next buffer is still being copied from."""
        return bool(self._slots) and self._slots[(self._next + 1) % len(self._slots)].is_busy

    def stage(self, host_bytes: Tensor, fill: Callable[[Tensor, Tensor], object] = Tensor.copy_) -> tuple[Tensor, Slot]:
        """Copy `host_bytes` (uint8, at most `slot_bytes`) by `fill` into the rest of the current buffer or, if it does
        not fit there, into the next one when that is free.

        Returns the filled part and its slot; the caller passes the event of its copy to `Slot.copied`.
        """
        slot, size_bytes = self._slots[self._next], host_bytes.numel()
        begin = -(-slot.used_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if begin + size_bytes > slot.buffer.numel():
            self._next = (self._next + 1) % len(self._slots)
            slot, begin = self._slots[self._next], 0
            slot.wait()
        filled = slot.buffer[begin : begin + size_bytes]
        fill(filled, host_bytes)
        slot.used_bytes = begin + size_bytes
        return filled, slot

    def close(self) -> None:
        """Wait for pending copies and release the buffers. Idempotent."""
        for slot in self._slots:
            slot.wait()
            self._ledger.give_back(slot.buffer.numel())
        self._slots.clear()


class CudaHostRegister:
    """The CUDA driver. Requests read-only access, since mapped files are read-only, and retries without it."""

    READ_ONLY = 0x08
    _OK = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def pin(self, address: int, size_bytes: int) -> bool:
        """As `HostRegister.pin`."""
        with torch.cuda.device(self._device):  # the driver pins for the current device
            for flags in (self.READ_ONLY, 0):
                if int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, flags)) == self._OK:
                    return True
                self._forget_error()
        return False

    def unpin(self, address: int) -> None:
        """As `HostRegister.unpin`."""
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != self._OK:
                self._forget_error()

    def _forget_error(self) -> None:
        """Consume the last error of the driver, so that the next kernel does not report it."""
        try:
            torch.zeros(1, device=self._device).add_(1)
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            _LOG.debug("the driver's refusal to pin: %s", error)


def empty_to_send(shape: Sequence[int], device: torch.device) -> Tensor:
    """Return an uninitialised float32 tensor on the host, for values that `sent` copies to `device`: pinned on CUDA, so
    that they are not copied on the host first."""
    return torch.empty(tuple(shape), dtype=torch.float32, pin_memory=device.type == "cuda")


def sent(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `host`, which was just computed on the CPU, on `device`.

    On CUDA it goes through pinned memory of torch's cache, in which `host` may lie already: the calling thread does not
    wait for the work of the device that comes before the copy, as it does for pageable memory. torch's cache reuses the
    memory after the copy.
    """
    if device.type != "cuda":
        return host.to(device)
    return (host if host.is_pinned() else host.pin_memory()).to(device, non_blocking=True)


def _pinned_buffer(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


def _pages(weights: Tensor) -> PinnedRange:
    """The pages of the bytes of `weights`."""
    begin = weights.data_ptr() // PAGE_BYTES * PAGE_BYTES
    end = -(-(weights.data_ptr() + weights.nbytes) // PAGE_BYTES) * PAGE_BYTES
    return PinnedRange(begin, end - begin if weights.nbytes else 0)


def _overlap(a: PinnedRange, b: PinnedRange) -> bool:
    return a.address < b.address + b.size_bytes and b.address < a.address + a.size_bytes
