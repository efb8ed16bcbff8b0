"""Compares generated requests with the Katz trace's curves, and searches for parameters with a smaller error.

Run from the repository: `python -m benchmarks.fit_katz` prints the errors of the tables in
`benchmarks/lab/katz_habits.py`; `python -m benchmarks.fit_katz SERVICE (loras|controlnets) SECONDS [SEED]` starts
from them, improves them by simulated annealing, and prints the result for that file. Imports neither torch nor Ray.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from random import Random
from typing import TypeVar

from modelpool.benchmarks.lab.caches import lfu_loads, lru_loads
from modelpool.benchmarks.lab.katz import Ranks, controlnet_choices, lora_choices
from modelpool.benchmarks.lab.katz_habits import SERVICES, ControlNetHabits, KatzService, LoraHabits

CURVES = Path(__file__).with_suffix("").with_name("katz_workload_curves.json")
SLOTS = 10
#: instances that are drawn to rate a table during a fit; a report draws twice as many from another seed, because a
#: search that reuses the same instances overfits to them
INSTANCES = 60
#: error of a popularity share, in percentage points, that has the weight of a curve's error of 3%
SHARE_POINTS = 1.5
Habits = TypeVar("Habits", LoraHabits, ControlNetHabits)


@dataclass(frozen=True, slots=True)
class Figures:
    """The compared figures: loads per request by slots, and the percentage of uses of the k most popular."""

    lru: Sequence[float]
    lfu: Sequence[float]
    shares: Sequence[float]


def published(service: KatzService, kind: str) -> tuple[Figures, Sequence[int]]:
    """Return the trace's figures, and the k of each share."""
    curves = json.loads(CURVES.read_text())
    lru, lfu = (
        curves[f"{policy}_loads_per_request_by_cache_size_1_to_10"][service.name][kind.removesuffix("s")]
        for policy in ("lru", "lfu")
    )
    if kind == "loras":
        tops, shares = zip(*curves["lora_cdf_topk_percent"][service.name], strict=True)
    else:
        shares = curves["controlnet_cdf_percent_top1_to_17"][service.name]
        tops = range(1, len(shares) + 1)
    return Figures(lru, lfu, shares), tops


def figures_of(choices: Sequence[Sequence[Ranks]], tops: Sequence[int]) -> Figures:
    """Return the figures of generated choices, one sequence for each instance."""
    requests = sum(map(len, choices))
    named = [[rank for ranks in instance for rank in ranks] for instance in choices]
    lru = [sum(loads) / requests for loads in zip(*(lru_loads(one, SLOTS) for one in named), strict=True)]
    lfu = [sum(lfu_loads(one, slots) for one in named) / requests for slots in range(1, SLOTS + 1)]
    uses = Counter(rank for one in named for rank in one)
    summed = [0, *accumulate(uses[rank] for rank in range(max(tops)))]
    return Figures(lru, lfu, [100.0 * summed[top] / uses.total() for top in tops])


def generated(
    service: KatzService, habits: LoraHabits | ControlNetHabits, rng: Random, instances: int
) -> list[list[Ranks]]:
    """Return the choices of `instances` instances of the average length by these habits."""
    length = service.requests_per_instance
    if isinstance(habits, ControlNetHabits):
        return [list(islice(controlnet_choices(habits, rng), length)) for _ in range(instances)]
    weights = habits.summed_weights()
    narrow = [(number + 0.5) / instances > 1.0 - habits.narrow for number in range(instances)]
    return [list(islice(lora_choices(habits, weights, is_narrow, rng), length)) for is_narrow in narrow]


def errors(found: Figures, wanted: Figures) -> list[float]:
    """Return each load's error as a fraction of the tolerance: 5%, or 0.01 loads per request if that is larger."""
    pairs = [*zip(found.lru, wanted.lru, strict=True), *zip(found.lfu, wanted.lfu, strict=True)]
    return [(got - want) / max(0.05 * want, 0.01) for got, want in pairs]


def cost(found: Figures, wanted: Figures) -> float:
    """Return the objective of the search: squared errors, plus a penalty for those above half of the tolerance."""
    off = [abs(error) for error in errors(found, wanted)]
    shares = [abs(got - want) / SHARE_POINTS for got, want in zip(found.shares, wanted.shares, strict=True)]
    return sum(e * e + 4.0 * max(0.0, e - 0.5) ** 2 for e in off) + 0.4 * sum(e * e for e in shares)


def search(habits: Habits, change: Callable[[Habits, Random], Habits], rate: Callable[[Habits], float], seconds: float,
           rng: Random) -> Habits:  # fmt: skip
    """Improve `habits` by simulated annealing for `seconds`; return the best found."""
    now = best = habits
    now_cost = best_cost = rate(habits)
    begin = time.perf_counter()
    while (gone := (time.perf_counter() - begin) / seconds) < 1.0:
        warmth = 4.0 * (1.0 - gone) ** 2 + 0.01
        other = change(now, rng)
        other_cost = rate(other)
        if other_cost < now_cost or rng.random() < math.exp((now_cost - other_cost) / warmth):
            now, now_cost = other, other_cost
        if now_cost < best_cost:
            best, best_cost = now, now_cost
    return best


def changed_loras(habits: LoraHabits, rng: Random) -> LoraHabits:
    """Return `habits` with one number changed slightly, except those that were read from the trace."""
    what = rng.random()
    if what < 0.35:
        counts = _with_one(habits.counts, lambda weight: max(0.0, weight + rng.gauss(0.0, 0.03)), rng)
        return replace(habits, counts=counts)
    if what < 0.75:
        return replace(habits, again=_with_one(habits.again, lambda chance: chance * _stretch(0.25, rng), rng))
    if what < 0.85:
        return replace(habits, familiar=min(0.5, habits.familiar * _stretch(0.2, rng)))
    if what < 0.95:
        return replace(habits, familiar_depth=max(5, int(habits.familiar_depth * _stretch(0.3, rng))))
    return replace(habits, emphasis=habits.emphasis + rng.gauss(0.0, 0.01))


def changed_controlnets(habits: ControlNetHabits, rng: Random) -> ControlNetHabits:
    """Return `habits` with one number changed slightly, or with other ControlNets in one workflow."""
    what = rng.random()
    if what < 0.25:
        again = _with_one(habits.again, lambda chance: max(0.0, chance + rng.gauss(0.0, 0.04)), rng)
        return replace(habits, again=again) if sum(again) < 0.9 else habits
    if what < 0.32:
        return replace(habits, rare=habits.rare * _stretch(0.3, rng))
    if what < 0.35:
        return replace(habits, rare_requests=habits.rare_requests * _stretch(0.3, rng))
    place = rng.randrange(len(habits.workflows))
    ranks, weight = habits.workflows[place]
    if what < 0.8:
        weight *= _stretch(0.3, rng)
    else:
        other = rng.randrange(habits.rare_from)
        if other not in ranks:
            ranks = (*ranks[: rng.randrange(3)], other)
    workflows = (*habits.workflows[:place], (ranks, weight), *habits.workflows[place + 1 :])
    return replace(habits, workflows=workflows)


def report(service: KatzService, kind: str, habits: LoraHabits | ControlNetHabits, seed: int = 2026) -> None:
    """Print a row for each policy with the generated and published loads, then the largest errors."""
    wanted, tops = published(service, kind)
    found = figures_of(generated(service, habits, Random(seed), 2 * INSTANCES), tops)
    shares = max(abs(got - want) for got, want in zip(found.shares, wanted.shares, strict=True))
    for name, got, want in (("LRU", found.lru, wanted.lru), ("LFU", found.lfu, wanted.lfu)):
        cells = " ".join(f"{a:.3f}/{b:.3f}" for a, b in zip(got, want, strict=True))
        print(f"| {service.name} | {kind} | {name} | {cells} |")
    worst = max(map(abs, errors(found, wanted)))
    print(f"largest load error {worst:.2f} of the tolerance; largest share error {shares:.1f} percentage points")


def main(service_name: str = "", kind: str = "loras", seconds: str = "60", seed: str = "1") -> None:
    """Report on all tables, or fit one of them and report on it."""
    if not service_name:
        for service in SERVICES:
            report(service, "loras", service.loras)
            report(service, "controlnets", service.controlnets)
        return
    service = next(one for one in SERVICES if one.name == service_name)
    wanted, tops = published(service, kind)

    def rate(habits: LoraHabits | ControlNetHabits) -> float:
        # the same seed for all candidates
        return cost(figures_of(generated(service, habits, Random(int(seed)), INSTANCES), tops), wanted)

    rng = Random(int(seed))
    if kind == "loras":
        loras = search(service.loras, changed_loras, rate, float(seconds), rng)
        print(loras)
        report(service, kind, loras)
    else:
        controlnets = search(service.controlnets, changed_controlnets, rate, float(seconds), rng)
        print(controlnets)
        report(service, kind, controlnets)


def _with_one(values: tuple[float, ...], change: Callable[[float], float], rng: Random) -> tuple[float, ...]:
    place = rng.randrange(len(values))
    return (*values[:place], change(values[place]), *values[place + 1 :])


def _stretch(spread: float, rng: Random) -> float:
    return math.exp(rng.gauss(0.0, spread))


if __name__ == "__main__":
    main(*sys.argv[1:])
