"""A ring of streams that copy weights to a device while it computes.

Uses streams and events like torch's CUDA ones; `pool.devices.uploads` chooses the copies. Without CUDA there are no
streams and no ring.

Rules
1. Memory for a copy is allocated on the compute stream. The allocator may unmap freed memory of segments that grow
   after waiting for the stream that it was allocated on, and for no other (`pool.devices.allocator_settings`).
2. A copy stream first waits for all pending work of the compute stream, so that it overwrites memory only after the
   compute stream has passed its last use.
3. A reader of a copy first lets its own stream wait for the event of the copy. So does whoever frees an unread copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import counted

#: how many streams copy by turns. Source: comfyui-behaviour facts, section 3, "offload streams"
COPY_STREAMS = 2


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Signal the event when all pending work of `stream` is done."""
        ...

    def synchronize(self) -> None:
        """Wait for the event."""
        ...

    def query(self) -> bool:
        """Return whether the event has happened."""
        ...


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_stream(self, stream: Stream) -> None:
        """Wait for all pending work of `stream` before further work."""
        ...

    def wait_event(self, event: Event) -> None:
        """Wait for `event` before further work."""
        ...


@dataclass(frozen=True, slots=True)
class StreamMaker:
    """Functions for streams and events of one device.

    new_end  an event that a thread waits for, for longer than a copy takes: the thread sleeps meanwhile, and hears of
             the end some 50 us late. Other events cost a CPU core for as long as somebody waits for them
    current  the compute stream
    on       a context that runs operations on a stream
    lend     memory allocated on one stream is read by another: it is not overwritten before that one has passed its
             work pending when the memory was freed
    """

    new_stream: Callable[[], Stream]
    new_event: Callable[[], Event]
    new_end: Callable[[], Event]
    current: Callable[[], Stream]
    on: Callable[[Stream], AbstractContextManager[object]]
    lend: Callable[[Tensor, Stream], None]


class CopyStreams:
    """Streams used in turn."""

    def __init__(self, maker: StreamMaker, count: int = COPY_STREAMS) -> None:
        assert count > 0, counted(count, "stream")
        self.maker = maker
        self._streams = [maker.new_stream() for _ in range(count)]
        self._next = 0

    def take(self) -> Stream:
        """Return the least recently used stream, which waits for the compute stream (rule 2)."""
        stream = self._streams[self._next]
        self._next = (self._next + 1) % len(self._streams)
        stream.wait_stream(self.maker.current())
        return stream


def cuda_streams(device: torch.device) -> StreamMaker:
    """Streams and events of a CUDA device."""
    cuda: Any = torch.cuda  # its streams take only its own events, which a protocol cannot say
    return StreamMaker(
        new_stream=lambda: cuda.Stream(device),
        new_event=lambda: cuda.Event(),
        new_end=lambda: cuda.Event(blocking=True),
        current=lambda: cuda.current_stream(device),
        on=lambda stream: cuda.stream(stream),
        lend=_lend,
    )


def _lend(tensor: Tensor, stream: Any) -> None:
    """The allocator tracks the parts of a wrapper tensor, not the wrapper."""
    parts = getattr(tensor, "parts", None)
    for part in (tensor,) if parts is None else parts.values():
        part.record_stream(stream)
