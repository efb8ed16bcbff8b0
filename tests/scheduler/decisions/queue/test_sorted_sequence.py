"""`SortedSequence` against a plain sorted list."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.scheduler.decisions.queue.sorted_sequence import SortedSequence


@dataclass(eq=False)
class Member:
    order: int


@given(st.lists(st.tuples(st.sampled_from(["add", "add", "front", "front", "any"]), st.integers(0, 400)), max_size=300))
def test_it_is_a_sorted_list_whatever_is_added_and_taken(actions) -> None:
    ordered: SortedSequence[Member] = SortedSequence()
    plain: list[Member] = []
    for action, number in actions:
        if action == "add":
            if all(m.order != number for m in plain):
                member = Member(number)
                ordered.add(member)
                plain.append(member)
                plain.sort(key=lambda m: m.order)
        elif plain:
            member = plain.pop(0 if action == "front" else number % len(plain))
            ordered.remove(member)
        assert list(ordered) == plain
        assert len(ordered) == len(plain)
        assert ordered.head is (plain[0] if plain else None)
        assert ordered.first(3) == plain[:3]
        assert ordered.place_of(number) == sum(m.order < number for m in plain)
        assert list(ordered.from_order(number)) == [m for m in plain if m.order >= number]
        assert [ordered[place] for place in range(len(plain))] == plain


@pytest.mark.parametrize("place", [0, 1])
def test_places_in_front_are_given_up_when_they_are_many(place: int) -> None:
    """Whether the first leaves or the one behind it."""
    ordered: SortedSequence[Member] = SortedSequence()
    members = [Member(number) for number in range(100)]
    for member in members:
        ordered.add(member)
    for _ in range(64):
        ordered.remove(members.pop(0))
    for _ in range(10):
        ordered.remove(members.pop(place))
        assert list(ordered) == members
        assert ordered.head is members[0]
        assert len(ordered) == len(members)


def test_what_is_not_there_is_refused() -> None:
    ordered: SortedSequence[Member] = SortedSequence()
    ordered.add(Member(1))
    with pytest.raises(IndexError):
        ordered[1]
    with pytest.raises(AssertionError, match="not at the place of its order"):
        ordered.remove(Member(1))
    with pytest.raises(AssertionError, match="not at the place of its order"):
        ordered.remove(Member(0))
