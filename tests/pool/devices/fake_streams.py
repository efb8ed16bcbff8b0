"""Streams and events that do nothing but know what must have happened before what.

Each stream counts its steps and keeps, for every other stream, the latest step that it has waited for. `Trace` checks
the rules of `pool.devices.copy_streams` at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from modelpool.pool.devices.copy_streams import StreamMaker


@dataclass(eq=False)
class FakeStream:
    """`seen` has the number of steps of each stream that are over when this stream's next step starts."""

    name: str
    steps: int = 0
    seen: dict[str, int] = field(default_factory=dict)

    def wait_stream(self, stream: FakeStream) -> None:
        self._learn(stream.seen | {stream.name: stream.steps})

    def wait_event(self, event: FakeEvent) -> None:
        assert event.seen is not None, "waited for an event that was never recorded"
        self._learn(event.seen)

    def _learn(self, seen: dict[str, int]) -> None:
        for name, steps in seen.items():
            self.seen[name] = max(self.seen.get(name, 0), steps)


@dataclass(eq=False)
class FakeEvent:
    """Remembers what was before it."""

    seen: dict[str, int] | None = None
    synchronized: bool = False
    is_over: bool = True

    def record(self, stream: FakeStream) -> None:
        self.seen = stream.seen | {stream.name: stream.steps}

    def synchronize(self) -> None:
        self.synchronized = True

    def query(self) -> bool:
        return self.is_over


class Trace:
    """Makes fake streams; the compute stream is "compute". Memory of the streams named in `lending` is lent to it."""

    def __init__(self) -> None:
        self.compute = FakeStream("compute")
        self.streams: list[FakeStream] = []
        self.events: list[FakeEvent] = []
        self.copies: list[str] = []
        self.lending: set[str] = set()
        self.lent: list[tuple[Tensor, str]] = []
        self._on_streams = [self.compute]
        self.maker = StreamMaker(
            new_stream=self._new_stream,
            new_event=self._new_event,
            new_end=self._new_event,
            current=lambda: self._on_streams[-1],
            on=self._on,
            lend=lambda tensor, stream: self.lent.append((tensor, stream.name)),
        )

    def _new_stream(self) -> FakeStream:
        stream = FakeStream(f"copy {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def _new_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        # memory that this stream hands out, or writes for the current one, may have been read by any step of
        # that so far
        current = self._on_streams[-1]
        is_behind = stream.seen.get(current.name, 0) < current.steps
        assert stream.name in self.lending or not is_behind, f"{stream.name} may overwrite what is being read"
        stream.steps += 1
        self.copies.append(stream.name)
        self._on_streams.append(stream)
        try:
            yield
        finally:
            self._on_streams.pop()
