"""Lower bound on the bytes that a residency policy copies over the bus for a known sequence of tasks.

Proof. Between two uses of a component some of its bytes stay on the GPU. Each byte that stays saves its price (bytes on
the bus per byte of memory) at the second use, and nothing else saves anything. While a task runs, the resident bytes of
other components share the memory next to its activations with its own component. For a task with several passes this is
the complete component: streaming a byte would cost one transfer more per pass, which never costs less than loading
another byte again (an assertion checks this). For a task with one pass it is the part that stayed from before, and the
part that stays for later. Without all other limits, the bytes that stay are a packing of intervals into the memory of
each moment. The most valuable packing is a minimum-cost flow (every byte of memory flows through time, along the
intervals that it serves), which is solved exactly. With a single price this equals Belady's rule, applied to bytes and
with bypass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec

#: prices are integer multiples of 1 / SCALE
SCALE = 10**6


@dataclass(frozen=True, slots=True)
class Request:
    """One task: its component, its passes, and the memory for weights next to its activations and scratch."""

    component: ComponentKey
    passes: int
    room_bytes: int


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes that may stay during the moments begin <= moment < end, each worth `value`."""

    begin: int
    end: int
    bytes: int
    value: int


def least_bus_bytes(requests: Sequence[Request], specs: Mapping[ComponentKey, ComponentSpec]) -> float:
    """Return the lower bound, from an empty GPU. Every component must fit in the memory of each of its tasks."""
    prices = [spec.upload_bytes / spec.weight_bytes for spec in specs.values()]
    rooms: list[int] = []
    intervals: list[Interval] = []
    last_use: dict[ComponentKey, int] = {}
    saved = 0
    for number, request in enumerate(requests):
        spec, is_one_pass = specs[request.component], request.passes == 1
        assert is_one_pass or (request.passes - 1) * min(prices) >= max(prices), "streaming might be cheaper"
        assert spec.weight_bytes <= request.room_bytes, f"{request} does not fit"
        # two moments per task: with the bytes that it finds, and with the bytes that it leaves
        rooms += [request.room_bytes - (0 if is_one_pass else spec.weight_bytes)] * 2
        if request.component in last_use:
            before = last_use[request.component]
            begin = 2 * before + (1 if requests[before].passes == 1 else 2)
            end = 2 * number + (1 if is_one_pass else 0)
            value = -(-spec.upload_bytes * SCALE // spec.weight_bytes)
            if begin < end:
                intervals.append(Interval(begin, end, spec.weight_bytes, value))
            else:
                saved += spec.weight_bytes * value
        last_use[request.component] = number
    saved += best_packing(rooms, intervals)
    return sum(specs[request.component].upload_bytes for request in requests) - saved / SCALE


def best_packing(rooms: Sequence[int], intervals: Iterable[Interval]) -> int:
    """Return the maximum value of bytes of `intervals`, of which at most `rooms[moment]` stay at each moment."""
    held = list(intervals)
    if not held or not any(rooms):
        return 0
    points = sorted({i.begin for i in held} | {i.end for i in held})
    places = {point: place for place, point in enumerate(points)}
    narrowest = [min(rooms[begin:end]) for begin, end in pairwise(points)]
    network = _Network(len(points))
    # the largest room flows through time; where there is less room, the rest has to take the most valuable arc
    width, most = max(1, *narrowest), (len(held) + 1) * max(i.value for i in held)
    for place, room in enumerate(narrowest):
        network.add(place, place + 1, width - room, -most)
        network.add(place, place + 1, width, 0)
    arcs = [network.add(places[i.begin], places[i.end], i.bytes, -i.value) for i in held]
    network.send(width)
    return sum((i.bytes - network.left[arc]) * i.value for i, arc in zip(held, arcs, strict=True))


class _Network:
    """A minimum-cost flow from node 0 to the last one, by successive shortest paths. Arcs lead forward."""

    def __init__(self, nodes: int) -> None:
        self._from: list[list[int]] = [[] for _ in range(nodes)]
        self._to: list[int] = []
        self._cost: list[int] = []
        #: residual capacity of each arc; an odd arc is the reverse of the one before it
        self.left: list[int] = []

    def add(self, begin: int, end: int, most: int, cost: int) -> int:
        """Add an arc and its reverse. Returns its number."""
        number = len(self._to)
        self._to += [end, begin]
        self._cost += [cost, -cost]
        self.left += [most, 0]
        self._from[begin].append(number)
        self._from[end].append(number + 1)
        return number

    def send(self, amount: int) -> None:
        """Send `amount` through the network, which must have the capacity for it."""
        levels = self._first_levels()
        while amount:
            distances, arrived_by = self._shortest(levels)
            levels = [level + distance for level, distance in zip(levels, distances, strict=True)]
            path, node = [], len(levels) - 1
            while node:
                path.append(arrived_by[node])
                node = self._to[arrived_by[node] ^ 1]
            pushed = min(amount, *(self.left[arc] for arc in path))
            for arc in path:
                self.left[arc] -= pushed
                self.left[arc ^ 1] += pushed
            amount -= pushed

    def _first_levels(self) -> list[int]:
        """Return the shortest distances from node 0 while all arcs lead forward."""
        levels: list[int | float] = [0, *[inf] * (len(self._from) - 1)]
        for node, arcs in enumerate(self._from):
            for arc in arcs:
                if self.left[arc]:
                    levels[self._to[arc]] = min(levels[self._to[arc]], levels[node] + self._cost[arc])
        return [int(level) for level in levels]

    def _shortest(self, levels: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return distances from node 0 relative to `levels`, and the arc by which each node is reached."""
        distances: list[int | float] = [0, *[inf] * (len(levels) - 1)]
        arrived_by = [-1] * len(levels)
        heap = [(0, 0)]
        while heap:
            distance, node = heapq.heappop(heap)
            if distance > distances[node]:
                continue
            for arc in self._from[node]:
                to = self._to[arc]
                farther = distance + self._cost[arc] + levels[node] - levels[to]
                if self.left[arc] and farther < distances[to]:
                    distances[to], arrived_by[to] = farther, arc
                    heapq.heappush(heap, (farther, to))
        return [int(distance) for distance in distances], arrived_by
