"""Sorted sequence with cheap removal near its front. Members need only an `order`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

#: empty places in front before the lists are compacted
_MOST_EMPTY = 64


class HasOrder(Protocol):
    """A member. `order` must not change while it is in a sequence, and must be unique."""

    @property
    def order(self) -> Any: ...


T = TypeVar("T", bound=HasOrder)


class SortedSequence(Generic[T]):
    """Members sorted by `order`. Appending at the end and removing from the front take constant time."""

    __slots__ = ("_front", "_members", "_orders", "head")

    def __init__(self) -> None:
        #: the places before `_front` are unused
        self._members: list[T] = []
        #: the order of each member: bisecting calls no member
        self._orders: list[Any] = []
        self._front = 0
        #: the first member; None if empty. For reading: it is read with every event
        self.head: T | None = None

    def __len__(self) -> int:
        return len(self._members) - self._front

    def __iter__(self) -> Iterator[T]:
        """All members in order. Must not be changed while iterating."""
        members, front = self._members, self._front
        if front <= _MOST_EMPTY:
            return islice(members, front, None)
        return self._walk(front)

    def __getitem__(self, place: int) -> T:
        """The member at this place, counted from 0. Raises IndexError."""
        if not 0 <= place < len(self):
            raise IndexError(f"place {place} of {len(self)}")
        return self._members[self._front + place]

    def first(self, count: int) -> list[T]:
        """The first `count` members, or all."""
        return self._members[self._front : self._front + count]

    def place_of(self, order: Any) -> int:
        """Number of members that come before this order."""
        return bisect_left(self._orders, order, self._front) - self._front

    def from_order(self, order: Any) -> Iterator[T]:
        """The members that do not come before this order."""
        head = self.head
        if head is None or not head.order < order:
            return iter(self)
        return self._walk(self._front + self.place_of(order))

    def _walk(self, at: int) -> Iterator[T]:
        members = self._members
        for place in range(at, len(members)):
            yield members[place]

    def add(self, member: T) -> None:
        """Insert the member at its place."""
        members, orders, order = self._members, self._orders, member.order
        if not orders or orders[-1] < order:
            members.append(member)
            orders.append(order)
            if self.head is None:
                self.head = member
        elif self._front and order < orders[self._front]:
            self._front -= 1
            members[self._front] = self.head = member
            orders[self._front] = order
        else:
            place = bisect_left(orders, order, self._front)
            members.insert(place, member)
            orders.insert(place, order)
            self.head = members[self._front]

    def raise_head(self, order: Any) -> bool:
        """Give the first member this later order, if it stays the first; return whether it does."""
        orders, following = self._orders, self._front + 1
        if following < len(orders) and not order < orders[following]:
            return False
        orders[self._front] = order
        return True

    def remove(self, member: T) -> None:
        """Remove the member; its order must be unchanged since it was added."""
        members, orders, front = self._members, self._orders, self._front
        if front < len(members) and members[front] is member:
            front += 1
            if front == len(members) or (front > _MOST_EMPTY and 2 * front > len(members)):
                del members[:front]
                del orders[:front]
                front = 0
            self._front = front
            self.head = members[front] if members else None
            return
        at = bisect_left(orders, member.order, front)
        assert at < len(members), f"{member} is not at the place of its order"
        assert members[at] is member, f"{member} is not at the place of its order"
        if at - front > len(members) - at:
            del members[at]
            del orders[at]
            return
        members[front + 1 : at + 1] = members[front:at]
        orders[front + 1 : at + 1] = orders[front:at]
        self._front = front + 1
        if self._front == len(members) or (self._front > _MOST_EMPTY and 2 * self._front > len(members)):
            del members[: self._front]
            del orders[: self._front]
            self._front = 0
