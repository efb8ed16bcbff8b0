"""`Recent`: answers that are cheap to find again, kept while they are in use. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """At most `limit` answers; the one that was not asked for the longest makes room. One thread's."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, f"a limit of {limit} keeps nothing"
        self._limit = limit
        self._answers: dict[K, V] = {}

    def get(self, key: K, find: Callable[[], V]) -> V:
        """The answer for `key`, from `find` when it is not kept. What `find` raises passes; nothing is kept then."""
        answer = self._answers[key] if key in self._answers else find()
        self.put(key, answer)
        return answer

    def put(self, key: K, answer: V) -> None:
        """Keep `answer` for `key`, in place of what was kept."""
        self._answers.pop(key, None)
        self._answers[key] = answer
        while len(self._answers) > self._limit:
            del self._answers[next(iter(self._answers))]

    def kept(self, key: K) -> V | None:
        """The answer for `key` if it is kept. That does not count as asking."""
        return self._answers.get(key)

    def items(self) -> Iterator[tuple[K, V]]:
        """Everything that is kept, what was not asked for the longest first."""
        return iter(tuple(self._answers.items()))

    def __len__(self) -> int:
        return len(self._answers)
