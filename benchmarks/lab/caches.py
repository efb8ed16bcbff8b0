"""Loads by small caches for a sequence of names: the curves that workloads are compared by.

Knows nothing of bytes, GPUs or the scheduler: a slot holds one name.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable
from itertools import count, islice


def lru_loads(sequence: Iterable[Hashable], most_slots: int) -> list[int]:
    """Loads by LRU caches of 1, 2, ... `most_slots` slots.

    One pass serves all sizes: a name is found by every cache that has more slots than there were distinct names since.
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


def reordered_lru_loads(sequence: Iterable[Hashable], slots: int, window: int) -> int:
    """Loads by one LRU cache of this many slots that may take any of the next `window` names first.

    It takes the first of them that it holds; if it holds none, it loads the one that most of them equal. This is one
    cache for all workers: a worker of a pool cannot use what only another one holds.
    """
    names, kept, loads = iter(sequence), OrderedDict[Hashable, None](), 0
    waiting = list(islice(names, window))
    while waiting:
        place = next((place for place, name in enumerate(waiting) if name in kept), None)
        if place is None:
            counts = Counter(waiting)
            place = max(range(len(waiting)), key=lambda at: (counts[waiting[at]], -at))
            loads += 1
            if len(kept) == slots:
                kept.popitem(last=False)
        name = waiting.pop(place)
        kept[name] = None
        kept.move_to_end(name)
        waiting += islice(names, 1)
    return loads


def lfu_loads(sequence: Iterable[Hashable], slots: int) -> int:
    """Loads by an LFU cache of this many slots; of equal counts, the least recently used leaves.

    A name is counted while it is in the cache, and from 0 when it comes back: the count does not outlive the stay.
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


def fewest_loads(sequence: Iterable[Hashable], slots: int) -> int:
    """The fewest loads by any cache of this many slots, with the complete sequence known.

    What is needed last leaves first (Belady). A name that would leave first is loaded for its use and not kept.
    """
    names = list(sequence)
    following: list[int] = []
    next_use: dict[Hashable, int] = {}
    never = count(len(names))
    for place in range(len(names) - 1, -1, -1):
        # places beyond the end differ, so that names are never compared
        following.append(next_use[names[place]] if names[place] in next_use else next(never))
        next_use[names[place]] = place
    following.reverse()
    kept: dict[Hashable, int] = {}
    latest_first: list[tuple[int, Hashable]] = []
    loads = 0
    for name, needed in zip(names, following, strict=True):
        loads += name not in kept
        kept[name] = needed
        heapq.heappush(latest_first, (-needed, name))
        while len(kept) > slots:
            place, leaving = heapq.heappop(latest_first)
            if kept.get(leaving) == -place:
                del kept[leaving]
    return loads
