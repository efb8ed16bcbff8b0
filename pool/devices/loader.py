"""Weights on their way from the host to a device to stay there.

A `Loader` hands out a device copy that may be kept. On CUDA it goes through the ring of pinned buffers, which several
threads fill: one thread copies host memory at a fifth of what a modern link takes. Elsewhere it is one plain copy.
Does not know modules, dtypes or patches; copies for one use only are made by `pool.devices.uploads`.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

import torch
from torch import Tensor

from modelpool.pool.devices.copy_streams import CopyStreams
from modelpool.pool.devices.pinned_memory import PinnedPages, StagingRing

#: threads that fill one pinned buffer. Source: an assumption, one thread copies some 10 GB/s and a link takes up to 50
FILL_THREADS = 4
#: less than this is copied as it is: to wake threads and wait for events takes longer
LEAST_STAGED_BYTES = 1 << 20


class Loader:
    """Copies that stay. Give back with `close`."""

    def __init__(
        self,
        device: torch.device,
        streams: CopyStreams | None = None,
        staging: StagingRing | None = None,
        pages: PinnedPages | None = None,
    ) -> None:
        """`staging` and `pages` stay the caller's."""
        self._device = device
        self._streams = streams
        self._staging = staging
        self._pages = pages
        self._threads: Executor | None = None
        #: False: small tensors too are on their way only when `bring` returns
        self.waits = True

    def bring(self, host: Tensor) -> Tensor:
        """A copy of `host` on the device in its own dtype, which the caller's stream may read; `host` itself when the
        device is where it is.

        Its memory is the caller's stream's, so that it is reused like any other memory of that stream once it is freed.
        """
        if self._streams is None or not self._staging or host.nbytes < LEAST_STAGED_BYTES or not host.is_contiguous():
            return host.to(self._device, non_blocking=not self.waits)
        copy = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        maker = self._streams.maker
        stream = self._streams.take()  # waits for the memory of `copy` to be free
        with maker.on(stream):
            if self._pages is not None and self._pages.holds(host):
                copy.copy_(host, non_blocking=True)
            else:
                source, target = _bytes_of(host), _bytes_of(copy)
                step = self._staging.slot_bytes
                for begin in range(0, source.numel(), step):
                    filled, slot = self._staging.stage(source[begin : begin + step], self._fill)
                    target[begin : begin + step].copy_(filled, non_blocking=True)
                    copied = maker.new_event()
                    copied.record(stream)
                    slot.busy = copied
        done = maker.new_event()
        done.record(stream)
        maker.current().wait_event(done)
        return copy

    def close(self) -> None:
        """End the threads. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _fill(self, buffer: Tensor, host_bytes: Tensor) -> None:
        """Copy `host_bytes` into `buffer`, a part in each thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(FILL_THREADS, thread_name_prefix="fill pinned buffers")
        parts = zip(buffer.chunk(FILL_THREADS), host_bytes.chunk(FILL_THREADS), strict=True)
        for done in [self._threads.submit(part.copy_, source) for part, source in parts]:
            done.result()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
