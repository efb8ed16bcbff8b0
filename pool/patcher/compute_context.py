"""`ComputeTools`: what the runs of a component use beside its weights, and the context that they run in.

Put together by whoever opened the device; the same for all clones. Knows neither patches nor plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.devices.transfer_pipeline import UploadRoad
from modelpool.pool.devices.transfers import TransferLedger
from modelpool.pool.devices.uploads import StreamOrder
from modelpool.pool.ops.attention import AttentionBackend
from modelpool.pool.ops.context import LinearKernel, compute


@dataclass(slots=True)
class StreamMemory:
    """The order in which the weights of one component streamed in its last run; None when that is not known."""

    order: StreamOrder | None = None


@dataclass(frozen=True, slots=True)
class ComputeTools:
    """How runs of one component compute.

    ledger     told of weights that stream, for devices that do not count by themselves
    road       brings weights, to stay or for one use; None to copy each plainly, when it is used
    linear     asked first by linear layers; None for torch's own arithmetic
    attention  the order of attention kernels; empty for torch's own choice
    """

    ledger: TransferLedger | None = None
    road: UploadRoad | None = None
    linear: LinearKernel | None = None
    attention: tuple[AttentionBackend, ...] = ()

    def bring(self, host: Tensor, device: torch.device) -> Tensor:
        """A copy of `host` on `device` that may be kept; itself when it is there."""
        if host.device == device:
            return host
        if self.ledger is not None:
            self.ledger.add_h2d(host.nbytes)
        return host.to(device) if self.road is None else self.road.bring(host)

    def keep(self, arrived: Iterable[Tensor]) -> None:
        """These are on the device to stay, by way of `bring`; see `UploadRoad.keep`."""
        if self.road is not None:
            self.road.keep(arrived)

    @contextmanager
    def computing(
        self,
        device: torch.device,
        dtype: torch.dtype,
        memory: StreamMemory | None,
        interrupt: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Model calls inside the block compute on `device` in `dtype`. `memory` is given when some weights stream.

        What one run asks for is written there, and tells the next one what to bring ahead.
        """
        uploader = self.road.uploader(memory.order) if self.road is not None and memory is not None else None
        try:
            with compute(device, dtype, interrupt, self.ledger, self.linear, self.attention, uploader):
                yield
        finally:
            if uploader is not None:
                if memory is not None and uploader.order.hosts:
                    memory.order = uploader.order
                uploader.close()
