"""`LruCache`: a bounded cache that evicts the least recently used entry. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _None:
    """Stands for an entry that is missing: None may be one."""


_NONE = _None()


class LruCache(Generic[K, V]):
    """At most `limit` entries. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        assert limit > 0, f"a limit of {limit} keeps nothing"
        self._limit = limit
        self._answers: dict[K, V] = {}

    def get(self, key: K, find: Callable[[], V]) -> V:
        """Return the entry of `key`, computed by `find` if it is missing. Errors of `find` propagate and nothing is
        cached."""
        answers = self._answers
        answer: V | _None = answers.pop(key, _NONE)
        if isinstance(answer, _None):
            answer = find()
            self.put(key, answer)
        else:
            answers[key] = answer  # as the latest. A key is hashed twice in all: some have many fields
        return answer

    def setdefault(self, key: K, answer: V) -> V:
        """The kept answer for `key`; without one, `answer`, which is then kept."""
        return self.get(key, lambda: answer)

    def put(self, key: K, answer: V) -> None:
        """Store `answer` for `key`, replacing an earlier entry."""
        self._answers.pop(key, None)
        self._answers[key] = answer
        while len(self._answers) > self._limit:
            del self._answers[next(iter(self._answers))]

    def kept(self, key: K) -> V | None:
        """Return the entry of `key` or None, without marking it as used."""
        return self._answers.get(key)

    def items(self) -> Iterator[tuple[K, V]]:
        """All entries, least recently used first."""
        return iter(tuple(self._answers.items()))

    def clear(self) -> None:
        """Forget everything."""
        self._answers.clear()

    def __contains__(self, key: K) -> bool:
        return key in self._answers

    def __len__(self) -> int:
        return len(self._answers)
