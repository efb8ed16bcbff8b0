"""`plan` keeps the budget, lose no byte, move nothing twice and never touch leased bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.values.core.errors import DoesNotFit
from modelpool.pool.values.specs.eviction_hints import NO_HINTS, EvictionHints
from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.plan.eviction_plan import YOUTH_PART, Residency, ResidencyPlan, Resident, needed_bytes, plan
from modelpool.pool.weights.plan.residency_reasons import explain

KEYS = [ComponentKey(f"c{number}") for number in range(5)]
DIGESTS = st.sampled_from(["", "x", "y"])
Case = tuple[dict[ComponentKey, ComponentSpec], Residency, tuple[ComponentUse, ...], int]


@st.composite
def cases(draw: st.DrawFn, equal_prices: bool = False) -> Case:
    """Components, their resident bytes, and a task that uses some."""
    specs = {}
    for key in draw(st.permutations(KEYS)):
        weight_bytes = draw(st.integers(1, 30))
        upload_bytes = weight_bytes if equal_prices else draw(st.integers(1, 30))
        specs[key] = ComponentSpec(key, Role.VAE, weight_bytes, upload_bytes)
    capacity_bytes = draw(st.integers(1, 80))
    left_bytes, entries = capacity_bytes, []
    for key, spec in specs.items():
        part = draw(st.integers(0, min(left_bytes, spec.weight_bytes)))
        if part:
            entries.append(Resident(key, part, draw(DIGESTS), draw(st.integers(0, 8))))
            left_bytes -= part
    used = draw(st.lists(st.sampled_from(KEYS), max_size=3, unique=True))
    uses = tuple(
        ComponentUse(key, draw(st.integers(0, 6)), draw(DIGESTS), draw(st.integers(0, 8)), draw(st.integers(1, 4)))
        for key in used
    )
    return specs, Residency(capacity_bytes, tuple(entries)), uses, draw(st.integers(0, 20))


LEASED = st.frozensets(st.sampled_from(KEYS), max_size=2)


@st.composite
def outlooks(draw: st.DrawFn) -> EvictionHints:
    """Some components are expected, some are to stay, some matter more or less."""
    expected = draw(st.lists(st.sampled_from(KEYS), unique=True))
    pinned_bytes = draw(st.dictionaries(st.sampled_from(KEYS), st.integers(0, 12), max_size=2))
    priorities = draw(st.dictionaries(st.sampled_from(KEYS), st.integers(-1, 1), max_size=3))
    return EvictionHints(tuple(expected), pinned_bytes, priorities)


OUTLOOKS = st.one_of(st.just(NO_HINTS), outlooks())


def planned(
    case: Case, leased: frozenset[ComponentKey] = frozenset(), hints: EvictionHints = NO_HINTS
) -> ResidencyPlan | None:
    specs, now, uses, activation_bytes = case
    try:
        return plan(now, uses, specs, activation_bytes, leased, hints)
    except DoesNotFit:
        return None


def resident_bytes(residency: Residency, key: ComponentKey) -> int:
    entry = residency.of(key)
    return 0 if entry is None else entry.resident_bytes


@given(cases(), LEASED, OUTLOOKS)
def test_the_budget_holds_with_activations_and_the_largest_scratch(case, leased, hints) -> None:
    moves = planned(case, leased, hints)
    if moves is not None:
        _, now, uses, activation_bytes = case
        assert moves.after.used_bytes + needed_bytes(uses, activation_bytes) <= now.capacity_bytes
        assert moves.after.capacity_bytes == now.capacity_bytes


@given(cases(), LEASED, OUTLOOKS)
def test_no_byte_is_lost_or_invented(case, leased, hints) -> None:
    """Bytes before, less evicted ones, plus arriving ones, are the bytes afterwards: by component."""
    moves = planned(case, leased, hints)
    if moves is None:
        return
    _, now, uses, _ = case
    evicted = {move.component: move.bytes for move in moves.evict}
    assert len(evicted) == len(moves.evict)
    for entry in now.entries:
        stays_bytes = entry.resident_bytes - evicted.get(entry.component, 0)
        after = moves.after.of(entry.component)
        if entry.component not in {use.component for use in uses}:
            assert (0 if after is None else after.resident_bytes) == stays_bytes >= 0
            assert after is None or replace(after, resident_bytes=entry.resident_bytes) == entry, "other patches"
        else:
            assert (0 if after is None else after.resident_bytes) >= stays_bytes >= 0
    assert all(move.bytes > 0 for move in (*moves.evict, *moves.upload))


@given(cases(), LEASED, OUTLOOKS)
def test_uploads_are_what_arrives_and_what_other_patches_touch_in_storage_bytes(case, leased, hints) -> None:
    moves = planned(case, leased, hints)
    if moves is None:
        return
    specs, now, uses, _ = case
    uploads = {move.component: move.bytes for move in moves.upload}
    assert set(uploads) <= {use.component for use in uses}
    for use in uses:
        spec, before, after = specs[use.component], now.of(use.component), moves.after.of(use.component)
        before_bytes = 0 if before is None else before.resident_bytes
        after_bytes = 0 if after is None else after.resident_bytes
        again_bytes = 0
        if before is not None and before.patch_digest != use.patch_digest:
            again_bytes = min(before_bytes, after_bytes, before.patched_bytes + use.patched_bytes)
        arriving_bytes = min(spec.weight_bytes, max(0, after_bytes - before_bytes) + again_bytes)
        exact = arriving_bytes * spec.upload_bytes / spec.weight_bytes
        assert exact <= uploads.get(use.component, 0) < exact + 1
        streamed = (spec.weight_bytes - after_bytes) * spec.upload_bytes / spec.weight_bytes
        assert moves.streamed_bytes >= streamed * use.passes
    fully = all(moves.after.of(u.component) == _whole(specs, u) for u in uses)
    assert (moves.streamed_bytes == 0) == fully


def _whole(specs, use: ComponentUse) -> Resident:
    return Resident(use.component, specs[use.component].weight_bytes, use.patch_digest, use.patched_bytes)


@given(cases(), LEASED, OUTLOOKS)
def test_a_second_plan_moves_nothing(case, leased, hints) -> None:
    moves = planned(case, leased, hints)
    if moves is not None:
        specs, _, uses, activation_bytes = case
        again = plan(moves.after, uses, specs, activation_bytes, leased, hints)
        assert (again.evict, again.upload, again.switched) == ((), (), ())
        assert set(again.after.entries) == set(moves.after.entries)
        assert again.streamed_bytes == moves.streamed_bytes


@given(cases(), LEASED, OUTLOOKS)
def test_what_is_leased_stays_as_it_is_or_grows(case, leased, hints) -> None:
    moves = planned(case, leased, hints)
    if moves is None:
        return
    _, now, uses, _ = case
    used = {use.component for use in uses}
    assert not leased & {move.component for move in moves.evict}
    assert not {entry.component for entry in now.entries} & leased & set(moves.switched)
    for entry in now.entries:
        if entry.component in leased:
            after = moves.after.of(entry.component)
            assert after is not None
            if entry.component in used:
                assert after.resident_bytes >= entry.resident_bytes
                assert after.patch_digest == entry.patch_digest
            else:
                assert after == entry


@given(cases())
def test_it_fits_exactly_when_activations_and_scratch_do(case) -> None:
    """Nothing leased: any component can be streamed whole."""
    _, now, uses, activation_bytes = case
    least_bytes = activation_bytes + max((use.scratch_bytes for use in uses), default=0)
    assert (planned(case) is not None) == (least_bytes <= now.capacity_bytes)


@given(cases(), LEASED)
def test_it_fits_beside_what_is_leased_exactly_when_that_leaves_room(case, leased) -> None:
    _, now, uses, activation_bytes = case
    held = [entry for entry in now.entries if entry.component in leased]
    digests = {use.component: use.patch_digest for use in uses}
    patched_anew = any(digests.get(entry.component, entry.patch_digest) != entry.patch_digest for entry in held)
    least_bytes = needed_bytes(uses, activation_bytes) + sum(entry.resident_bytes for entry in held)
    assert (planned(case, leased) is not None) == (least_bytes <= now.capacity_bytes and not patched_anew)


@given(cases(equal_prices=True))
def test_at_equal_prices_the_least_recently_used_goes_first_and_no_more_than_needed(case) -> None:
    """Nothing expected: of what the task does not use a tail of the order stays whole, at most one is cut, the rest is
    gone; and when anything goes, there is no room left for it."""
    moves = planned(case)
    if moves is None:
        return
    _, now, uses, activation_bytes = case
    used = {use.component for use in uses}
    others = [entry for entry in now.entries if entry.component not in used]
    stays = [resident_bytes(moves.after, entry.component) for entry in others]
    seen_partial = False
    for entry, stays_bytes in zip(others, stays, strict=True):
        assert not seen_partial or stays_bytes == entry.resident_bytes, "an earlier one was kept before a later one"
        seen_partial = seen_partial or stays_bytes > 0
    if sum(stays) < sum(entry.resident_bytes for entry in others):
        free_bytes = now.capacity_bytes - needed_bytes(uses, activation_bytes) - moves.after.used_bytes
        assert free_bytes == 0


@given(cases(), LEASED, OUTLOOKS)
def test_who_gives_way_is_who_should(case, leased, hints) -> None:
    """Any two that could give way, one that did and one that kept something: rule 3 of the module, said once more."""
    moves = planned(case, leased, hints)
    if moves is None:
        return
    specs, now, uses, activation_bytes = case
    used = {use.component for use in uses}
    lost: dict[ComponentKey, int] = {}
    kept: dict[ComponentKey, int] = {}
    ages: dict[ComponentKey, Fraction] = {}
    age_bytes = now.capacity_bytes // YOUTH_PART + 1
    for entry in reversed(now.entries):
        key, after_bytes = entry.component, resident_bytes(moves.after, entry.component)
        if key in used:
            continue
        age_bytes += entry.resident_bytes
        ages[key] = Fraction(age_bytes * specs[key].weight_bytes, specs[key].upload_bytes)
        lost[key] = entry.resident_bytes - after_bytes
        kept[key] = 0 if key in leased else after_bytes - min(after_bytes, hints.pinned_bytes.get(key, 0))
    alone = _alone(case, leased, hints)
    for use in uses:
        after_bytes = resident_bytes(moves.after, use.component)
        if use.passes == 1:
            kept[use.component] = max(0, after_bytes - resident_bytes(now, use.component))
            lost[use.component] = resident_bytes(alone.after, use.component) - after_bytes
    for goes, stays in permutations(kept, 2):
        if lost[goes] and kept[stays]:
            assert _may_go_before(goes, stays, hints, ages), (goes, stays)
    if any(lost_bytes and key not in used for key, lost_bytes in lost.items()):
        assert now.capacity_bytes == needed_bytes(uses, activation_bytes) + moves.after.used_bytes, "too much left"


def _alone(case: Case, leased: frozenset[ComponentKey], hints: EvictionHints) -> ResidencyPlan:
    """The plan if all that may leave were gone: what the task's own components get of the room, in the order given."""
    specs, now, uses, activation_bytes = case
    used = {use.component for use in uses}
    entries = [e for e in now.entries if e.component in used | leased | set(hints.pinned_bytes)]
    pinned_bytes = EvictionHints(pinned_bytes=hints.pinned_bytes)
    return plan(Residency(now.capacity_bytes, tuple(entries)), uses, specs, activation_bytes, leased, pinned_bytes)


def _may_go_before(
    goes: ComponentKey, stays: ComponentKey, hints: EvictionHints, ages: Mapping[ComponentKey, Fraction]
) -> bool:
    low, high = hints.priorities.get(goes, 0), hints.priorities.get(stays, 0)
    if low != high:
        return low < high
    expected = hints.needed_next
    if goes in expected:
        return stays in expected and expected.index(stays) < expected.index(goes)
    if stays in expected or stays not in ages:
        return True
    return goes in ages and ages[goes] >= ages[stays] * Fraction(999_999, 1_000_000)


@given(cases(), LEASED, OUTLOOKS)
def test_floors_never_shrink(case, leased, hints) -> None:
    moves = planned(case, leased, hints)
    if moves is not None:
        for entry in case[1].entries:
            floor_bytes = min(entry.resident_bytes, hints.pinned_bytes.get(entry.component, 0))
            assert resident_bytes(moves.after, entry.component) >= floor_bytes


@given(cases(), OUTLOOKS)
def test_bytes_on_the_bus_do_not_depend_on_other_components(case, hints) -> None:
    """Nothing leased, no floors. Without a hint not even how they cross it: the scheduler predicts with this."""
    specs, now, uses, activation_bytes = case
    used = {use.component for use in uses}
    own = Residency(now.capacity_bytes, tuple(entry for entry in now.entries if entry.component in used))
    alone = planned((specs, own, uses, activation_bytes))
    blind, told = planned(case), planned(case, frozenset(), replace(hints, pinned_bytes={}))
    if alone is None or blind is None or told is None:
        assert alone is blind is told is None
        return
    assert (blind.upload, blind.streamed_bytes, blind.switched) == (alone.upload, alone.streamed_bytes, alone.switched)
    more_bytes = told.upload_bytes + told.streamed_bytes - alone.upload_bytes - alone.streamed_bytes
    assert abs(more_bytes) <= len(uses)
    assert told.switched == alone.switched


@given(cases(), LEASED, OUTLOOKS)
def test_equal_arguments_give_equal_plans(case, leased, hints) -> None:
    specs, now, uses, activation_bytes = case
    turned = EvictionHints(
        hints.needed_next,
        dict(reversed(hints.pinned_bytes.items())),
        dict(reversed(hints.priorities.items())),
    )
    backwards = (dict(reversed(specs.items())), now, uses, activation_bytes)
    assert planned(case, leased, hints) == planned(backwards, leased, turned)


@given(cases(), LEASED, OUTLOOKS)
def test_every_eviction_and_every_stream_has_its_reason(case, leased, hints) -> None:
    moves = planned(case, leased, hints)
    if moves is None:
        return
    specs, now, uses, activation_bytes = case
    reasons = explain(now, uses, specs, activation_bytes, leased, hints)
    assert [(r.component, r.bytes) for r in reasons if not r.streams] == [(m.component, m.bytes) for m in moves.evict]
    streamed = [(u.component, specs[u.component].weight_bytes - resident_bytes(moves.after, u.component)) for u in uses]
    assert [(r.component, r.bytes) for r in reasons if r.streams] == [pair for pair in streamed if pair[1]]
    for reason in reasons:
        assert str(reason).startswith(f"{reason.component}: ")
        named = {key for key in KEYS if re.search(rf"\b{key}\b", reason.why)}
        for rival in named:  # whoever is named as better off has bytes on the GPU
            assert resident_bytes(moves.after, rival) > 0 or rival in {use.component for use in uses}


@given(cases())
def test_what_the_task_uses_is_most_recent_afterwards(case) -> None:
    moves = planned(case)
    if moves is not None:
        used = [use.component for use in case[2] if moves.after.of(use.component) is not None]
        assert [entry.component for entry in moves.after.entries][len(moves.after.entries) - len(used) :] == used


def test_what_does_not_fit_says_what_it_needs_and_has() -> None:
    specs = {KEYS[0]: ComponentSpec(KEYS[0], Role.VAE, 5, 5)}
    with pytest.raises(DoesNotFit, match=r"needs at least 12 B .* budget is 10 B .*activations 9 B.*layer 3 B"):
        plan(Residency(10), (ComponentUse(KEYS[0], 3),), specs, 9)


def test_golden_partial_load_with_switch_and_eviction() -> None:
    """20 B of device memory, 4 for activations, 1 scratch: 15 for weights. `a` (12 B, 6 on the bus) has patches x; the
    task wants y. `b` fills the rest and gives up 3 of its 6."""
    a, b = KEYS[:2]
    specs = {a: ComponentSpec(a, Role.DIFFUSION_MODEL, 12, 6), b: ComponentSpec(b, Role.VAE, 6, 6)}
    now = Residency(20, (Resident(b, 6), Resident(a, 10, "x", 3)))
    moves = plan(now, (ComponentUse(a, 1, "y", 4),), specs, 4)
    assert [(m.component, m.bytes) for m in moves.evict] == [(b, 3)]
    assert [(m.component, m.bytes) for m in moves.upload] == [(a, 5)]  # 2 new and 3 + 4 again, halved, rounded up
    assert moves.switched == (a,)
    assert moves.after == Residency(20, (Resident(b, 3), Resident(a, 12, "y", 4)))
    assert (moves.streamed_bytes, moves.all_resident) == (0, False)


A, B, C, D, E = KEYS
#: 10 B each, all on the bus
TENS = {key: ComponentSpec(key, Role.VAE, 10, 10) for key in KEYS}


def full(capacity_bytes: int, *keys: ComponentKey) -> Residency:
    """These components whole, the least recently used first."""
    return Residency(capacity_bytes, tuple(Resident(key, 10) for key in keys))


def told(now: Residency, use: ComponentUse, hints: EvictionHints) -> tuple[dict[str, int], int, list[str]]:
    """Evictions, streamed bytes, and why."""
    moves = plan(now, (use,), TENS, 0, hints=hints)
    reasons = [str(reason) for reason in explain(now, (use,), TENS, 0, hints=hints)]
    return {move.component: move.bytes for move in moves.evict}, moves.streamed_bytes, reasons


def test_golden_what_is_not_expected_leaves_before_what_is_and_of_that_the_last_needed() -> None:
    now, use = full(30, A, B, C), ComponentUse(D, 0, passes=20)
    assert told(now, use, EvictionHints((A, B))) == (
        {C: 10},
        0,
        ["c2: 10 B of it leaves: no expected task needs it, and one needs c1"],
    )
    assert told(now, use, EvictionHints((C, A, B))) == (
        {B: 10},
        0,
        ["c1: 10 B of it leaves: it is needed later than c0"],
    )
    assert told(now, use, EvictionHints((C, A, B), priorities={C: -1})) == (
        {C: 10},
        0,
        ["c2: 10 B of it leaves: its priority -1 is below that of c1, 0"],
    )


def test_golden_one_pass_streams_what_would_push_out_better_bytes() -> None:
    """25 B, `A` and `B` take 20: of `C` 5 fit. Its other 5 load only where something worse is there."""
    now, use = full(25, A, B), ComponentUse(C, 0)
    assert told(now, use, NO_HINTS)[:2] == ({A: 5}, 0)
    one_pass = "one pass costs the same streamed or loaded; loaded it would push out"
    assert told(now, use, EvictionHints((A, B))) == (
        {},
        5,
        [f"c2: 5 B of it streams: {one_pass} c1, which is expected to be needed, as it is not"],
    )
    assert told(now, use, EvictionHints((A, B, C)))[2] == [
        f"c2: 5 B of it streams: {one_pass} c1, which is needed sooner than it is again"
    ]
    assert told(now, use, EvictionHints((A, C, B)))[:2] == ({B: 5}, 0)
    assert told(now, use, EvictionHints(priorities={C: -1}))[2] == [
        f"c2: 5 B of it streams: {one_pass} c0, which has priority 0, above -1"
    ]
    assert told(now, ComponentUse(C, 0, passes=2), EvictionHints((A, B)))[:2] == ({B: 5}, 0), (
        "streaming would cost it twice"
    )


def test_golden_what_is_cheap_to_bring_back_leaves_though_it_is_younger() -> None:
    """`B` was used after `A`, 10 B since, and comes back for a fifth of the bytes."""
    specs = {**TENS, B: ComponentSpec(B, Role.VAE, 10, 2)}
    now, uses = full(30, A, B, C), (ComponentUse(D, 0, passes=20),)
    assert [(m.component, m.bytes) for m in plan(now, uses, specs, 0).evict] == [(B, 10)]
    (reason,) = explain(now, uses, specs, 0)
    assert reason.why == (
        "0.20 B on the bus bring a byte of its room back, and 10 B were used since; c0 is worth more: "
        "1.00 B on the bus bring a byte of its room back, and 20 B were used since"
    )


def test_a_floor_is_kept_and_what_it_leaves_too_little_for_is_refused_with_all_numbers() -> None:
    now, hints = full(30, A, B, C), EvictionHints(pinned_bytes={A: 7, B: 99})
    moves = plan(now, (ComponentUse(D, 1),), TENS, 2, frozenset({C}), hints)
    assert [(m.component, m.bytes) for m in moves.evict] == [(A, 3)]
    assert moves.after.used_bytes + 3 == 30
    assert moves.streamed_bytes == 10
    with pytest.raises(DoesNotFit) as refused:
        plan(now, (ComponentUse(D, 1),), TENS, 3, frozenset({C}), hints)
    assert str(refused.value) == (
        "c3 needs at least 31 B of device memory, the budget is 30 B (activations 3 B, working set of the largest "
        "layer 1 B, leased 10 B, pinned 17 B)"
    )


def test_a_component_below_its_floor_is_not_loaded_for_it() -> None:
    moves = plan(full(30, A), (ComponentUse(B, 0),), TENS, 0, hints=EvictionHints(pinned_bytes={C: 10}))
    assert moves.after == full(30, A, B)
