"""A bounded memory answers as an unbounded one would, asks again only for what it forgot, and forgets the oldest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.lru_cache import LruCache


@given(limit=st.integers(1, 5), keys=st.lists(st.integers(0, 8)))
def test_answers_are_right_few_and_the_latest(limit: int, keys: list[int]) -> None:
    recent: LruCache[int, str] = LruCache(limit)
    latest: list[int] = []  # oldest first
    for key in keys:
        asked = []
        assert recent.get(key, lambda k=key, log=asked: log.append(k) or str(k)) == str(key)
        assert asked == ([] if key in latest else [key])
        latest = [*(k for k in latest if k != key), key][-limit:]
        assert len(recent) == len(latest)


def test_what_could_not_be_found_is_asked_for_again() -> None:
    recent: LruCache[str, int] = LruCache(2)

    def fail() -> int:
        raise ValueError("not now")

    with pytest.raises(ValueError, match="not now"):
        recent.get("a", fail)
    assert len(recent) == 0
    assert recent.get("a", lambda: 3) == 3
