"""A ring of streams that copy weights to a device while it computes.

Knows streams and events, as torch's CUDA ones behave; does not know which weights are copied, or when
(`pool.devices.uploads`). Without CUDA there are no streams, and nobody makes a ring.

Rules:
1. Memory for a copy is allocated on the copy stream that writes it.
2. A stream that is taken first waits for all that the compute stream was given so far. Memory that came from this
   stream before and was freed since is thus written again only when the compute stream is past its last use.
3. Whoever reads what was copied lets its own stream wait for the copy's event first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

#: how many streams copy by turns. Source: comfyui-behaviour facts, section 3, "offload streams"
COPY_STREAMS = 2


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Stream) -> None:
        """Let it happen when all that `stream` was given so far is done."""
        ...

    def synchronize(self) -> None:
        """Return when it has happened."""
        ...

    def query(self) -> bool:
        """Whether it has happened."""
        ...


class Stream(Protocol):
    """A queue of work on a device."""

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing more until all that `stream` was given so far is done."""
        ...

    def wait_event(self, event: Event) -> None:
        """Do nothing more until `event` has happened."""
        ...


@dataclass(frozen=True, slots=True)
class StreamMaker:
    """How streams and events of one device are made and used.

    current  the stream that computes
    on       a block whose operations go to a stream
    lend     memory of the stream that it was allocated on is read by another one too: not to be written again before
             that one is past all that it was given until the memory was freed
    """

    new_stream: Callable[[], Stream]
    new_event: Callable[[], Event]
    current: Callable[[], Stream]
    on: Callable[[Stream], AbstractContextManager[object]]
    lend: Callable[[Tensor, Stream], None]


class CopyStreams:
    """Streams that are taken by turns."""

    def __init__(self, maker: StreamMaker, count: int = COPY_STREAMS) -> None:
        assert count > 0, f"{count} streams"
        self.maker = maker
        self._streams = [maker.new_stream() for _ in range(count)]
        self._next = 0

    def take(self) -> Stream:
        """The stream that was taken longest ago, made to wait for the compute stream (rule 2)."""
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
        current=lambda: cuda.current_stream(device),
        on=lambda stream: cuda.stream(stream),
        lend=_lend,
    )


def _lend(tensor: Tensor, stream: Any) -> None:
    """torch's allocator counts by what of `tensor` is memory: its parts, where it is a wrapper."""
    parts = getattr(tensor, "parts", None)
    for part in (tensor,) if parts is None else parts.values():
        part.record_stream(stream)
