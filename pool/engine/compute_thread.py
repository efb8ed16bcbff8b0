"""`ComputeThread`: the thread in which runs compute, which can be replaced by a new one.

torch keeps the plans of cuDNN's convolutions and attention for each thread, and has no function to forget them
(aten/src/ATen/native/cudnn/Conv_v8.cpp and MHA.cpp: caches that are `thread_local`, by shape). They end with their
thread.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from modelpool.pool.devices.transfer_pipeline import TransferPipeline

_T = TypeVar("_T")


class ComputeThread:
    """Calls functions for one other thread, which waits for them: at first in that thread itself, after `renew` in a
    new one."""

    def __init__(self, pipeline: TransferPipeline) -> None:
        """Work of the functions is on the stream of `pipeline` that is current for the caller."""
        self._pipeline = pipeline
        self._thread: ThreadPoolExecutor | None = None

    def call(self, work: Callable[[], _T]) -> _T:
        """Return `work()`, with the context variables and the stream of the caller, and with the device of the stream
        as the current one: kernels of other libraries run there, wherever their tensors are. Raises what it raises; an
        interrupt of the caller is raised when `work` has ended."""
        placed = self._pipeline.on_current_stream(work)
        if self._thread is None:
            return placed()
        called = self._thread.submit(contextvars.copy_context().run, placed)
        try:
            return called.result()
        except BaseException:
            wait((called,))
            raise

    def renew(self) -> None:
        """Call functions in a new thread from now on."""
        self.close()
        self._thread = ThreadPoolExecutor(1, "compute")

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
