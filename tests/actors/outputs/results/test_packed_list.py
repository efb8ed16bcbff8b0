"""A packed list has the items of a list, in little memory, whatever they are and however many."""

from __future__ import annotations

import os
import pickle
import tracemalloc
from random import Random
from typing import Any

import numpy as np
import pytest

from modelpool.actors.outputs.results import packed_list
from modelpool.actors.outputs.results.packed_list import CHUNK_ITEMS, MOST_UNPACKED, PackedList
from modelpool.actors.request.requests import GenerateRequest
from tests.full_disk import full_after

MANY = CHUNK_ITEMS * (MOST_UNPACKED + 3) + 5


@pytest.fixture(params=["in memory", "in a file"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the chunks are."""
    if request.param == "in a file":
        monkeypatch.setattr(packed_list, "MOST_IN_MEMORY_BYTES", 100)


@pytest.mark.usefixtures("place")
def test_items_are_those_that_were_added() -> None:
    expected = [{"place": place, "text": f"item {place}"} for place in range(MANY)]
    items: PackedList[dict[str, Any]] = PackedList()
    items.extend(expected[:100])
    for item in expected[100:]:
        items.append(item)
    assert len(items) == MANY
    assert list(items) == expected
    assert [items[place] for place in range(MANY)] == expected
    assert [items[place] for place in range(MANY - 1, -1, -1)] == expected[::-1]
    assert items[-1] == expected[-1]
    assert items[3:200:50] == tuple(expected[3:200:50])
    for outside in (MANY, -MANY - 1):
        with pytest.raises(IndexError, match=str(MANY)):
            items[outside]


@pytest.mark.usefixtures("place")
def test_the_items_of_a_moment_stay_as_the_list_grows() -> None:
    items: PackedList[int] = PackedList()
    items.extend(range(100))
    then = items.so_far()
    items.extend(range(100, MANY))
    assert then == tuple(range(100))
    assert (len(then), then[-1], then[98:], list(then)) == (100, 99, (98, 99), list(range(100)))
    assert pickle.loads(pickle.dumps(then)) == tuple(range(100))
    with pytest.raises(IndexError):
        then[100]


def test_without_space_on_the_disk_items_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed_list, "MOST_IN_MEMORY_BYTES", 100)
    monkeypatch.setattr(packed_list.tempfile, "TemporaryFile", full)
    items: PackedList[int] = PackedList()
    items.extend(range(MANY))
    assert list(items) == list(range(MANY))


def test_what_is_on_a_disk_that_became_full_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by filling a disk: bytes that it had not taken were tried again by each read, which failed."""
    monkeypatch.setattr(packed_list, "MOST_IN_MEMORY_BYTES", 100)
    items: PackedList[bytes] = PackedList()
    added = [Random(number).randbytes(40) for number in range(4 * MANY)]
    items.extend(added[:MANY])
    file = items._file
    assert file is not None
    with full_after(os.fstat(file.fileno()).st_size + 100):
        items.extend(added[MANY : 2 * MANY])
        assert list(items) == added[: 2 * MANY]
    items.extend(added[2 * MANY :])
    assert list(items) == added


def test_pixels_and_what_cannot_be_pickled_stay_as_they_are() -> None:
    """Packing pixels would copy those that many requests share."""
    for item in (np.zeros((2, 2)), lambda: None):
        items: PackedList[Any] = PackedList()
        items.extend([item] * MANY)
        assert all(each is item for each in items)


def test_a_request_takes_less_than_200_bytes() -> None:
    """It takes 2 KB as an object."""

    def used_bytes(count: int) -> int:
        requests: PackedList[GenerateRequest] = PackedList()
        before = tracemalloc.get_traced_memory()[0]
        for seed in range(count):
            requests.append(GenerateRequest(model="shapes", prompt=f"a red circle, number {seed}", seed=seed))
        return tracemalloc.get_traced_memory()[0] - before

    few, many = 2 * CHUNK_ITEMS * MOST_UNPACKED, 4 * CHUNK_ITEMS * MOST_UNPACKED
    used_bytes(CHUNK_ITEMS)
    tracemalloc.start()
    try:
        slope = (used_bytes(many) - used_bytes(few)) / (many - few)
    finally:
        tracemalloc.stop()
    assert slope < 200
