"""How simulated workers keep their memory: each rule on sequences worked out by hand, and what holds for them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.specs.eviction_hints import NO_HINTS
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role, WorkerId
from modelpool.pool.weights.plan.eviction_plan import Residency
from modelpool.scheduler.simulator.eviction_policies import (
    EvictionQuery,
    KnownFuture,
    NothingLoads,
    PlannedMemory,
    WholeComponents,
    WholeModels,
    WorkerMemory,
)

WORKER = WorkerId("g0")
Specs = dict[ComponentKey, ComponentSpec]


def sizes(**parts: int) -> Specs:
    """Of components "a/d", "a/t", ...: d is a diffusion model, t a text encoder."""
    roles = {"d": Role.DIFFUSION_MODEL, "t": Role.TEXT_ENCODER}
    keys = {ComponentKey(name.replace("_", "/")): size for name, size in parts.items()}
    return {key: ComponentSpec(key, roles[key[-1]], size, size) for key, size in keys.items()}


def use(key: str, passes: int = 4) -> ComponentUse:
    return ComponentUse(ComponentKey(key), 0, passes=passes)


def play(
    memory: WorkerMemory, specs: Specs, capacity_bytes: int, runs: Sequence[str], activation_bytes: int = 0
) -> list[tuple[int, str]]:
    """Runs of one component each: bytes uploaded, and the residents afterwards, the longest unused first."""
    now, seen = Residency(capacity_bytes), []
    for key in runs:
        moves = memory.moves(EvictionQuery(WORKER, now, (use(key),), activation_bytes, NO_HINTS), specs)
        now = moves.after
        seen.append((moves.upload_bytes, " ".join(e.component for e in now.entries)))
    return seen


def test_whole_components_leave_the_longest_unused_first() -> None:
    """c needs 3 bytes and 1 is free: a (4) leaves whole, though 2 would do."""
    specs = sizes(a_d=4, b_d=5, c_d=3)
    assert play(WholeComponents(), specs, 10, ["a/d", "b/d", "c/d", "b/d", "a/d"]) == [
        (4, "a/d"),
        (5, "a/d b/d"),
        (3, "b/d c/d"),
        (0, "c/d b/d"),
        (4, "b/d a/d"),
    ]


def test_whole_components_stream_only_what_can_never_fit() -> None:
    """12 bytes on 10: all else leaves, 10 are loaded and 2 stream in each of 4 passes."""
    specs = sizes(a_d=4, b_d=12)
    query = EvictionQuery(WORKER, Residency(10), (use("a/d"),), 0, NO_HINTS)
    now = WholeComponents().moves(query, specs).after
    moves = WholeComponents().moves(EvictionQuery(WORKER, now, (use("b/d"),), 0, NO_HINTS), specs)
    assert (moves.upload_bytes, moves.streamed_bytes, moves.evicted_bytes) == (10, 8, 4)


def test_whole_models_go_by_count() -> None:
    """Two at most: with the third diffusion model the first leaves with its text encoder, though all would fit."""
    specs = sizes(a_t=1, a_d=4, b_d=4, c_t=1, c_d=4)
    assert play(WholeModels(2), specs, 100, ["a/t", "a/d", "b/d", "c/t", "c/d", "b/d", "a/t", "a/d"]) == [
        (1, "a/t"),
        (4, "a/t a/d"),
        (4, "a/t a/d b/d"),
        (1, "a/t a/d b/d c/t"),
        (4, "b/d c/t c/d"),
        (0, "c/t c/d b/d"),
        (1, "c/t c/d b/d a/t"),
        (4, "b/d a/t a/d"),
    ]


def test_whole_models_leave_for_bytes_too_and_their_own_parts_last() -> None:
    specs = sizes(a_t=2, a_d=4, b_d=4)
    assert play(WholeModels(3), specs, 8, ["a/t", "a/d", "b/d"])[-1] == (4, "b/d")
    assert play(WholeModels(3), specs, 5, ["a/t", "a/d"])[-1] == (4, "a/d")


def test_a_known_future_keeps_what_comes_next() -> None:
    """Belady on two places: a b c a b c ... Least recently used misses every time, he every other time."""
    specs = sizes(a_d=1, b_d=1, c_d=1)
    runs = ["a/d", "b/d", "c/d"] * 4
    memory = KnownFuture()
    memory.expect(WORKER, [(ComponentKey(key),) for key in runs])
    known = [moved for moved, _ in play(memory, specs, 2, runs)]
    assert known == [1, 1, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert [moved for moved, _ in play(WholeComponents(), specs, 2, runs)] == [1] * 12


def test_nothing_loads_moves_nothing_and_still_needs_room_to_compute() -> None:
    specs = sizes(a_d=50)
    assert play(NothingLoads(), specs, 10, ["a/d", "a/d"], activation_bytes=10) == [(0, ""), (0, "")]
    with pytest.raises(ValueError, match="10"):
        play(NothingLoads(), specs, 10, ["a/d"], activation_bytes=11)


KEYS = ["a/d", "a/t", "b/d", "b/t", "c/d", "c/t"]
MEMORIES: dict[str, Callable[[], WorkerMemory]] = {
    "planned": PlannedMemory,
    "whole components": WholeComponents,
    "one model": lambda: WholeModels(1),
    "three models": WholeModels,
    "known future": KnownFuture,
}


@pytest.mark.parametrize("name", sorted(MEMORIES))
@given(
    st.lists(st.integers(1, 9), min_size=6, max_size=6),
    st.integers(8, 30),
    st.lists(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True), max_size=20),
)
def test_every_memory_keeps_the_budget(name: str, weights: list[int], capacity: int, runs: list[list[str]]) -> None:
    """Weights and activations fit, what the task uses is there as far as it can be, and bytes do not appear."""
    specs = {
        ComponentKey(key): ComponentSpec(
            ComponentKey(key), Role.DIFFUSION_MODEL if key[-1] == "d" else Role.TEXT_ENCODER, size, size
        )
        for key, size in zip(KEYS, weights, strict=True)
    }
    memory = MEMORIES[name]()
    if isinstance(memory, KnownFuture):
        memory.expect(WORKER, [tuple(map(ComponentKey, run)) for run in runs])
    now, activation_bytes = Residency(capacity), 5
    for run in runs:
        uses = tuple(use(key) for key in run)
        moves = memory.moves(EvictionQuery(WORKER, now, uses, activation_bytes, NO_HINTS), specs)
        after = moves.after
        assert after.used_bytes <= capacity - activation_bytes
        wanted_bytes = min(capacity - activation_bytes, sum(specs[u.component].weight_bytes for u in uses))
        held_bytes = sum(e.resident_bytes for e in after.entries if e.component in run)
        assert held_bytes == wanted_bytes
        assert after.used_bytes == now.used_bytes + moves.upload_bytes - moves.evicted_bytes
        now = after
