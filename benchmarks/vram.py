"""Compares bytes over the bus when 12 models share the memory of 3: the residency plan, other policies, and a bound.

Bytes are weights that are loaded before runs or streamed during them. All policies keep weights in the same form; they
differ in the weights that stay. Imports neither torch nor Ray.
Run from the repository: `python -m benchmarks.vram [JOBS] [SEEDS]`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from random import Random

from benchmarks.clairvoyant import Request, least_bus_bytes
from modelpool.pool.values.core.errors import GIB, MIB
from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.plan.eviction_plan import Residency, needed_bytes, plan
from modelpool.scheduler.simulator.workloads.mix import zipf_weights

STEPS = 20
SCRATCH_BYTES = 128 * MIB
ACTIVATION_BYTES = {Role.TEXT_ENCODER: GIB // 4, Role.DIFFUSION_MODEL: 2 * GIB, Role.VAE: 3 * GIB // 2}


@dataclass(frozen=True, slots=True)
class Sizes:
    """One model: GiB of its components when resident, and bytes on the bus per resident byte."""

    text_encoder: float
    diffusion_model: float
    vae: float
    text_ratio: float = 1.0
    diffusion_ratio: float = 1.0

    def components(self, name: str) -> tuple[ComponentSpec, ...]:
        """Return the specs of text encoder, diffusion model and VAE."""
        parts = (
            (Role.TEXT_ENCODER, self.text_encoder, self.text_ratio),
            (Role.DIFFUSION_MODEL, self.diffusion_model, self.diffusion_ratio),
            (Role.VAE, self.vae, 1.0),
        )
        return tuple(
            ComponentSpec(ComponentKey(f"{name}/{role.value}"), role, round(size * GIB), round(size * GIB * ratio))
            for role, size, ratio in parts
        )


#: typical sizes, from 2 to 31 GiB; half of the large ones are stored in 8 bits or fewer
MODELS = (
    Sizes(0.23, 1.6, 0.16),
    Sizes(0.23, 1.6, 0.16, 1.0, 0.5),
    Sizes(1.3, 2.4, 0.2),
    Sizes(1.5, 4.8, 0.16),
    Sizes(1.5, 4.8, 0.16, 1.0, 0.5),
    Sizes(2.6, 7.0, 0.25, 0.5, 1.0),
    Sizes(2.0, 9.0, 0.2, 0.3, 0.3),
    Sizes(9.1, 4.1, 0.16),
    Sizes(4.0, 12.0, 0.5, 1.0, 0.5),
    Sizes(4.7, 15.0, 0.3, 1.0, 0.5),
    Sizes(9.1, 11.3, 0.16, 0.5, 0.3),
    Sizes(9.1, 22.2, 0.16, 0.5, 0.5),
)
COMPONENTS = tuple(sizes.components(f"model-{n}") for n, sizes in enumerate(MODELS))
SPECS = {spec.key: spec for parts in COMPONENTS for spec in parts}
MODEL_OF = {spec.key: parts for parts in COMPONENTS for spec in parts}
#: room for 3 of the 12 models on average, in addition to the largest activations
WEIGHTS_BYTES = sum(spec.weight_bytes for spec in SPECS.values()) * 3 // len(MODELS)
CAPACITY_BYTES = WEIGHTS_BYTES + ACTIVATION_BYTES[Role.DIFFUSION_MODEL] + SCRATCH_BYTES


@dataclass(frozen=True, slots=True)
class Task:
    """One stage of one image."""

    use: ComponentUse
    activation_bytes: int

    @property
    def spec(self) -> ComponentSpec:
        """The spec of its component."""
        return SPECS[self.use.component]

    @property
    def room_bytes(self) -> int:
        """Memory for weights while it runs."""
        return CAPACITY_BYTES - needed_bytes((self.use,), self.activation_bytes)


def task(spec: ComponentSpec) -> Task:
    """Return the task that uses this component."""
    passes = STEPS if spec.role is Role.DIFFUSION_MODEL else 1
    return Task(ComponentUse(spec.key, SCRATCH_BYTES, passes=passes), ACTIVATION_BYTES[spec.role])


# ---------------------------------------------------------------------------------------------------------- requests


def zipf(rng: Random) -> Iterator[int]:
    """Yield models by popularity, independently for each image."""
    ranks = rng.sample(range(len(MODELS)), len(MODELS))
    while True:
        yield rng.choices(ranks, zipf_weights(len(MODELS)))[0]


def bursts(rng: Random) -> Iterator[int]:
    """Yield 1 to 8 images of one model in a row, models by popularity."""
    for model in zipf(rng):
        yield from [model] * rng.randint(1, 8)


def phases(rng: Random) -> Iterator[int]:
    """Yield 40 images of 4 models by popularity, then 40 images of 4 newly drawn models, and so on."""
    while True:
        yield from rng.choices(rng.sample(range(len(MODELS)), 4), zipf_weights(4), k=40)


MIXES: Mapping[str, Callable[[Random], Iterator[int]]] = {"zipf": zipf, "bursts": bursts, "phases": phases}


def sequence(mix: str, seed: int, jobs: int) -> list[Task]:
    """Return the tasks of `jobs` images in sequence."""
    models = MIXES[mix](Random(f"{mix} {seed}"))
    return [task(spec) for _, model in zip(range(jobs), models, strict=False) for spec in COMPONENTS[model]]


# ---------------------------------------------------------------------------------------------------------- policies


def ours(tasks: Sequence[Task], look_ahead: int) -> int:
    """Return the bytes moved by `pool.weights.plan.eviction_plan.plan` with the next `look_ahead` tasks known."""
    now, moved_bytes = Residency(CAPACITY_BYTES), 0
    for number, each in enumerate(tasks):
        hints = NO_HINTS
        if look_ahead:
            preload_request = tasks[number + 1 : number + 1 + look_ahead]
            hints = EvictionHints(tuple(dict.fromkeys(t.use.component for t in preload_request)))
        moves = plan(now, (each.use,), SPECS, each.activation_bytes, hints=hints)
        moved_bytes += moves.upload_bytes + moves.streamed_bytes
        now = moves.after
    return moved_bytes


def least_recently_used(tasks: Sequence[Task], group: Callable[[ComponentSpec], Sequence[ComponentSpec]]) -> int:
    """Return the bytes moved if groups of components are loaded and evicted completely, least recently used first."""
    there: dict[ComponentKey, Sequence[ComponentSpec]] = {}
    moved_bytes = 0
    for each in tasks:
        wanted = group(each.spec)
        name = wanted[0].key
        if name not in there:
            moved_bytes += sum(spec.upload_bytes for spec in wanted)
        there[name] = there.pop(name, wanted)  # most recently used
        while len(there) > 1 and sum(s.weight_bytes for held in there.values() for s in held) > each.room_bytes:
            del there[next(iter(there))]
    return moved_bytes


#: memory that upstream keeps free at least while a model runs
LEAST_INFERENCE_BYTES = int(0.8 * GIB)
#: factor on the bytes to load, in the memory that is freed for them
SPARE = 1.1


def upstream(tasks: Sequence[Task]) -> float:
    """Return the bytes moved with upstream's eviction order: partly offloaded components first, then small ones, then
    the last loaded. Frees only the missing memory, for a tenth more than is to be loaded. The rest streams.

    Models upstream's memory management with nothing else in the process, so that reference counts are equal.
    """
    there: dict[ComponentKey, float] = {}  # resident bytes, the last loaded first
    moved_bytes = 0.0
    for each in tasks:
        key, size = each.use.component, each.spec.weight_bytes
        loaded = there.pop(key, 0.0)
        extra = max(LEAST_INFERENCE_BYTES, each.activation_bytes + SCRATCH_BYTES)
        required = (size - loaded) * SPARE + extra
        order = sorted(
            (there[k] - SPECS[k].weight_bytes, SPECS[k].weight_bytes, index, k) for index, k in enumerate(there)
        )
        for *_, other in order:
            missing = required - (CAPACITY_BYTES - loaded - sum(there.values()))
            if missing < 0:
                break
            there[other] -= min(missing, there[other])
            if not there[other]:
                del there[other]
        target = min(size, max(loaded, CAPACITY_BYTES - sum(there.values()) - extra))
        price = each.spec.upload_bytes / size
        moved_bytes += price * (target - loaded + (size - target) * each.use.passes)
        there = {key: target, **there}
    return moved_bytes


POLICIES: Mapping[str, Callable[[Sequence[Task]], float]] = {
    "this plan, next 8 tasks known": lambda tasks: ours(tasks, 8),
    "this plan, next 32 tasks known": lambda tasks: ours(tasks, 32),
    "this plan, all tasks known": lambda tasks: ours(tasks, len(tasks)),
    "this plan, nothing known": lambda tasks: ours(tasks, 0),
    "whole components, least recently used": lambda tasks: least_recently_used(tasks, lambda spec: (spec,)),
    "upstream's order": upstream,
    "whole models, least recently used": lambda tasks: least_recently_used(tasks, lambda spec: MODEL_OF[spec.key]),
}


def main(jobs: int = 250, seeds: int = 7) -> None:
    """Measure and print the table for RESULTS.md: bytes as multiples of the lower bound."""
    runs = {mix: [sequence(mix, seed, jobs) for seed in range(seeds)] for mix in MIXES}
    least = {mix: [_least(tasks) for tasks in held] for mix, held in runs.items()}
    print(f"{len(MODELS)} models, {jobs} images, {seeds} seeds; {WEIGHTS_BYTES / GIB:.1f} GiB for weights")
    print("| bytes over the bus / lower bound: median (minimum - maximum) |", " | ".join(runs), "| all |")
    print("|---" * (len(runs) + 2) + "|")
    for name, policy in POLICIES.items():
        ratios = {
            mix: [policy(tasks) / low for tasks, low in zip(held, least[mix], strict=True)]
            for mix, held in runs.items()
        }
        assert all(ratio > 1 - 1e-6 for held in ratios.values() for ratio in held), f"{name} is below the lower bound"
        print(f"| {name} |", " | ".join(_spread(v) for v in (*ratios.values(), [*chain(*ratios.values())])), "|")
    cells = [f"{statistics.median(low) / GIB:.0f} GiB" for low in least.values()]
    print("| lower bound |", " | ".join(cells), "| |")
    print(f"one plan: {_plan_microseconds(runs['zipf'][0], 0):.0f} us, ", end="")
    print(f"with the next 32 tasks known {_plan_microseconds(runs['zipf'][0], 32):.0f} us")
    loaded = sorted(name for name in ("torch", "ray") if name in sys.modules)
    assert not loaded, f"{loaded} were imported"


def _least(tasks: Sequence[Task]) -> float:
    return least_bus_bytes([Request(t.use.component, t.use.passes, t.room_bytes) for t in tasks], SPECS)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def _plan_microseconds(tasks: Sequence[Task], look_ahead: int) -> float:
    """Return the CPU microseconds of planning one task, including its hints."""
    began = time.process_time()
    ours(tasks, look_ahead)
    return (time.process_time() - began) / len(tasks) * 1e6


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
