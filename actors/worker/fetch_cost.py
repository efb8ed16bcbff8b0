"""`FetchCost`: bytes and seconds that bringing the files of runs to a node took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchCost:
    """The cost of bringing files: bytes from sources and from other nodes, and all seconds, including waits for another
    worker that fetched the same files."""

    source_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: FetchCost) -> FetchCost:
        return FetchCost(
            self.source_bytes + other.source_bytes, self.peer_bytes + other.peer_bytes, self.seconds + other.seconds
        )

    def share(self, count: int) -> FetchCost:
        """Return the share of one of `count` tasks."""
        return FetchCost(self.source_bytes // count, self.peer_bytes // count, self.seconds / count)
