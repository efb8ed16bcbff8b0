"""What may move beside a run: a pure function over sizes.

Proves: the run keeps all it holds, with its margin; only what the coming task's plan would let leave does, and no more
than is needed; what arrives is what that plan would have there, the largest first; a task that comes afterwards never
uploads more for what was brought, and all of it is there when there was room; figures of half the way are between.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.specs.eviction_hints import EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.plan.eviction_plan import Residency, Resident, needed_bytes, plan
from modelpool.pool.weights.plan.preload_plan import MARGIN_PART, NOTHING_TO_PRELOAD, RunningLease, plan_preload

KEYS = [ComponentKey(name) for name in "abcdef"]


def spec(key: ComponentKey, weight_bytes: int, stored: float = 1.0) -> ComponentSpec:
    return ComponentSpec(key, Role.DIFFUSION_MODEL, weight_bytes, max(1, int(weight_bytes * stored)))


def use(key: ComponentKey, digest: str = "", patched_bytes: int = 0, scratch_bytes: int = 2) -> ComponentUse:
    return ComponentUse(key, scratch_bytes, digest, patched_bytes, passes=4)


SPECS = {key: spec(key, 10) for key in KEYS}


def test_what_fits_beside_the_run_arrives_and_nothing_leaves() -> None:
    now = Residency(100, (Resident(KEYS[0], 10),))
    ahead = plan_preload(now, RunningLease(frozenset(KEYS[:1]), 16), [use(KEYS[1])], SPECS, 16)
    assert (ahead.evict, ahead.upload_bytes) == ((), 10)
    assert ahead.after(now).entries == (Resident(KEYS[0], 10), Resident(KEYS[1], 10))


def test_what_nobody_needs_makes_way_and_no_more_of_it_than_is_needed() -> None:
    now = Residency(50, tuple(Resident(key, 10) for key in KEYS[:3]))
    hints = EvictionHints((KEYS[0],))
    ahead = plan_preload(now, RunningLease(frozenset(KEYS[2:3]), 8), [use(KEYS[3])], SPECS, 16, hints)
    assert [(move.component, move.bytes) for move in ahead.evict] == [(KEYS[1], 1)], "not the eight that would leave"
    assert ahead.upload_bytes == 10
    assert ahead.after(now).of(KEYS[0]) == now.of(KEYS[0])


def test_what_the_run_holds_stays_and_the_rest_waits_for_its_turn() -> None:
    """The coming plan would take from what runs now: that cannot leave yet, so only a part arrives."""
    now = Residency(40, (Resident(KEYS[0], 10),))
    ahead = plan_preload(
        now, RunningLease(frozenset(KEYS[:1]), 16), [use(KEYS[1])], {**SPECS, KEYS[1]: spec(KEYS[1], 30)}, 8
    )
    assert ahead.evict == ()
    assert ahead.upload_bytes == 40 - 10 - 16 - 16 // MARGIN_PART - 2


def test_what_runs_now_is_not_patched_anew() -> None:
    now = Residency(100, (Resident(KEYS[0], 10, "x", 4),))
    held = RunningLease(frozenset(KEYS[:1]), 16)
    assert plan_preload(now, held, [use(KEYS[0], "y", 4)], SPECS, 16) == NOTHING_TO_PRELOAD


def test_other_patches_bring_what_they_touch() -> None:
    now = Residency(100, (Resident(KEYS[0], 10), Resident(KEYS[1], 10, "x", 4)))
    ahead = plan_preload(now, RunningLease(frozenset(KEYS[:1]), 16), [use(KEYS[1], "y", 3)], SPECS, 16)
    assert ahead.upload_bytes == 7
    assert ahead.after(now).of(KEYS[1]) == Resident(KEYS[1], 10, "y", 3)
    assert ahead.after(now, 0) == now


def test_a_task_that_does_not_fit_and_one_that_streams_bring_nothing() -> None:
    now, held = Residency(40, (Resident(KEYS[0], 10),)), RunningLease(frozenset(KEYS[:1]), 8)
    assert plan_preload(now, held, [use(KEYS[1])], SPECS, 39) == NOTHING_TO_PRELOAD
    assert plan_preload(now, held, [use(KEYS[1])], {**SPECS, KEYS[1]: spec(KEYS[1], 50)}, 8) == NOTHING_TO_PRELOAD


def test_the_largest_comes_first() -> None:
    specs = {KEYS[1]: spec(KEYS[1], 10), KEYS[2]: spec(KEYS[2], 30), KEYS[3]: spec(KEYS[3], 20)}
    ahead = plan_preload(Residency(200), RunningLease(frozenset(), 8), [use(key) for key in specs], specs, 8)
    assert [arrival.use.component for arrival in ahead.arrive] == [KEYS[2], KEYS[3], KEYS[1]]


sizes = st.integers(1, 40)
digests = st.sampled_from(["", "x", "y"])


@st.composite
def scenes(
    draw: st.DrawFn,
) -> tuple[Residency, RunningLease, list[ComponentUse], dict[ComponentKey, ComponentSpec], int]:
    specs = {key: spec(key, draw(sizes), draw(st.sampled_from([0.5, 1.0, 2.0]))) for key in KEYS}
    entries = []
    for key in draw(st.permutations(KEYS)):
        there_bytes = draw(st.integers(0, specs[key].weight_bytes))
        digest = draw(digests)
        if there_bytes:
            patched_bytes = draw(st.integers(1, specs[key].weight_bytes)) if digest else 0
            entries.append(Resident(key, there_bytes, digest, patched_bytes))
    leased = frozenset(draw(st.sets(st.sampled_from(KEYS), max_size=2)))
    run_bytes = draw(st.integers(0, 40))
    used_bytes = sum(entry.resident_bytes for entry in entries)
    capacity_bytes = used_bytes + run_bytes + draw(st.integers(0, 60))
    uses = []
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True)):
        digest = draw(digests)
        patched_bytes = draw(st.integers(1, specs[key].weight_bytes)) if digest else 0
        uses.append(use(key, digest, patched_bytes, draw(st.integers(0, 8))))
    return (
        Residency(capacity_bytes, tuple(entries)),
        RunningLease(leased, run_bytes),
        uses,
        specs,
        draw(st.integers(0, 60)),
    )


@given(scenes(), st.lists(st.sampled_from(KEYS), unique=True))
def test_the_run_keeps_what_it_holds_and_the_coming_task_gains(
    scene: tuple[Residency, RunningLease, list[ComponentUse], dict[ComponentKey, ComponentSpec], int],
    needed_next: list[ComponentKey],
) -> None:
    now, held, uses, specs, activation_bytes = scene
    hints = EvictionHints(tuple(needed_next))
    ahead = plan_preload(now, held, uses, specs, activation_bytes, hints)
    after = ahead.after(now)
    for key in held.components:
        assert after.of(key) == now.of(key), "what the run holds is as it was"
    if not ahead.arrive:
        assert ahead == NOTHING_TO_PRELOAD
        return
    margin_bytes = held.run_bytes // MARGIN_PART
    assert after.used_bytes + held.run_bytes + margin_bytes + needed_bytes(uses, 0) <= now.capacity_bytes
    coming = plan(now, uses, specs, activation_bytes, hints=hints)
    would_leave = {move.component: move.bytes for move in coming.evict}
    for move in ahead.evict:
        assert 0 < move.bytes <= would_leave[move.component]
    for arrival in ahead.arrive:
        key = arrival.use.component
        entry = after.of(key)
        assert entry is not None
        assert entry.resident_bytes == arrival.to_bytes <= specs[key].weight_bytes
        assert entry.patch_digest == arrival.use.patch_digest
        assert 0 < arrival.upload_bytes <= specs[key].upload_bytes
    uploads = [arrival.upload_bytes for arrival in ahead.arrive]
    assert ahead.upload_bytes == sum(uploads)
    part = ahead.after(now, ahead.upload_bytes // 2)
    assert part.used_bytes <= max(now.used_bytes, after.used_bytes)
    assert len({entry.component for entry in part.entries}) == len(part.entries)
    # the task itself: rounding by a byte a component apart it has no more to upload than without
    later = plan(after, uses, specs, activation_bytes, hints=hints)
    assert later.upload_bytes + later.streamed_bytes <= coming.upload_bytes + coming.streamed_bytes + 2 * len(uses)


@given(scenes())
def test_with_room_for_all_nothing_is_left_to_upload_of_what_nobody_holds(
    scene: tuple[Residency, RunningLease, list[ComponentUse], dict[ComponentKey, ComponentSpec], int],
) -> None:
    now, held, uses, specs, activation_bytes = scene
    wide = Residency(now.capacity_bytes + 1000, now.entries)
    after = plan_preload(wide, held, uses, specs, activation_bytes).after(wide)
    left = plan(after, uses, specs, activation_bytes).upload
    assert {move.component for move in left} <= held.components


def test_a_task_that_never_fits_is_no_error() -> None:
    now = Residency(10)
    with pytest.raises(DoesNotFit):
        plan(now, [use(KEYS[0])], SPECS, 100)
    assert plan_preload(now, RunningLease(frozenset(), 0), [use(KEYS[0])], SPECS, 100) == NOTHING_TO_PRELOAD
