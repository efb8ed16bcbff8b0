"""Workload after two text-to-image services in production: LoRAs and ControlNets by popularity and habit.

Matches the Katz trace in: the loads per request of caches of 1 to 10 slots for each serving instance, least recently
and least often used, within 5% (or 0.01 loads per request where that is more), and the shares of the most popular,
within 2.5 percentage points for LoRAs and 4.5 for ControlNets. Caches that count uses do so while a name is in them:
only this reproduces the published curves. A stream is drawn from the middle of an instance's life, so that a short one
is like a long one: of the first 60 requests of many instances, by caches that exist since these began, LoRA loads are
within the same 5%, and ControlNet loads, which are few, within three times the tolerance of a long one.

Not matched: the published figures do not contain arrival times, prompts, users, steps, sizes or base models. These are
simple here: one base model per service, prompts that never repeat, steady arrivals. Nor do they state whether LoRAs and
ControlNets are correlated: here they are chosen independently.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, repeat
from random import Random
from typing import TypeAlias

from modelpool.benchmarks.lab.katz_habits import CONTROLNETS, ControlNetHabits, KatzService, LoraHabits
from modelpool.pool.values.specs.spec import ComponentSpec
from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.generators import poisson
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.sizes import MB, SDXL
from modelpool.scheduler.simulator.workloads.workload import Workload

#: adapters that are requested together, by rank of popularity, 0 the most popular
Ranks: TypeAlias = tuple[int, ...]

#: steps of a request: those of the services are not published
STEPS = 30
#: requests of an instance that are drawn and left out. An instance begins with few ControlNets and without habits;
#: loads of caches are those of a long stream from about the 200th request on
BURN_IN_REQUESTS = 400


@dataclass(frozen=True, slots=True)
class KatzRequest:
    """The adapters of a request."""

    loras: Ranks
    controlnets: Ranks


def instances_of(service: KatzService, instances: int, rng: Random) -> list[Iterator[KatzRequest]]:
    """Endless requests of each of some instances, from after the first `BURN_IN_REQUESTS` on. Drawn lazily."""
    weights = service.loras.summed_weights()
    narrow = [(number + 0.5) / instances > 1.0 - service.loras.narrow for number in range(instances)]
    return [
        islice(
            map(
                KatzRequest,
                lora_choices(service.loras, weights, is_narrow, rng),
                controlnet_choices(service.controlnets, rng),
            ),
            BURN_IN_REQUESTS,
            None,
        )
        for is_narrow in narrow
    ]


def requests_by_instance(
    service: KatzService, instances: int, per_instance: int, rng: Random
) -> list[list[KatzRequest]]:
    """The requests of each of some instances, in order."""
    return [list(islice(requests, per_instance)) for requests in instances_of(service, instances, rng)]


def lora_choices(habits: LoraHabits, summed_weights: Sequence[float], is_narrow: bool, rng: Random) -> Iterator[Ranks]:
    """Endless LoRA choices of one instance's requests. `summed_weights` are those of the habits."""
    sums = list(accumulate(habits.counts))
    narrow_pool = [_drawn(summed_weights, rng) for _ in range(habits.narrow_choices)] if is_narrow else []
    lately = _Lately(habits.again)
    familiar: list[int] = []
    while True:
        chosen = lately.again(rng)
        if chosen is None:
            wanted = _drawn(sums, rng)
            picked: list[int] = []
            while len(picked) < wanted:
                if familiar and rng.random() < habits.familiar:
                    rank = rng.choice(familiar)
                else:
                    rank = rng.choice(narrow_pool) if narrow_pool else _drawn(summed_weights, rng)
                if rank not in picked:
                    picked.append(rank)
            chosen = tuple(picked)
        lately.note(chosen)
        familiar += chosen
        del familiar[: -habits.familiar_depth]
        yield chosen


def controlnet_choices(habits: ControlNetHabits, rng: Random) -> Iterator[Ranks]:
    """Endless ControlNet choices of one instance's requests."""
    for rank in range(habits.begin_ranks):
        yield from repeat((rank,), habits.begin_ranks - rank + 1)
    sums = list(accumulate(weight for _, weight in habits.workflows))
    lately = _Lately(habits.again)
    rare: Ranks = ()
    rare_left = 0
    while True:
        if rare_left:
            rare_left -= 1
            chosen: Ranks | None = rare
        elif rng.random() < habits.rare:
            rare = tuple(rng.sample(range(habits.rare_from, CONTROLNETS), habits.rare_together))
            rare_left = int(rng.expovariate(1.0 / habits.rare_requests))
            chosen = rare
        else:
            chosen = lately.again(rng)
        if chosen is None:
            chosen = habits.workflows[_drawn(sums, rng)][0]
        lately.note(chosen)
        yield chosen


def katz_workload(services: Sequence[KatzService], gpus: int, jobs: int, rng: Random, load: float = 0.8) -> Workload:
    """The requests of `gpus` instances of these services, merged in time, one job each.

    Every service has a separate base model, its ControlNets, its LoRAs, and a share of the instances as in the trace.
    Jobs come at the rate at which `gpus` GPUs would be busy for `load` of the time with runs alone, everything resident
    (seconds as in `scheduler.simulator.workloads.sizes`).
    """
    streams = [
        (service, requests)
        for service, instances in zip(services, _divided(gpus, [s.instances for s in services]), strict=True)
        for requests in instances_of(service, instances, rng)
    ]
    models = {service.name: replace(SDXL, name=f"katz-{service.name}", loras_reach_text=False) for service in services}
    drawn: list[tuple[KatzService, KatzRequest]] = []
    for _ in range(jobs):
        service, requests = rng.choice(streams)
        drawn.append((service, next(requests)))
    drawn_jobs = [
        models[service.name].job(
            f"job-{number}",
            f"prompt {number}",
            number,
            loras=_names(request.loras),
            controlnets=_names(request.controlnets),
            steps=STEPS,
        )
        for number, (service, request) in enumerate(drawn)
    ]
    busy_seconds = sum(task.run_seconds for job in drawn_jobs for task in job.tasks)
    times = poisson(jobs, load * gpus * jobs / busy_seconds, rng) if jobs else iter(())
    components = tuple(
        spec
        for service in services
        for spec in _components(models[service.name], [request for other, request in drawn if other is service])
    )
    name = f"katz {'+'.join(service.name for service in services)} on {gpus}"
    return Workload(name, components, tuple(map(Submitted, times, drawn_jobs)))


class _Lately:
    """The latest distinct choices of an instance, and the chances to repeat them."""

    def __init__(self, chances: Sequence[float]) -> None:
        self._sums = list(accumulate(chances))
        self._latest: list[Ranks] = []

    def again(self, rng: Random) -> Ranks | None:
        """One of the latest; None if it is time for another choice."""
        place = bisect(self._sums, rng.random())
        return self._latest[place] if place < len(self._latest) else None

    def note(self, chosen: Ranks) -> None:
        """Record a choice. Empty choices are not recorded."""
        if chosen:
            self._latest = [chosen, *(other for other in self._latest if other != chosen)][: len(self._sums)]


def _drawn(summed_weights: Sequence[float], rng: Random) -> int:
    """Draw a place by cumulative weights."""
    return min(bisect(summed_weights, rng.random() * summed_weights[-1]), len(summed_weights) - 1)


def _names(ranks: Ranks) -> list[str]:
    return [f"{rank + 1}" for rank in ranks]


def _divided(total: int, weights: Sequence[int]) -> list[int]:
    """Divide `total` into integer parts about in proportion to the weights, by largest remainders."""
    exact = [total * weight / sum(weights) for weight in weights]
    parts = [int(part) for part in exact]
    by_rest = sorted(range(len(parts)), key=lambda place: parts[place] - exact[place])
    for place in by_rest[: total - sum(parts)]:
        parts[place] += 1
    return parts


def _components(model: InventedModel, requests: Iterable[KatzRequest]) -> Iterator[ComponentSpec]:
    """The model, all its ControlNets, and the requested LoRAs."""
    yield from model.components
    yield from model.adapters(controlnets=_names(tuple(range(CONTROLNETS))))
    for rank in sorted({rank for request in requests for rank in request.loras}):
        size = (200 + 50 * (rank % 5)) * MB
        yield from (replace(spec, weight_bytes=size, upload_bytes=size) for spec in model.adapters(_names((rank,))))
