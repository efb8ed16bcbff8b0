"""How long GPUs take to work off GPU-seconds, as a fluid: arithmetic over (free at, capacity) pairs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import TypeAlias

from modelpool.scheduler.autoscaling.outlook import FleetNode

#: when it is free, and the GPU-seconds that it works off per second from then on
Server: TypeAlias = tuple[float, float]


def servers(nodes: Iterable[FleetNode], level_bytes: float, at: float) -> list[Server]:
    """The nodes with at least this memory that take new work, by the time at which they are free. Overdue requests do
    not count: they may never come."""
    able = [
        node
        for node in nodes
        if node.gpu_bytes >= level_bytes and not node.is_leaving and not node.is_overdue and node.ends_at == inf
        if node.gpus
    ]
    return sorted((max(at, node.free_at), node.capacity) for node in able)


def finish_at(ascending: Sequence[Server], seconds: float) -> float:
    """The time at which they have worked off this much; infinity without servers."""
    capacity = offset = 0.0
    for place, (free_at, more) in enumerate(ascending):
        capacity += more
        offset += more * free_at
        end = (seconds + offset) / capacity
        if place + 1 == len(ascending) or end <= ascending[place + 1][0]:
            return end
    return inf


def shortfalls(ascending: Sequence[Server], due: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of work as pairs of deadline and GPU-seconds, ascending by deadline: each deadline by which not all that is due
    until then can be worked off, with the GPU-seconds that remain."""
    found: list[tuple[float, float]] = []
    capacity = offset = total = 0.0
    place = 0
    for deadline, seconds in due:
        total += seconds
        while place < len(ascending) and ascending[place][0] < deadline:
            capacity += ascending[place][1]
            offset += ascending[place][1] * ascending[place][0]
            place += 1
        missing = total - (capacity * deadline - offset)
        if missing > 1e-9 * max(1.0, total):
            found.append((deadline, missing))
    return found


def merged(ascending: Sequence[Server], server: Server) -> list[Server]:
    """The servers with one more, in order."""
    return sorted((*ascending, server))
