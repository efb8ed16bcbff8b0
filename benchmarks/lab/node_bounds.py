"""A lower bound on the price of nodes: the cheapest schedule in hindsight.

It knows all arrivals, starts nodes ahead of need, divides work at will among them, loads no weights twice and serves in
order. It pays, like everybody, for the start of each node and for one cold load. Every job must be done within a given
time. A dynamic programme over slots of time, the number of nodes, and the work that waits; waiting work is rounded down
and work that comes in a slot may be done from its begin, so that no real schedule is cheaper, up to parts of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

#: steps of waiting work per node and slot
STEPS = 2


def clairvoyant_node_seconds(
    arrivals: Sequence[tuple[float, float]], within_seconds: float, start_seconds: float, slot_seconds: float, most: int
) -> float:
    """The least node-seconds for work as pairs of time and GPU-seconds, for nodes of one GPU, at most `most` of them;
    infinity if that is too few. `start_seconds` are paid for each start."""
    import numpy

    slots = ceil((max(at for at, _ in arrivals) + within_seconds) / slot_seconds) + 1
    arrived = numpy.zeros(slots)
    for at, seconds in arrivals:
        arrived[int(at / slot_seconds)] += seconds
    total = numpy.concatenate(([0.0], numpy.cumsum(arrived)))
    window = round(within_seconds / slot_seconds)
    quantum = slot_seconds / STEPS
    # what may wait at the end of each slot: all that came within the time that jobs have
    allowed = [total[k + 1] - total[max(0, k + 1 - window)] for k in range(slots)]
    width = int(max(allowed) / quantum) + 2
    counts = numpy.arange(most + 1)
    cost = numpy.full((most + 1, width), numpy.inf)
    cost[0, 0] = 0.0
    carried = 0.0
    for k in range(slots):
        # the best predecessor of each number of nodes
        rising = (
            numpy.minimum.accumulate(cost - counts[:, None] * start_seconds, axis=0) + counts[:, None] * start_seconds
        )
        falling = numpy.minimum.accumulate(cost[::-1], axis=0)[::-1]
        best = numpy.minimum(rising, falling) + counts[:, None] * slot_seconds
        carried += arrived[k] / quantum
        came = int(carried)
        carried -= came
        limit = int(allowed[k] / quantum)
        after = numpy.full_like(cost, numpy.inf)
        for count in range(most + 1):
            shift = came - count * STEPS
            row = best[count]
            if shift >= 0:
                after[count, shift:] = row[: width - shift]
            else:
                after[count, : width + shift] = row[-shift:]
                after[count, 0] = min(after[count, 0], row[:-shift].min())
        after[:, limit + 1 :] = numpy.inf
        cost = after
    return float(cost[:, 0].min())
