"""`ChunkPlan`: decides which chunk of a file to fetch next, and from where. Pure: no clock, no I/O, no threads.

So that N nodes take a file from its source once and not N times, a node takes from the source only chunks that no other
node has or is taking at that moment, and everything else from other nodes. What it knows of them is some tenths of a
second old, so nodes must not follow each other through the file: a node takes consecutive chunks until it meets what
another one has, and then continues within the longest range that nobody has, at a place of its own.

Nobody waits longer than `patience_seconds` for a node with claims that make no progress: then the chunk is taken from
the source after all. If the source is much faster than the other nodes, their chunks are ignored.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from modelpool.pool.files.fetch.fetch_progress import FetchProgress

#: a source that is this many times as fast as another node, per connection, is preferred to it
MUCH_FASTER = 2.0
#: weight of the newest measurement of a speed
NEWEST = 0.3
#: failures after which another node is not asked again for this file
MOST_FAILURES = 3


@dataclass(slots=True)
class _PeerState:
    progress: FetchProgress
    failures: int = 0
    in_flight: int = 0
    bytes_per_second: float = 0.0


class ChunkPlan:
    """The chunks of one file on one node that fetches it."""

    def __init__(
        self, progress: FetchProgress, start: float = 0.0, patience_seconds: float = 5.0, is_alone: bool = False
    ) -> None:
        """`start` is the place of a range at which this node begins, as a part of the range: another one for each
        node. One that `is_alone` begins at the beginning of the file."""
        self._progress = progress
        self._patience_seconds = patience_seconds
        #: not complete and not in flight
        self._left: set[int] = set(range(progress.chunks)) - progress.done
        self._in_flight: set[int] = set()
        self._start = start
        self._next = 0 if is_alone else int(start * progress.chunks) % max(1, progress.chunks)
        self._peers: dict[str, _PeerState] = {}
        #: when a claim of another node was first seen, by peer and chunk
        self._claimed_since: dict[tuple[str, int], float] = {}
        self._source_speed = 0.0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk is on disk."""
        return not self._left and not self._in_flight

    def peer_is(self, peer: str, progress: FetchProgress, at: float) -> None:
        """Take in what another node has and takes from the source."""
        if (progress.size_bytes, progress.chunk_bytes) != (self._progress.size_bytes, self._progress.chunk_bytes):
            return
        known = self._peers.setdefault(peer, _PeerState(progress))
        known.progress = progress
        for key in [key for key in self._claimed_since if key[0] == peer and key[1] not in progress.claimed]:
            del self._claimed_since[key]
        for chunk in progress.claimed:
            self._claimed_since.setdefault((peer, chunk), at)

    def peer_gone(self, peer: str) -> None:
        """Another node does not answer: nothing is expected of it until it does."""
        self._peers.pop(peer, None)
        for key in [key for key in self._claimed_since if key[0] == peer]:
            del self._claimed_since[key]

    def from_peer(self) -> tuple[str, int] | None:
        """Return the next chunk to take from another node, and that node: the one with the fewest transfers."""
        best: tuple[int, int, str, int] | None = None
        for peer, state in self._peers.items():
            if state.failures >= MOST_FAILURES or self._source_is_better(state):
                continue
            chunk = self._first_of(self._left & state.progress.done)
            if chunk is not None and (best is None or (state.in_flight, -len(state.progress.done)) < best[:2]):
                best = (state.in_flight, -len(state.progress.done), peer, chunk)
        if best is None:
            return None
        _, _, peer, chunk = best
        self._peers[peer].in_flight += 1
        self._take(chunk)
        return peer, chunk

    def from_source(self, at: float) -> int | None:
        """Return the next chunk to take from the source; None if other nodes have, or are taking, all that is left."""
        if not self._left:
            return None
        elsewhere: set[int] = set()
        for peer, state in self._peers.items():
            if state.failures < MOST_FAILURES and not self._source_is_better(state):
                elsewhere |= state.progress.done
            elsewhere.update(
                chunk
                for chunk in state.progress.claimed
                if at - self._claimed_since.get((peer, chunk), at) < self._patience_seconds
            )
        free = self._left - elsewhere
        if not free:
            return None
        chunk = self._next if self._next in free else _within_longest(free, self._start)
        self._next = (chunk + 1) % self._progress.chunks
        self._take(chunk)
        return chunk

    def done(self, chunk: int, seconds: float, peer: str | None = None) -> None:
        """A chunk arrived, from the source or from another node."""
        self._in_flight.discard(chunk)
        begin, end = self._progress.range_of(chunk)
        speed = (end - begin) / max(seconds, 1e-6)
        if peer is None:
            self._source_speed = _averaged(self._source_speed, speed)
        elif (state := self._peers.get(peer)) is not None:
            state.in_flight -= 1
            state.failures = 0
            state.bytes_per_second = _averaged(state.bytes_per_second, speed)

    def failed(self, chunk: int, peer: str | None = None) -> None:
        """A transfer failed: the chunk is left to be fetched."""
        self._in_flight.discard(chunk)
        self._left.add(chunk)
        if peer is not None and (state := self._peers.get(peer)) is not None:
            state.in_flight -= 1
            state.failures += 1

    def _take(self, chunk: int) -> None:
        self._left.discard(chunk)
        self._in_flight.add(chunk)

    def _first_of(self, chunks: set[int]) -> int | None:
        """Return the first of `chunks` from this node's place on."""
        if not chunks:
            return None
        count = self._progress.chunks
        return min(chunks, key=lambda chunk: (chunk - self._next) % count)

    def _source_is_better(self, state: _PeerState) -> bool:
        return 0.0 < MUCH_FASTER * state.bytes_per_second < self._source_speed


def _within_longest(chunks: Collection[int], part: float) -> int:
    """Return the chunk at this part of the longest range of consecutive `chunks`."""
    ordered = sorted(chunks)
    begin = best_begin = best_length = 0
    for index in range(len(ordered)):
        if index and ordered[index] != ordered[index - 1] + 1:
            begin = index
        if index - begin + 1 > best_length:
            best_begin, best_length = begin, index - begin + 1
    return ordered[best_begin + min(best_length - 1, int(part * best_length))]


def _averaged(known: float, measured: float) -> float:
    return measured if known <= 0.0 else known + NEWEST * (measured - known)
