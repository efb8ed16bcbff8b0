"""`HeldShares`: how much of one resource callers hold at a time, in all and each owner, so that nobody takes all."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from modelpool.actors.http.service.problems import too_many

#: how long a caller is asked to wait for a share: calls and jobs end within seconds to minutes
RETRY_SECONDS = 5.0


class HeldShares:
    """Thread-safe."""

    def __init__(self, what: str, limit: str, most: int, most_of_owner: int) -> None:
        """`what` is held, for messages; `limit` is the name of the limit in the log and in metrics."""
        self._what = what
        self._limit = limit
        self._most = most
        self._most_of_owner = min(most, most_of_owner)
        self._lock = threading.Lock()
        self._held: Counter[str] = Counter()

    def take(self, owner: str, amount: int) -> None:
        """Take an amount for `owner`. Raises HttpProblem (429) if that is too much now."""
        with self._lock:
            held = self._held[owner]
            if held + amount > self._most_of_owner or self._held.total() + amount > self._most:
                found = f"{held + amount} {self._what}"
                message = f"{found} are more than one user may have at a time ({self._most_of_owner}), or all together"
                raise too_many(message, RETRY_SECONDS, self._limit)
            self._held[owner] = held + amount

    def free(self, owner: str, amount: int) -> None:
        """Give an amount back."""
        with self._lock:
            self._held[owner] -= amount
            if self._held[owner] <= 0:
                del self._held[owner]

    def held(self, owner: str) -> int:
        """Return how much `owner` has."""
        with self._lock:
            return self._held[owner]


@dataclass(slots=True)
class HeldShare:
    """The part of one call or job of `owner`. Used from one thread at a time."""

    shares: HeldShares
    owner: str
    amount: int = 0

    def take(self, amount: int) -> None:
        """Take more. Raises HttpProblem (429)."""
        self.shares.take(self.owner, amount)
        self.amount += amount

    def close(self) -> None:
        """Give all back, as `contextlib.closing` calls it."""
        self.free()

    def free(self) -> None:
        """Give all back; again has no effect."""
        amount, self.amount = self.amount, 0
        if amount:
            self.shares.free(self.owner, amount)


def of_the_largest(sizes: Counter[str]) -> str:
    """Return the owner who has most: this owner's oldest goes first when all together have too much."""
    return max(sizes, key=lambda owner: (sizes[owner], owner))
