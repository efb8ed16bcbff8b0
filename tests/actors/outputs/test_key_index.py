"""An index numbers keys as a dict would, and takes little memory."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from modelpool.actors.outputs.key_index import KeyIndex


@given(st.lists(st.text(max_size=3), max_size=300))
def test_keys_have_the_numbers_that_a_dict_gives_them(keys: list[str]) -> None:
    index, expected = KeyIndex(), dict[str, int]()
    for key in keys:
        assert index.find(key) == expected.get(key)
        assert (key in index) == (key in expected)
        assert index.add(key) == expected.setdefault(key, len(expected))
    assert len(index) == len(expected)
    assert {key: index.find(key) for key in expected} == expected
    assert index.find("none of these") is None


def test_a_key_takes_less_than_64_bytes() -> None:
    """A dict from digests to whole numbers takes 250."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = KeyIndex()
        for number in range(20_000):
            index.add(f"{number:064x}")
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert used / len(index) < 64
