"""`KeyIndex`: numbers texts in the order in which they come, in arrays: about 50 bytes for each, however long it is."""

from __future__ import annotations

import hashlib
from array import array

_FIRST_SLOTS = 64
#: a table is doubled when more than this share of its slots is used: longer searches would follow
_MOST_USED = 0.6
_HALF_BITS = 64


class KeyIndex:
    """The number of each text, from 0. Texts are known by 128 bits of a hash: two of them have one number once in 10^26
    pairs. Not thread-safe."""

    __slots__ = ("_high", "_low", "_numbers", "_slots")

    def __init__(self) -> None:
        #: halves of the hashes, by number
        self._high = array("Q")
        self._low = array("Q")
        self._slots = _FIRST_SLOTS
        #: open addressing: a number in each slot; -1 if it is free
        self._numbers = array("q", [-1]) * _FIRST_SLOTS

    def __len__(self) -> int:
        return len(self._high)

    def __contains__(self, key: str) -> bool:
        return self.find(key) is not None

    def find(self, key: str) -> int | None:
        """Return the number of a text; None if it has none."""
        found = self._numbers[self._slot(*_halves(key))]
        return None if found < 0 else found

    def add(self, key: str) -> int:
        """Return the number of a text, the next one if it has none."""
        high, low = _halves(key)
        slot = self._slot(high, low)
        if self._numbers[slot] >= 0:
            return self._numbers[slot]
        number = len(self._high)
        self._numbers[slot] = number
        self._high.append(high)
        self._low.append(low)
        if number + 1 > self._slots * _MOST_USED:
            self._grow()
        return number

    def _slot(self, high: int, low: int) -> int:
        """Return the slot with this hash, or the free one where it belongs."""
        slot = low % self._slots
        while (number := self._numbers[slot]) >= 0 and (self._high[number], self._low[number]) != (high, low):
            slot = (slot + 1) % self._slots
        return slot

    def _grow(self) -> None:
        self._slots *= 2
        self._numbers = array("q", [-1]) * self._slots
        for number, (high, low) in enumerate(zip(self._high, self._low, strict=True)):
            self._numbers[self._slot(high, low)] = number


def _halves(key: str) -> tuple[int, int]:
    digest = int.from_bytes(hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest(), "little")
    return digest >> _HALF_BITS, digest & (2**_HALF_BITS - 1)
