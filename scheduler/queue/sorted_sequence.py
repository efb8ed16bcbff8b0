"""A sorted sequence that is cheap to take from near its front, where queues are taken from. Knows only that its members
have an `order`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar

#: places in front that may stand empty before they are given up
_MOST_EMPTY = 64


class InOrder(Protocol):
    """What can be filed. `order` must not change meanwhile, and no two members have the same."""

    @property
    def order(self) -> Any: ...


T = TypeVar("T", bound=InOrder)


class Ordered(Generic[T]):
    """Members by their `order`. Adding at the end and taking from the front take constant time."""

    __slots__ = ("_front", "_members", "_orders", "head")

    def __init__(self) -> None:
        #: the places before `_front` hold nothing of meaning
        self._members: list[T] = []
        #: of each member, beside it: looking for a place asks no member
        self._orders: list[Any] = []
        self._front = 0
        #: the first member; None when there is none. For reading: it is asked for with every event
        self.head: T | None = None

    def __len__(self) -> int:
        return len(self._members) - self._front

    def __iter__(self) -> Iterator[T]:
        """All members in order. Not to be changed meanwhile."""
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
        """So many from the front, or all."""
        return self._members[self._front : self._front + count]

    def place_of(self, order: Any) -> int:
        """How many members come before this order."""
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
        """File it at its place."""
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

    def remove(self, member: T) -> None:
        """Take it out; its order must be the one that it was filed with."""
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
        assert at < len(members), f"{member} is not filed where its order says"
        assert members[at] is member, f"{member} is not filed where its order says"
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
