"""Loads by workers that each hold their own models, in a closed loop with the future known: what a pool can reach.

A worker takes the first waiting request whose model it holds. With none, it waits for `patience_seconds`, then loads
the missing model that most requests wait for, and evicts the one that is needed last of those that none waits for.
No model is ever loaded on two workers. Knows no scheduler.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

#: in place of a worker: no run ends, but the patience of one may
_LOOK = -1


@dataclass(frozen=True, slots=True)
class LoopCase:
    """A closed loop: models in order of the requests, seconds of each run, workers with `slots` models each."""

    models: Sequence[int]
    run_seconds: Sequence[float]
    workers: int
    slots: int
    clients: int
    load_seconds: float


def own_cache_loads(case: LoopCase, patience_seconds: float = 0.0) -> tuple[int, float]:
    """Return the number of loads and the requests per second."""
    models, total = case.models, len(case.models)
    places: dict[int, list[int]] = {}
    for place, model in enumerate(models):
        places.setdefault(model, []).append(place)
    held: list[list[int]] = [[] for _ in range(case.workers)]
    idle_since: dict[int, float] = dict.fromkeys(range(case.workers), 0.0)
    waiting = list(range(min(case.clients, total)))
    sent, loads, at, ended_at = len(waiting), 0, 0.0, 0.0
    events: list[tuple[float, int]] = [(patience_seconds, _LOOK)]

    def begin(worker: int, place: int, load_seconds: float) -> None:
        waiting.remove(place)
        del idle_since[worker]
        heapq.heappush(events, (at + load_seconds + case.run_seconds[place], worker))

    def next_use(model: int) -> float:
        later = bisect_right(places[model], sent - 1)
        return places[model][later] if later < len(places[model]) else float("inf")

    while True:
        for worker in list(idle_since):
            mine = [place for place in waiting if models[place] in held[worker]]
            there = {model for models_held in held for model in models_held}
            missing = [place for place in waiting if models[place] not in there]
            if mine:
                begin(worker, mine[0], 0.0)
            elif missing and at >= idle_since[worker] + patience_seconds:
                counts = Counter(models[place] for place in missing)
                place = max(missing, key=lambda one: (counts[models[one]], -one))
                if len(held[worker]) == case.slots:
                    wanted = {models[one] for one in waiting}
                    free = [model for model in held[worker] if model not in wanted] or held[worker]
                    held[worker].remove(max(free, key=next_use))
                held[worker].append(models[place])
                loads += 1
                begin(worker, place, case.load_seconds)
        if not events:
            return loads, total / ended_at
        at, worker = heapq.heappop(events)
        if worker != _LOOK:
            idle_since[worker], ended_at = at, at
            if sent < total:
                waiting.append(sent)
                sent += 1
            heapq.heappush(events, (at + patience_seconds, _LOOK))
