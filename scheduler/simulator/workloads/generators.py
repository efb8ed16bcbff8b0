"""Generates workloads of every kind that a pool meets, from a few numbers and a passed Random.

Arrival times are ascending, in seconds from the start: steady, all at once, in bursts. `per_second` None means all at
once. The workload after a published trace is `benchmarks.lab.katz`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from random import Random
from typing import TypeVar

from modelpool.scheduler.model.messages import Submitted
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.sizes import FLUX, SD15, SDXL, VIDEO
from modelpool.scheduler.simulator.workloads.workload import Workload


def all_at_once(count: int) -> Iterator[float]:
    """A batch: every job at time 0."""
    return iter([0.0] * count)


def poisson(count: int, per_second: float, rng: Random) -> Iterator[float]:
    """Independent arrivals at a steady rate."""
    return accumulate(rng.expovariate(per_second) for _ in range(count))


def bursts(count: int, size: int, gap_seconds: float) -> Iterator[float]:
    """Batches of `size` jobs, one every `gap_seconds`."""
    return (number // size * gap_seconds for number in range(count))


T = TypeVar("T")


def zipf(mix: Mix, jobs: int, rng: Random, per_second: float | None = None, name: str = "zipf") -> Workload:
    """Models and LoRAs by fixed popularity."""
    return Workload(name, mix.components, tuple(mix.submissions(_times(jobs, per_second, rng), rng)))


def shifting(mix: Mix, jobs: int, rng: Random, per_second: float, shift_seconds: float) -> Workload:
    """Changing popularity: every `shift_seconds` the ranks of models and LoRAs are shuffled."""
    requests: list[tuple[float, Mix]] = []
    now, shifts = mix, 0
    for at in poisson(jobs, per_second, rng):
        # of several in a row only the last has an effect
        if int(at / shift_seconds) > shifts:
            now = replace(now, models=_shuffled(now.models, rng), loras=_shuffled(now.loras, rng))
            shifts = int(at / shift_seconds)
        requests.append((at, now))
    return Workload("shifting", mix.components, tuple(_submissions(requests, rng)))


def bursting(
    mix: Mix, jobs: int, rng: Random, per_second: float, burst_jobs: int, gap_seconds: float, burst_seconds: float = 5.0
) -> Workload:
    """A calm stream of `jobs` with bursts, each of one model and one LoRA set drawn uniformly, that arrive within
    `burst_seconds` after gaps of `gap_seconds` on average."""
    requests = [(at, mix) for at in poisson(jobs, per_second, rng)]
    end = requests[-1][0] if requests else 0.0
    begin = rng.expovariate(1.0 / gap_seconds)
    while begin < end:
        only = replace(mix, models=[rng.choice(mix.models)], loras=[rng.choice(mix.loras)])
        requests += [(begin + rng.uniform(0.0, burst_seconds), only) for _ in range(burst_jobs)]
        begin += rng.expovariate(1.0 / gap_seconds)
    requests.sort(key=lambda one: one[0])
    return Workload("bursting", mix.components, tuple(_submissions(requests, rng)))


def heterogeneous(
    jobs: int, rng: Random, per_second: float | None = None, loras: Sequence[str] = ("", "style", "face")
) -> Workload:
    """Models of very different sizes: small images often, a video now and then."""
    models = [replace(SDXL, name=f"sdxl-{n}") for n in range(3)]
    models += [SD15, FLUX, replace(SD15, name="sd15-tuned"), VIDEO]
    mix = Mix(models, loras, steps=(20, 28, 30), seeds_per_prompt=2)
    return zipf(mix, jobs, rng, per_second, "heterogeneous")


def offline_batch(
    models: Sequence[InventedModel], loras: Sequence[str], jobs: int, rng: Random, seeds_per_prompt: int = 4
) -> Workload:
    """A batch, completely known at the start: every model and LoRA set about equally often, several seeds per prompt,
    in random order."""
    mix = Mix(models, loras, 0.0, 0.0, seeds_per_prompt)
    requests = list(mix.submissions(all_at_once(jobs), rng, batch="batch"))
    rng.shuffle(requests)
    return Workload("offline batch", mix.components, tuple(requests))


@dataclass(frozen=True, slots=True)
class UserDemand:
    """The jobs of one user, from `begin_seconds` on."""

    user: str
    jobs: int
    per_second: float | None = None
    begin_seconds: float = 0.0


def many_users(mix: Mix, demands: Iterable[UserDemand], rng: Random) -> Workload:
    """Users with different demands on the same models: some submit a batch, others an image now and then. Each has a
    separate order of model popularity."""
    requests: list[tuple[float, Mix]] = []
    for demand in demands:
        user_mix = replace(mix, users=(demand.user,), models=_shuffled(mix.models, rng))
        requests += [(demand.begin_seconds + at, user_mix) for at in _times(demand.jobs, demand.per_second, rng)]
    requests.sort(key=lambda one: one[0])
    return Workload("many users", mix.components, tuple(_submissions(requests, rng)))


def _times(jobs: int, per_second: float | None, rng: Random) -> Iterator[float]:
    return all_at_once(jobs) if per_second is None else poisson(jobs, per_second, rng)


def _submissions(requests: Iterable[tuple[float, Mix]], rng: Random) -> Iterator[Submitted]:
    return chain.from_iterable(mix.submissions(iter([at]), rng, number) for number, (at, mix) in enumerate(requests))


def _shuffled(things: Sequence[T], rng: Random) -> list[T]:
    return rng.sample(things, len(things))
