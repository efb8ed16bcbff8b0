"""Built-in workloads after the Katz trace: katz, katz-a and katz-b."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType

from modelpool.benchmarks.lab.katz import katz_workload
from modelpool.benchmarks.lab.katz_habits import SERVICES
from modelpool.scheduler.simulator.workloads.built_in import BuiltIn
from modelpool.scheduler.simulator.workloads.workload import Workload


def _katz(rng: Random, jobs: int = 2000, gpus: int = 8, load: float = 0.8) -> Workload:
    """Requests like those of two services in production (the Katz trace), as many as keep `gpus` busy for `load`."""
    return katz_workload(SERVICES, gpus, jobs, rng, load)


def _katz_a(rng: Random, jobs: int = 2000, gpus: int = 8, load: float = 0.8) -> Workload:
    """Like katz, only the first of the two services: more LoRAs, rarely repeated."""
    return katz_workload(SERVICES[:1], gpus, jobs, rng, load)


def _katz_b(rng: Random, jobs: int = 2000, gpus: int = 8, load: float = 0.8) -> Workload:
    """Like katz, only the second of the two services: fewer LoRAs, often repeated."""
    return katz_workload(SERVICES[1:], gpus, jobs, rng, load)


_MAKERS: Mapping[str, Callable[..., Workload]] = {"katz": _katz, "katz-a": _katz_a, "katz-b": _katz_b}
WORKLOADS: Mapping[str, BuiltIn] = MappingProxyType({name: BuiltIn(name, make) for name, make in _MAKERS.items()})
