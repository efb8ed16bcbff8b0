"""A stand-in for the parts of `torch.cuda` that captures use: streams, and an allocator with private pools.

As the real ones after an operation that a capture must not contain: the driver refuses everything until the capture is
ended, ending it raises as well, and torch leaves its allocator in the pool of the capture then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

REFUSAL = "CUDA error: operation not permitted when stream is capturing"


class FakeCuda:
    """What the process's CUDA state would be. `install` puts it in the place of torch's functions."""

    def __init__(self) -> None:
        self.streams = ["compute"]
        #: private pools that the allocator allocates from now, and pools that exist
        self.allocating: set[int] = set()
        self.pools: set[int] = set()
        self.captures_begun = 0
        self.is_invalid = False
        #: streams that waited for others, as (waiting, waited for)
        self.waits: list[tuple[str, str]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace what captures use of `torch.cuda` until the end of the test."""
        functions: dict[str, Any] = {
            "Stream": lambda device=None: FakeCudaStream(self, "capture"),
            "stream": self._on,
            "current_stream": lambda device=None: FakeCudaStream(self, self.streams[-1]),
            "synchronize": lambda device=None: None,
            "empty_cache": lambda: None,
            "memory_reserved": lambda device=None: 0,
            "graph_pool_handle": lambda: self.captures_begun,
            "CUDAGraph": lambda: FakeCudaGraph(self),
        }
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda index, pool: self.leave(pool), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda index, pool: self.pools.remove(pool), raising=False)

    def leave(self, pool: int) -> None:
        """Leave a pool of the allocator."""
        if pool not in self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating.remove(pool)

    def refuse(self) -> None:
        """What an operation does that a capture must not contain."""
        if self.allocating:
            self.is_invalid = True
            raise torch.AcceleratorError(REFUSAL)

    @property
    def is_as_before(self) -> bool:
        """Whether the thread is on the compute stream and the allocator in no pool."""
        return self.streams == ["compute"] and not self.allocating

    @contextmanager
    def _on(self, stream: FakeCudaStream) -> Iterator[None]:
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()


class FakeCudaStream:
    """A stream, by name."""

    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: FakeCudaStream) -> None:
        """Note the wait."""
        self._cuda.waits.append((self.name, other.name))


class FakeCudaGraph:
    """A graph that holds a pool from the begin of its capture until `reset`."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._pool = -1
        self._has_ended = False

    def capture_begin(self, pool: int = -1, capture_error_mode: str = "global") -> None:
        """Let the allocator allocate from `pool`."""
        self._cuda.captures_begun += 1
        self._pool, self._cuda.is_invalid = pool, False
        self._cuda.allocating.add(pool)
        self._cuda.pools.add(pool)

    def capture_end(self) -> None:
        """As torch's: whatever follows the driver's refusal is left out."""
        assert self._cuda.streams[-1] == "capture", "a capture must end on its stream"
        if self._cuda.is_invalid:
            raise torch.AcceleratorError("CUDA error: operation failed due to a previous error during capture")
        self._cuda.leave(self._pool)
        self._has_ended = True

    def reset(self) -> None:
        """Drop the pool of a capture that has ended."""
        if self._has_ended:
            self._cuda.pools.remove(self._pool)
            self._has_ended = False
