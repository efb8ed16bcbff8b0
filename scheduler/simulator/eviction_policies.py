"""How a simulated worker keeps its memory: what leaves when a task needs room. One class for each way there is.

All of them move bytes by `pool.plan.residency.plan`, so that they are charged alike; the others than ours only say
beforehand which whole components have to go. Know no time and no link: see `scheduler.simulator.machines`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from modelpool.pool.plan.residency import Move, Residency, ResidencyPlan, Resident, needed_bytes, plan
from modelpool.pool.specs.outlook import Outlook
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, Role, WorkerId
from modelpool.pool.specs.spec import ComponentUse as Use
from modelpool.scheduler.simulator.records import model_name

Specs = Mapping[ComponentKey, ComponentSpec]


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """A task that is about to run on a worker, on which no other runs.

    now      what is on the GPU, least recently used first
    outlook  what the command says about the time after
    """

    worker_id: WorkerId
    now: Residency
    uses: tuple[Use, ...]
    activation_bytes: int
    outlook: Outlook


class WorkerMemory(Protocol):
    """Decides what moves so that a task can run."""

    def moves(self, question: MemoryQuestion, specs: Specs) -> ResidencyPlan:
        """What is to move. Called once a run, in the order of the runs. Raises DoesNotFit."""


class PlannedMemory:
    """As the workers of this pool do: bytes of many components, the least valuable first, hints heeded."""

    def moves(self, question: MemoryQuestion, specs: Specs) -> ResidencyPlan:
        """What `pool.plan.residency.plan` says."""
        return plan(question.now, question.uses, specs, question.activation_bytes, outlook=question.outlook)


class WholeComponents:
    """Least recently used first, whole components; hints are not read.

    A component is loaded whole; what streams is only what could not fit on an empty GPU.
    """

    def moves(self, question: MemoryQuestion, specs: Specs) -> ResidencyPlan:
        """Components leave from the longest unused on until there is room."""
        leaving = [(entry.component,) for entry in _others(question)]
        return _without(question, specs, leaving, 0)


@dataclass(frozen=True, slots=True)
class WholeModels:
    """At most `most_models` diffusion models with what belongs to them, least recently used first, whole models.

    What belongs to a model is told by its name in the key. Components are loaded when a task needs them. Bytes still
    bound what is there: where fewer models fit, fewer stay, and parts of the task's own model leave last.
    Ray Serve's `multiplexed` counts so (`max_num_models_per_replica`, default 3) and knows no bytes; that memory does
    not overflow is given to it here.
    """

    most_models: int = 3

    def moves(self, question: MemoryQuestion, specs: Specs) -> ResidencyPlan:
        """Models leave until the count holds, then until there is room."""
        own = {model_name(use.component) for use in question.uses}
        models: dict[str, list[ComponentKey]] = {}
        for entry in _others(question):
            name = model_name(entry.component)
            # a model is as old as its youngest part
            models[name] = [*models.pop(name, []), entry.component]
        own_parts = [(key,) for name in own for key in models.pop(name, [])]
        counted = [name for name, keys in models.items() if any(_is_diffusion(key, specs) for key in keys)]
        brings = any(_is_diffusion(use.component, specs) for use in question.uses)
        kept = any(_is_diffusion(key, specs) for (key,) in own_parts)
        too_many = max(0, len(counted) + (brings or kept) - self.most_models)
        first = set(counted[:too_many])
        leaving = [tuple(keys) for name, keys in models.items() if name in first]
        leaving += [tuple(keys) for name, keys in models.items() if name not in first]
        return _without(question, specs, [*leaving, *own_parts], too_many)


@dataclass(slots=True)
class KnownFuture:
    """A memory that was told every run to come on its GPU: what is needed last leaves first (Belady).

    `expect` tells, and the runs must come in the order that was told. Bytes leave, not whole components.
    """

    _coming: dict[WorkerId, dict[ComponentKey, list[int]]] = field(default_factory=dict)
    _told: dict[WorkerId, int] = field(default_factory=dict)
    _done: dict[WorkerId, int] = field(default_factory=dict)

    def expect(self, worker_id: WorkerId, sequence: Iterable[Sequence[ComponentKey]]) -> None:
        """These runs come after all those that were told before: the components of each."""
        coming = self._coming.setdefault(worker_id, {})
        for components in sequence:
            place = self._told.get(worker_id, 0)
            self._told[worker_id] = place + 1
            for key in components:
                coming.setdefault(key, []).append(place)

    def moves(self, question: MemoryQuestion, specs: Specs) -> ResidencyPlan:
        """What `pool.plan.residency.plan` says when it knows the order in which what is there is needed again."""
        worker_id = question.worker_id
        after = self._done[worker_id] = self._done.get(worker_id, 0) + 1
        coming = self._coming.get(worker_id, {})
        places: list[tuple[int, ComponentKey]] = []
        for key in dict.fromkeys([*[e.component for e in question.now.entries], *[u.component for u in question.uses]]):
            needed = coming.get(key, [])
            index = bisect_left(needed, after)
            if index < len(needed):
                places.append((needed[index], key))
        outlook = replace(question.outlook, needed_next=tuple(key for _, key in sorted(places)))
        return plan(question.now, question.uses, specs, question.activation_bytes, outlook=outlook)


class NothingLoads:
    """Everything is always there, with whatever patches are wanted. For bounds only: it holds more than any GPU."""

    def moves(self, question: MemoryQuestion, specs: Specs) -> ResidencyPlan:
        """Nothing moves, ever. Raises DoesNotFit where the activations alone are too much."""
        plan(Residency(question.now.capacity_bytes), question.uses, specs, question.activation_bytes)
        return ResidencyPlan((), (), (), question.now, 0)


def _others(question: MemoryQuestion) -> list[Resident]:
    used = {use.component for use in question.uses}
    return [entry for entry in question.now.entries if entry.component not in used]


def _is_diffusion(key: ComponentKey, specs: Specs) -> bool:
    spec = specs.get(key)
    return spec is not None and spec.role is Role.DIFFUSION_MODEL


def _without(
    question: MemoryQuestion, specs: Specs, leaving: Sequence[tuple[ComponentKey, ...]], at_least: int
) -> ResidencyPlan:
    """The plan after groups of components have left, in this order: `at_least` so many, and until there is room."""
    now, uses = question.now, question.uses
    room_bytes = now.capacity_bytes - needed_bytes(uses, question.activation_bytes)
    own_bytes = min(max(0, room_bytes), sum(specs[use.component].weight_bytes for use in uses))
    sizes = {entry.component: entry.resident_bytes for entry in _others(question)}
    missing_bytes = sum(sizes.values()) + own_bytes - room_bytes
    gone: dict[ComponentKey, int] = {}
    for number, group in enumerate(leaving):
        if number >= at_least and missing_bytes <= 0:
            break
        for key in group:
            gone[key] = sizes[key]
            missing_bytes -= sizes[key]
    kept = Residency(now.capacity_bytes, tuple(e for e in now.entries if e.component not in gone))
    moves = plan(kept, uses, specs, question.activation_bytes)
    return replace(moves, evict=(*[Move(key, size) for key, size in gone.items()], *moves.evict))
