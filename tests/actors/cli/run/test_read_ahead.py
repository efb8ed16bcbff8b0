"""`ReadAhead`: what has arrived is not kept waiting, and a source that is too fast is."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from modelpool.actors.cli.run.read_ahead import ReadAhead
from modelpool.pool.values.core.errors import UserError

SECONDS = 30.0


def test_what_has_arrived_does_not_wait_for_what_has_not() -> None:
    go_on = threading.Event()

    def items() -> Iterator[int]:
        yield from (1, 2, 3)
        assert go_on.wait(SECONDS)
        yield 4

    with ReadAhead(items(), "items") as ahead:
        assert ahead.wait()
        chunks = ahead.chunks(1, 256)
        taken: list[int] = []
        while len(taken) < 3:
            taken += next(chunks)
        go_on.set()
        assert taken == [1, 2, 3]
        assert list(chunks) == [[4]]


def test_chunks_are_bounded_and_the_first_is_small() -> None:
    with ReadAhead(range(20), "items") as ahead:
        ahead._thread.join()
        assert [len(chunk) for chunk in ahead.chunks(2, 8)] == [2, 8, 8, 2]


def test_only_so_many_items_are_taken_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(100):
            taken.append(item)
            yield item

    with ReadAhead(items(), "items", most_ahead=5) as ahead:
        assert ahead.wait()
        chunks = ahead.chunks(1, 3)
        seen = 0
        for chunk in chunks:
            seen += len(chunk)
            assert len(taken) <= seen + 6
        assert seen == 100


def test_what_the_source_raises_comes_after_its_items() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise UserError("line 2 cannot be read")

    with ReadAhead(items(), "items") as ahead:
        chunks = ahead.chunks(8, 8)
        assert next(chunks) == [1]
        with pytest.raises(UserError, match="line 2"):
            next(chunks)
    with ReadAhead((int(text) for text in ["x"]), "items") as ahead, pytest.raises(ValueError, match="invalid"):
        ahead.wait()


def test_leaving_it_ends_the_chunks_and_the_thread_of_a_full_one() -> None:
    with ReadAhead(range(1000), "items", most_ahead=2) as ahead:
        chunks = ahead.chunks(1, 1)
        assert next(chunks) == [0]
    assert list(chunks) == []
    ahead._thread.join(SECONDS)
    assert not ahead._thread.is_alive()
