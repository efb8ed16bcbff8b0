"""Built-in workloads by name with parameters, as in "zipf:jobs=2000,models=12".

A workload is a function of a Random and of parameters with defaults that returns a `Workload`; names, types and
defaults of the parameters are read from its signature. Models are like SDXL unless stated otherwise; `rate` is jobs per
second on average, 0 means all at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType

from modelpool.pool.values.core.errors import unknown_name, unusable_field
from modelpool.scheduler.simulator.workloads.generators import (
    UserDemand,
    bursting,
    heterogeneous,
    many_users,
    offline_batch,
    shifting,
    zipf,
)
from modelpool.scheduler.simulator.workloads.mix import Mix
from modelpool.scheduler.simulator.workloads.models import InventedModel
from modelpool.scheduler.simulator.workloads.sizes import SDXL
from modelpool.scheduler.simulator.workloads.workload import Workload

Value = int | float
_EXPECTED = {int: "a whole number", float: "a number"}
#: maximum of each parameter. More would take hours or all memory, or times too long to resolve seconds in
_RANGES: Mapping[str, tuple[Value, Value]] = {
    "jobs": (1, 1_000_000),
    "models": (1, 1000),
    "loras": (0, 1000),
    "seeds": (1, 1_000_000),
    "steps": (1, 100_000),
    "burst": (1, 100_000),
    "users": (1, 10_000),
    "gpus": (1, 100_000),
    "load": (0.001, 1000.0),
    "rate": (0.00001, 1e6),
    "gap": (0.001, 1e6),
    "shift": (0.001, 1e6),
}
#: parameters that may also be 0
_OR_ZERO = ("rate",)
#: maximum number of components of all models and LoRAs together
_MOST_COMPONENTS = 100_000
#: maximum digits of a number
_MOST_DIGITS = 40


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A named workload. `make` takes a Random and numeric parameters by name."""

    name: str
    make: Callable[..., Workload]

    @property
    def parameters(self) -> dict[str, Value]:
        """Return each parameter with its default."""
        parameters = list(inspect.signature(self.make).parameters.values())[1:]
        return {one.name: one.default for one in parameters}

    @property
    def line(self) -> str:
        """The description, in one line."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]

    def parse(self, text: str) -> dict[str, Value]:
        """Parse parameters such as 'jobs=2000,models=12'. Raises UnusableField and UnknownName."""
        known = self.parameters
        found: dict[str, Value] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise unusable_field(self.name, part, f"NAME=VALUE, such as {_example(known)}")
            if name not in known:
                raise unknown_name(f"parameter of {self.name}", name, known)
            found[name] = self._value(name, value, type(known[name]))
        chosen = known | found
        components = chosen.get("models", 0) * chosen.get("loras", 0)
        if components > _MOST_COMPONENTS:
            raise unusable_field(f"{self.name}: models x loras", components, f"at most {_MOST_COMPONENTS:,}")
        return found

    def _value(self, name: str, text: str, kind: type[Value]) -> Value:
        least, most = _RANGES[name]
        expected = f"{_EXPECTED[kind]} from {least:,} to {most:,}"
        if name in _OR_ZERO:
            expected += ", or 0"
        found = text if len(text) <= _MOST_DIGITS else f"{text[:_MOST_DIGITS]}..."
        try:
            value = kind(text) if len(text) <= _MOST_DIGITS else None
        except ValueError:
            value = None
        if value is None or not (least <= value <= most or (value == 0 and name in _OR_ZERO)):
            raise unusable_field(f"{self.name}: {name}", found, expected)
        return value


def _example(known: Mapping[str, Value]) -> str:
    return ",".join(f"{name}={value}" for name, value in list(known.items())[:2])


def _models(count: int) -> list[InventedModel]:
    return [replace(SDXL, name=f"sdxl-{number}") for number in range(count)]


def _mix(models: int, loras: int, seeds: int = 1, steps: int = 20) -> Mix:
    """Popular items first; the bare model is as popular as the first LoRA."""
    return Mix(_models(models), _loras(loras), seeds_per_prompt=seeds, steps=(steps,))


def _loras(count: int) -> list[str]:
    return ["", *(f"lora-{number}" for number in range(count))]


def _zipf(
    rng: Random, jobs: int = 1000, models: int = 12, loras: int = 0, rate: float = 1.0, seeds: int = 1, steps: int = 20
) -> Workload:
    """Models and LoRAs by Zipf popularity, jobs at a steady rate."""
    return zipf(_mix(models, loras, seeds, steps), jobs, rng, rate or None)


def _shifting(
    rng: Random, jobs: int = 1000, models: int = 12, loras: int = 0, rate: float = 1.0, shift: float = 300.0
) -> Workload:
    """Like zipf; every `shift` seconds models and LoRAs swap their ranks."""
    return shifting(_mix(models, loras), jobs, rng, rate or 1.0, shift)


def _bursting(
    rng: Random,
    jobs: int = 500,
    models: int = 12,
    loras: int = 0,
    rate: float = 0.5,
    burst: int = 40,
    gap: float = 120.0,
) -> Workload:
    """Like zipf at a calm rate; about every `gap` seconds `burst` more jobs that all use one model."""
    calm_seconds, most = jobs / (rate or 0.5), _RANGES["jobs"][1]
    if calm_seconds / gap * burst > most:
        least_gap = calm_seconds * burst / most
        raise unusable_field("bursts: gap", gap, f"at least {least_gap:.3g}: bursts of at most {most:,} jobs in all")
    return bursting(_mix(models, loras), jobs, rng, rate or 0.5, burst, gap)


def _sizes(rng: Random, jobs: int = 400, rate: float = 0.2) -> Workload:
    """Models of very different sizes: SD 1.5, SDXL, Flux, and a video now and then."""
    return heterogeneous(jobs, rng, rate or None)


def _batch(rng: Random, jobs: int = 1000, models: int = 12, loras: int = 4, seeds: int = 4) -> Workload:
    """Everything at once: models and LoRAs about equally often, `seeds` images per prompt, in random order."""
    return offline_batch(_models(models), _loras(loras), jobs, rng, seeds)


def _users(
    rng: Random, users: int = 4, jobs: int = 200, models: int = 12, loras: int = 0, rate: float = 0.2
) -> Workload:
    """One user submits a batch of `jobs`, each of the others as many images as arrive at `rate` in that time."""
    others = [UserDemand(f"user-{number}", max(jobs // users, 1), rate or None) for number in range(1, users)]
    return many_users(_mix(models, loras), [UserDemand("user-0", jobs), *others], rng)


_MAKERS: Mapping[str, Callable[..., Workload]] = {
    "zipf": _zipf,
    "shifting": _shifting,
    "bursts": _bursting,
    "sizes": _sizes,
    "batch": _batch,
    "users": _users,
}
BUILT_IN: Mapping[str, BuiltIn] = MappingProxyType({name: BuiltIn(name, make) for name, make in _MAKERS.items()})
