"""Eviction policies of simulated workers, one class each.

All of them move bytes with `pool.weights.plan.eviction_plan.plan`, so that costs are equal; all except the default only
select in advance which complete components leave. Know neither time nor link: see `scheduler.simulator.machines`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, Role, WorkerId
from modelpool.pool.values.specs.spec import ComponentUse as Use
from modelpool.pool.weights.plan.eviction_plan import Move, Residency, ResidencyPlan, Resident, needed_bytes, plan
from modelpool.scheduler.simulator.records import model_name

Specs = Mapping[ComponentKey, ComponentSpec]


@dataclass(frozen=True, slots=True)
class EvictionQuery:
    """A task that is about to run on an otherwise idle worker.

    now      the current residency, least recently used first
    outlook  the eviction hints of the command
    """

    worker_id: WorkerId
    now: Residency
    uses: tuple[Use, ...]
    activation_bytes: int
    hints: EvictionHints


class WorkerMemory(Protocol):
    """Decides which bytes move so that a task can run."""

    def moves(self, query: EvictionQuery, specs: Specs) -> ResidencyPlan:
        """Return the moves. Called once per run, in the order of the runs. Raises DoesNotFit."""


class PlannedMemory:
    """The policy of this pool's workers: evicts bytes of many components, the least valuable first, and uses hints."""

    def moves(self, query: EvictionQuery, specs: Specs) -> ResidencyPlan:
        """The result of `pool.weights.plan.eviction_plan.plan`."""
        return plan(query.now, query.uses, specs, query.activation_bytes, hints=query.hints)


class WholeComponents:
    """LRU eviction of complete components; ignores hints.

    A component is loaded completely; it streams only if it could not fit on an empty GPU.
    """

    def moves(self, query: EvictionQuery, specs: Specs) -> ResidencyPlan:
        """Evict the least recently used components until there is room."""
        leaving = [(entry.component,) for entry in _others(query)]
        return _without(query, specs, leaving, 0)


@dataclass(frozen=True, slots=True)
class WholeModels:
    """LRU eviction of complete models: at most `most_models` diffusion models with their other components.

    The model of a component is the model name in its key. Components are loaded when a task needs them. Memory is still
    bounded: if fewer models fit, fewer stay, and parts of the task's model are evicted last. Ray Serve's `multiplexed`
    counts models like this (`max_num_models_per_replica`, default 3) and ignores bytes; avoiding overflow is an
    advantage granted to it here.
    """

    most_models: int = 3

    def moves(self, query: EvictionQuery, specs: Specs) -> ResidencyPlan:
        """Evict models until the count holds, then until there is room."""
        current = {model_name(use.component) for use in query.uses}
        models: dict[str, list[ComponentKey]] = {}
        for entry in _others(query):
            name = model_name(entry.component)
            # a model is as old as its most recently used part
            models[name] = [*models.pop(name, []), entry.component]
        current_parts = [(key,) for name in current for key in models.pop(name, [])]
        counted = [name for name, keys in models.items() if any(_is_diffusion(key, specs) for key in keys)]
        brings = any(_is_diffusion(use.component, specs) for use in query.uses)
        kept = any(_is_diffusion(key, specs) for (key,) in current_parts)
        too_many = max(0, len(counted) + (brings or kept) - self.most_models)
        first = set(counted[:too_many])
        leaving = [tuple(keys) for name, keys in models.items() if name in first]
        leaving += [tuple(keys) for name, keys in models.items() if name not in first]
        return _without(query, specs, [*leaving, *current_parts], too_many)


@dataclass(slots=True)
class KnownFuture:
    """Belady's optimal eviction: all later runs on the GPU are known; bytes that are needed last are evicted first.

    `expect` announces the runs, which must come in that order. Evicts bytes, not complete components.
    """

    _coming: dict[WorkerId, dict[ComponentKey, list[int]]] = field(default_factory=dict)
    _announced: dict[WorkerId, int] = field(default_factory=dict)
    _done: dict[WorkerId, int] = field(default_factory=dict)

    def expect(self, worker_id: WorkerId, sequence: Iterable[Sequence[ComponentKey]]) -> None:
        """Announce further runs after all earlier ones: the components of each."""
        coming = self._coming.setdefault(worker_id, {})
        for components in sequence:
            place = self._announced.get(worker_id, 0)
            self._announced[worker_id] = place + 1
            for key in components:
                coming.setdefault(key, []).append(place)

    def moves(self, query: EvictionQuery, specs: Specs) -> ResidencyPlan:
        """The result of `pool.weights.plan.eviction_plan.plan` with the true order of the next uses."""
        worker_id = query.worker_id
        after = self._done[worker_id] = self._done.get(worker_id, 0) + 1
        coming = self._coming.get(worker_id, {})
        places: list[tuple[int, ComponentKey]] = []
        for key in dict.fromkeys([*[e.component for e in query.now.entries], *[u.component for u in query.uses]]):
            needed = coming.get(key, [])
            index = bisect_left(needed, after)
            if index < len(needed):
                places.append((needed[index], key))
        hints = replace(query.hints, needed_next=tuple(key for _, key in sorted(places)))
        return plan(query.now, query.uses, specs, query.activation_bytes, hints=hints)


class NothingLoads:
    """Everything is always resident with any patches. For bounds only: it holds more than any GPU."""

    def moves(self, query: EvictionQuery, specs: Specs) -> ResidencyPlan:
        """Return no moves. Raises DoesNotFit if the activations alone do not fit."""
        plan(Residency(query.now.capacity_bytes), query.uses, specs, query.activation_bytes)
        return ResidencyPlan((), (), (), query.now, 0)


def _others(query: EvictionQuery) -> list[Resident]:
    used = {use.component for use in query.uses}
    return [entry for entry in query.now.entries if entry.component not in used]


def _is_diffusion(key: ComponentKey, specs: Specs) -> bool:
    spec = specs.get(key)
    return spec is not None and spec.role is Role.DIFFUSION_MODEL


def _without(
    query: EvictionQuery, specs: Specs, leaving: Sequence[tuple[ComponentKey, ...]], at_least: int
) -> ResidencyPlan:
    """The plan after evicting groups of components in this order: at least `at_least`, and until there is room."""
    now, uses = query.now, query.uses
    room_bytes = now.capacity_bytes - needed_bytes(uses, query.activation_bytes)
    current_bytes = min(max(0, room_bytes), sum(specs[use.component].weight_bytes for use in uses))
    sizes = {entry.component: entry.resident_bytes for entry in _others(query)}
    missing_bytes = sum(sizes.values()) + current_bytes - room_bytes
    gone: dict[ComponentKey, int] = {}
    for number, group in enumerate(leaving):
        if number >= at_least and missing_bytes <= 0:
            break
        for key in group:
            gone[key] = sizes[key]
            missing_bytes -= sizes[key]
    kept = Residency(now.capacity_bytes, tuple(e for e in now.entries if e.component not in gone))
    moves = plan(kept, uses, specs, query.activation_bytes)
    return replace(moves, evict=(*[Move(key, size) for key, size in gone.items()], *moves.evict))
