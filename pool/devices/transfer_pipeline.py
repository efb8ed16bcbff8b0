"""How weights stream to one device: its copy streams, its pinned memory, and an uploader for each run.

Put together once for a device, by whoever opened it, and closed by them. Only CUDA has streams and pinned memory; for
every other device a run copies directly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from modelpool.pool.devices.copy_streams import COPY_STREAMS, CopyStreams, Stream, cuda_streams
from modelpool.pool.devices.loader import Loader
from modelpool.pool.devices.memory_limits import HostMemory, host_memory
from modelpool.pool.devices.pinned_memory import (
    CudaHostRegister,
    PinnedLedger,
    PinnedPages,
    StagingRing,
    pinned_budget_bytes,
)
from modelpool.pool.devices.uploads import AHEAD_BYTES, DirectUploader, StreamingUploader, StreamOrder, Uploader


class UploadRoad:
    """What streaming to one device shares between runs. Give back with `close`, or use as a context."""

    def __init__(
        self,
        device: torch.device,
        streams: CopyStreams | None = None,
        staging: StagingRing | None = None,
        pages: PinnedPages | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        self._device = device
        self._streams = streams
        self._staging = staging
        self._pages = pages
        self._loader = Loader(device, streams, staging, pages)
        #: takes what goes on beside runs; made when first used
        self._side: Stream | None = None
        #: the stream that computes, while copies go on beside it
        self._computing: Stream | None = None
        self._is_behind = False
        self.ahead_bytes = ahead_bytes if streams is not None else 0

    @classmethod
    def open(
        cls,
        device: torch.device,
        memory: HostMemory | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        streams: int = COPY_STREAMS,
    ) -> UploadRoad:
        """The road to `device`. `memory` is the host's, asked for when None; no `streams` for copies at once.

        Never fails for want of pinned memory: what cannot be pinned is copied without.
        """
        if device.type != "cuda" or streams == 0:
            return cls(device)
        ledger = PinnedLedger(pinned_budget_bytes(memory or host_memory()))
        return cls(
            device,
            CopyStreams(cuda_streams(device), streams),
            StagingRing.allocate(ledger),
            PinnedPages(CudaHostRegister(device), ledger),
            ahead_bytes,
        )

    def pin(self, weights: Tensor) -> bool:
        """Pin the pages of `weights` where they are, if device, driver and budget allow. Returns whether they are.

        Best given the bytes of a whole file in a shared mapping; pages of a private one are never pinned, and come by
        way of the ring. They must stay mapped until `close`.
        """
        return self._pages is not None and self._pages.pin(weights)

    @property
    def why_unpinned(self) -> str:
        """Why copies are slower than they might be, for people; empty where nothing was refused."""
        said = (
            self._staging.shortfall if self._staging is not None else "",
            self._pages.refusal if self._pages is not None else "",
        )
        return "; ".join(reason for reason in said if reason)

    def bring(self, host: Tensor) -> Tensor:
        """A copy of `host` on the device that may be kept, as `Loader.bring`."""
        return self._loader.bring(host)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What the block brings, and what is computed with it there, goes on beside what the device computes: that does
        not wait for it before `catch_up`. Where there are no streams it is done at once, as outside of the block.

        Memory that the block allocates is a stream's of its own. What stays of it has to be told to `keep`.
        """
        if self._streams is None or self._computing is not None:
            yield
            return
        maker = self._streams.maker
        self._side = self._side or maker.new_stream()
        self._computing, self._is_behind, self._loader.waits = maker.current(), True, False
        try:
            with maker.on(self._side):
                yield
        finally:
            self._computing, self._loader.waits = None, True

    def keep(self, arrived: Iterable[Tensor]) -> None:
        """These tensors stay, and runs will read them: inside `beside` their memory is lent to the stream that
        computes, so that once it is freed it is not written again before that stream has read it. Nothing elsewhere."""
        if self._computing is not None and self._streams is not None:
            for tensor in arrived:
                self._streams.maker.lend(tensor, self._computing)

    def catch_up(self) -> None:
        """Let what is computed from now on wait for all that went on beside."""
        if self._is_behind and self._streams is not None and self._side is not None:
            self._streams.maker.current().wait_stream(self._side)
            self._is_behind = False

    @property
    def is_full(self) -> bool:
        """Whoever brings more now waits for copies that are under way."""
        return self._staging is not None and self._staging.would_wait

    def uploader(self, order: StreamOrder | None = None) -> Uploader:
        """For one run. `order` is that of an earlier run of the same component, where it is known."""
        if self._streams is None:
            return DirectUploader(self._device)
        return StreamingUploader(self._device, self._streams, self._staging, self._pages, self.ahead_bytes, order)

    def close(self) -> None:
        """Unpin and give back what was taken of the host. No run may be under way. Idempotent."""
        self._loader.close()
        if self._staging is not None:
            self._staging.close()
        if self._pages is not None:
            self._pages.close()

    def __enter__(self) -> UploadRoad:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
