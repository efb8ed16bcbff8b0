"""Loads of caches by slots: against caches that are played slot by slot, and against what is known of them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.benchmarks.lab.caches import fewest_loads, lfu_loads, lru_loads

SEQUENCES = st.lists(st.integers(0, 7), max_size=60)


def played_lru(sequence: list[int], slots: int) -> int:
    cache: list[int] = []
    loads = 0
    for name in sequence:
        loads += name not in cache
        cache = [name, *(other for other in cache if other != name)][:slots]
    return loads


def played_lfu(sequence: list[int], slots: int) -> int:
    """Slots as rows of name, count and time of last use."""
    rows: list[tuple[int, int, int]] = []
    loads = 0
    for now, name in enumerate(sequence):
        count = next((count for other, count, _ in rows if other == name), 0)
        rows = [row for row in rows if row[0] != name]
        if not count:
            loads += 1
            if len(rows) == slots:
                rows.remove(min(rows, key=lambda row: (row[1], row[2])))
        rows.append((name, count + 1, now))
    return loads


@given(SEQUENCES)
def test_loads_are_those_of_caches_played_slot_by_slot(sequence: list[int]) -> None:
    assert lru_loads(sequence, 9) == [played_lru(sequence, slots) for slots in range(1, 10)]
    for slots in range(1, 10):
        assert lfu_loads(sequence, slots) == played_lfu(sequence, slots)


@given(SEQUENCES)
def test_one_slot_and_enough_slots_know_no_policy(sequence: list[int]) -> None:
    assert lru_loads(sequence, 1) == [lfu_loads(sequence, 1)]
    assert lru_loads(sequence, 8)[7] == lfu_loads(sequence, 8) == len(set(sequence))
    curve = lru_loads(sequence, 8)
    assert curve == sorted(curve, reverse=True), "more slots never load more"


def least_of_all_choices(sequence: list[int], slots: int) -> int:
    """Every choice of what to keep after each use: the fewest loads."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for name in sequence:
        after: dict[frozenset[int], int] = {}
        for kept, loads in reached.items():
            held = kept | {name}
            loads += name not in kept
            for leaving in combinations(sorted(held), max(0, len(held) - slots)):
                rest = held - set(leaving)
                after[rest] = min(loads, after.get(rest, loads))
        reached = after
    return min(reached.values())


@given(st.lists(st.integers(0, 5), max_size=14), st.integers(0, 4))
def test_who_knows_the_sequence_loads_as_few_as_the_best_of_all_choices(sequence: list[int], slots: int) -> None:
    assert fewest_loads(sequence, slots) == least_of_all_choices(sequence, slots)


@given(SEQUENCES, st.integers(1, 9))
def test_no_cache_loads_fewer_than_who_knows_the_sequence(sequence: list[int], slots: int) -> None:
    least = fewest_loads(sequence, slots)
    assert least <= min(lru_loads(sequence, slots)[slots - 1], lfu_loads(sequence, slots))
    assert fewest_loads(sequence, 8) == len(set(sequence))


def test_names_need_no_order() -> None:
    assert fewest_loads([None, "a", 1, ("b",), None, 1], 2) == 4


def test_a_pair_that_takes_turns_needs_two_slots_and_spoils_the_least_often_used() -> None:
    """What the trace shows at pairs of LoRAs: one slot that changes cannot keep two new names beside old favourites."""
    old = ["x", "y"] * 10
    pair = ["a", "b"] * 5
    assert lru_loads(old + pair, 3) == [30, 4, 4]
    assert lfu_loads(old + pair, 3) == 2 + 10
