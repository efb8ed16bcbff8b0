"""`Copier`: a thread that fills pinned buffers and starts copies from them, while another thread launches the kernels.

Filling a buffer is a copy by the CPU, and a full ring has to be waited for: the thread that launches kernels must do
neither, or the device runs out of work. Jobs run in the order of their submission. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Copier:
    """One thread, started at the first job. Release with `close`."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run `job` after all that were submitted before. Its errors are in the result."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="copy weights ahead")
        return self._thread.submit(job)

    def drain(self) -> None:
        """Wait until all submitted jobs have ended."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Wait for the jobs and end the thread. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
