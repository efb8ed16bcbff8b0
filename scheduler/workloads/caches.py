"""What caches of a few slots would load for a sequence of names: the curves that workloads are compared by.

Knows nothing of bytes, GPUs or the scheduler: a slot holds one name.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


def lru_loads(sequence: Iterable[Hashable], most_slots: int) -> list[int]:
    """Loads by caches of 1, 2, ... `most_slots` slots that let the least recently used go.

    One pass serves all sizes: a name is found by every cache that has more slots than names came since.
    """
    found = [0] * most_slots
    latest: list[Hashable] = []
    length = 0
    for name in sequence:
        length += 1
        try:
            place = latest.index(name)
        except ValueError:
            del latest[most_slots - 1 :]
        else:
            found[place] += 1
            del latest[place]
        latest.insert(0, name)
    loads = []
    for hits in found:
        length -= hits
        loads.append(length)
    return loads


def lfu_loads(sequence: Iterable[Hashable], slots: int) -> int:
    """Loads by a cache of so many slots that lets the least often used go, the least recently used among equals.

    A name is counted while it is in the cache, and anew when it comes back: the count does not outlive the stay.
    """
    uses: dict[Hashable, int] = {}
    loads = 0
    for name in sequence:
        if name in uses:
            # to the end: the order is that of the last use
            uses[name] = uses.pop(name) + 1
            continue
        loads += 1
        if len(uses) == slots:
            del uses[min(uses, key=uses.__getitem__)]
        uses[name] = 1
    return loads
