"""Copies weights from the host to a device, to stay there.

A `Loader` returns device copies that may be kept. On CUDA they go through the ring of pinned buffers. Large tensors are
filled in by several threads: one copies host memory at a fifth of the speed of a modern link. Small ones share a
buffer, so that none is waited for. Elsewhere it is a plain copy.
Copies for a single use are made by `pool.devices.uploads`.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from modelpool.pool.devices.copy_streams import CopyStreams, StreamMaker
from modelpool.pool.devices.pinned_memory import PinnedPages, StagingRing
from modelpool.pool.devices.staged_copies import copy_staged

#: threads that fill one pinned buffer. Source: an assumption, one thread copies some 10 GB/s and a link takes up to 50
FILL_THREADS = 4
#: smaller tensors are filled in by the calling thread, and copied on its stream: waking threads takes longer
LEAST_STAGED_BYTES = 1 << 20


class Loader:
    """Persistent copies. Release with `close`."""

    def __init__(
        self,
        device: torch.device,
        streams: CopyStreams | None = None,
        staging: StagingRing | None = None,
        pages: PinnedPages | None = None,
    ) -> None:
        """`staging` and `pages` remain owned by the caller."""
        self._device = device
        self._streams = streams
        self._staging = staging
        self._pages = pages
        self._threads: Executor | None = None
        #: False: copies that do not go through the ring may also be in flight when `bring` returns
        self.waits = True

    def bring(self, host: Tensor) -> Tensor:
        """Return a copy of `host` on the device in its own dtype, readable by the current stream; `host` itself if it
        is already there.

        Its memory belongs to the current stream, so that it is reused like any other memory of that stream.
        """
        if host.device == self._device:
            return host
        if self._streams is None or not self._staging or host.nbytes == 0 or not host.is_contiguous():
            return host.to(self._device, non_blocking=not self.waits)
        if host.nbytes < min(LEAST_STAGED_BYTES, self._staging.slot_bytes + 1):
            return self._bring_small(host, self._staging, self._streams.maker)
        copy = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        maker = self._streams.maker
        done = maker.new_event()
        stream = self._streams.take()  # waits for the memory of `copy` to be free
        try:
            with maker.on(stream):
                if self._pages is not None and self._pages.holds(host):
                    copy.copy_(host, non_blocking=True)
                else:
                    copy_staged(self._staging, _bytes_of(host), _bytes_of(copy), maker, stream, self.fill)
        finally:  # also after an error: pieces may still be copied into the memory, which is freed then
            done.record(stream)
            maker.current().wait_event(done)
        return copy

    def _bring_small(self, host: Tensor, staging: StagingRing, maker: StreamMaker) -> Tensor:
        """A copy on the current stream, from a part of a buffer that other small tensors share."""
        copy = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        copy_staged(staging, _bytes_of(host), _bytes_of(copy), maker, maker.current())
        return copy

    def close(self) -> None:
        """Stop the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def fill(self, buffer: Tensor, host_bytes: Tensor) -> None:
        """Copy `host_bytes` into `buffer`, a part per thread; small ones without threads. The caller holds the lock of
        the ring."""
        if host_bytes.numel() < LEAST_STAGED_BYTES:
            buffer.copy_(host_bytes)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="fill pinned buffers")
        parts = zip(buffer.chunk(FILL_THREADS), host_bytes.chunk(FILL_THREADS), strict=True)
        begun: list[Future[Tensor]] = []
        try:
            for part, source in parts:
                begun.append(self._threads.submit(part.copy_, source))
        finally:  # also after an error: the buffer is filled again then
            wait(begun)
        for done in begun:
            done.result()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
