"""Loads of caches by slots: against caches that are played slot by slot, and against known facts about them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from modelpool.benchmarks.lab.caches import fewest_loads, lfu_loads, lru_loads, reordered_lru_loads
from modelpool.benchmarks.lab.own_caches import LoopCase, own_cache_loads

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


@given(SEQUENCES, st.integers(1, 8))
def test_a_window_of_one_reorders_nothing(sequence: list[int], slots: int) -> None:
    assert reordered_lru_loads(sequence, slots, 1) == lru_loads(sequence, slots)[slots - 1]


@given(SEQUENCES, st.integers(1, 8))
def test_a_window_over_everything_loads_each_name_once(sequence: list[int], slots: int) -> None:
    assert reordered_lru_loads(sequence, slots, max(1, len(sequence))) == len(set(sequence))


def test_what_a_cache_holds_goes_first_then_what_most_wait_for() -> None:
    assert reordered_lru_loads("abbab", 1, 5) == 2
    assert reordered_lru_loads("abababab", 1, 2) < lru_loads("abababab", 1)[0]


def test_workers_with_their_own_models_by_hand() -> None:
    """One client and one worker with one slot load at each change of the model; two workers hold both models."""
    one = LoopCase([0, 1, 0, 1], [1.0] * 4, 1, 1, 1, 2.0)
    assert own_cache_loads(one) == (4, 4 / 12.0)
    assert own_cache_loads(LoopCase([0, 1, 0, 1], [1.0] * 4, 2, 1, 1, 2.0)) == (2, 4 / 8.0)
    assert own_cache_loads(LoopCase([0, 1, 0, 1], [1.0] * 4, 1, 1, 4, 2.0)) == (2, 4 / 8.0)


def test_patience_waits_before_each_load() -> None:
    """A second of patience delays the first load and the one after the runs of the first model."""
    case = LoopCase([0, 0, 1, 1], [1.0] * 4, 1, 1, 2, 2.0)
    assert own_cache_loads(case, 1.0) == (2, 4 / 10.0)
