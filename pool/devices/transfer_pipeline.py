"""`TransferPipeline`: transfers of weights to one device: copy streams, pinned memory, and an uploader for each run.

Created once per device. Only CUDA has streams and pinned memory; on other devices runs copy directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from modelpool.pool.devices.copier import Copier
from modelpool.pool.devices.copy_streams import COPY_STREAMS, CopyStreams, Event, Stream, cuda_streams
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

_T = TypeVar("_T")


class TransferPipeline:
    """Transfer resources of one device, shared between runs. Release with `close`, or use as a context manager."""

    def __init__(
        self,
        device: torch.device,
        streams: CopyStreams | None = None,
        staging: StagingRing | None = None,
        pages: PinnedPages | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        copier: Copier | None = None,
    ) -> None:
        self._device = device
        self._streams = streams
        self._staging = staging
        self._pages = pages
        self._loader = Loader(device, streams, staging, pages)
        self._copier = copier
        #: stream of overlapped work; created on first use
        self._side: Stream | None = None
        #: stream of pending runs, which overlap with the next ones; created on first use
        self._overlap_stream: Stream | None = None
        #: the compute stream while copies overlap with it
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
    ) -> TransferPipeline:
        """Open the pipeline to `device`. `memory` is the host's, queried if None; 0 `streams` copies
        synchronously.

        Never fails for lack of pinned memory: copies then use pageable memory.
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
            Copier(),
        )

    def pin(self, weights: Tensor) -> bool:
        """Pin the pages of `weights` in place, if device, driver and budget allow. Returns whether they are pinned.

        Best called with the bytes of a complete file in a shared mapping; pages of a private one are never pinned and
        go through the ring. They must stay mapped until `close`.
        """
        return self._pages is not None and self._pages.pin(weights)

    @property
    def why_unpinned(self) -> str:
        """The reasons why copies are slower than possible, for users; empty if nothing was refused."""
        said = (
            self._staging.shortfall if self._staging is not None else "",
            self._pages.refusal if self._pages is not None else "",
        )
        return "; ".join(reason for reason in said if reason)

    def bring(self, host: Tensor) -> Tensor:
        """Return a persistent copy of `host` on the device, as `Loader.bring`."""
        return self._loader.bring(host)

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """Copies and computations of the block overlap with the compute stream, which does not wait for them before
        `catch_up`. Without streams they run synchronously.

        Memory allocated in the block belongs to a separate stream. Pass tensors that stay to `keep`.
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
        """These tensors stay and runs will read them: inside `overlapping` their memory is lent to the compute stream,
        so that once freed it is not overwritten before that stream has read it. No effect elsewhere."""
        if self._computing is not None and self._streams is not None:
            for tensor in arrived:
                self._streams.maker.lend(tensor, self._computing)

    def mark(self, is_end: bool = False) -> Event | None:
        """Return an event that happens when all pending work of the compute stream is done; None without streams. With
        `is_end`, a thread will wait for it (`StreamMaker.new_end`)."""
        if self._streams is None:
            return None
        event = self._streams.maker.new_end() if is_end else self._streams.maker.new_event()
        event.record(self._computing or self._streams.maker.current())
        return event

    def await_mark(self, mark: Event) -> None:
        """Let the current stream wait for `mark`."""
        if self._streams is not None:
            self._streams.maker.current().wait_event(mark)

    def written(self, tensors: Iterable[Tensor]) -> None:
        """The current stream writes these tensors, which other streams read. Inside `overlapping` their memory is lent
        to it, so that once freed it is not used again before they are written. No effect elsewhere."""
        if self._computing is not None and self._streams is not None:
            for tensor in tensors:
                self._streams.maker.lend(tensor, self._streams.maker.current())

    @property
    def has_streams(self) -> bool:
        """Whether work can be on a stream of its own."""
        return self._streams is not None

    @contextmanager
    def on_overlap_stream(self, is_first: bool = False) -> Iterator[None]:
        """Put the work of the block on a stream of its own, for which the compute stream does not wait. With
        `is_first`, it begins after all pending work of the compute stream, which computes its inputs.

        Memory allocated in the block belongs to that stream: pass no tensor on to the compute stream. Whatever the
        block reads must stay where it is until its work is over (`mark`); if the block raises, it is over. No effect
        without streams; any thread.
        """
        if self._streams is None:
            yield
            return
        maker = self._streams.maker
        stream = self._overlap_stream = self._overlap_stream or maker.new_stream()
        if is_first:
            stream.wait_stream(maker.current())
        try:
            with maker.on(stream):
                yield
        except BaseException:
            with suppress(RuntimeError):  # a lost device has nothing pending
                begun = maker.new_end()
                begun.record(stream)
                begun.synchronize()
            raise

    def on_current_stream(self, work: Callable[[], _T]) -> Callable[[], _T]:
        """Return `work` for another thread, on the stream that is the current one of this thread."""
        if self._streams is None:
            return work
        maker, stream = self._streams.maker, self._streams.maker.current()

        def on_stream() -> _T:
            with maker.on(stream):
                return work()

        return on_stream

    def catch_up(self) -> None:
        """Let the compute stream wait for all overlapped work."""
        if self._is_behind and self._streams is not None and self._side is not None:
            self._streams.maker.current().wait_stream(self._side)
            self._is_behind = False

    @property
    def is_full(self) -> bool:
        """Whether the next copy would wait for pending copies."""
        return self._staging is not None and self._staging.would_wait

    def uploader(self, order: StreamOrder | None = None, kept_bytes: int = 0) -> Uploader:
        """Return an uploader for one run. `order` is from an earlier run of the same component, if known. It keeps
        at most `kept_bytes` that a plan has granted; 0: a part of the memory for copies ahead of use."""
        if self._streams is None:
            return DirectUploader(self._device, kept_bytes)
        return StreamingUploader(
            self._device,
            self._streams,
            self._staging,
            self._pages,
            self.ahead_bytes,
            order,
            self._copier,
            self._loader.fill,
            kept_bytes,
        )

    def close(self) -> None:
        """Unpin and release host resources. No run may be in progress. Idempotent."""
        if self._copier is not None:
            self._copier.close()
        self._loader.close()
        if self._staging is not None:
            self._staging.close()
        if self._pages is not None:
            self._pages.close()

    def __enter__(self) -> TransferPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
