"""`plan` and `choose_modules` keep the budget, lose no byte, move nothing twice and never touch what is leased."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.errors import DoesNotFit
from pool.residency import ModuleBytes, Residency, ResidencyPlan, Resident, choose_modules, needed_bytes, plan
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Role

KEYS = [ComponentKey(name) for name in "abcde"]
DIGESTS = st.sampled_from(["", "x", "y"])
Case = tuple[dict[ComponentKey, ComponentSpec], Residency, tuple[ComponentUse, ...], int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Components, what is resident of them, and a task that uses some."""
    specs = {
        key: ComponentSpec(key, Role.VAE, draw(st.integers(1, 30)), draw(st.integers(1, 30)))
        for key in draw(st.permutations(KEYS))
    }
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


def planned(case: Case, leased: frozenset[ComponentKey] = frozenset()) -> ResidencyPlan | None:
    specs, now, uses, activation_bytes = case
    try:
        return plan(now, uses, specs, activation_bytes, leased)
    except DoesNotFit:
        return None


@given(cases(), LEASED)
def test_the_budget_holds_with_activations_and_the_largest_scratch(case, leased) -> None:
    moves = planned(case, leased)
    if moves is not None:
        _, now, uses, activation_bytes = case
        assert moves.after.used_bytes + needed_bytes(uses, activation_bytes) <= now.capacity_bytes
        assert moves.after.capacity_bytes == now.capacity_bytes


@given(cases(), LEASED)
def test_no_byte_is_lost_or_invented(case, leased) -> None:
    """What was there, less what is evicted, plus what arrives, is what is there afterwards: by component."""
    moves = planned(case, leased)
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
        else:
            assert (0 if after is None else after.resident_bytes) >= stays_bytes >= 0
    assert all(move.bytes > 0 for move in (*moves.evict, *moves.upload))


@given(cases(), LEASED)
def test_uploads_are_what_arrives_and_what_other_patches_touch_in_storage_bytes(case, leased) -> None:
    moves = planned(case, leased)
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


@given(cases(), LEASED)
def test_a_second_plan_moves_nothing(case, leased) -> None:
    moves = planned(case, leased)
    if moves is not None:
        specs, _, uses, activation_bytes = case
        again = plan(moves.after, uses, specs, activation_bytes, leased)
        assert (again.evict, again.upload, again.switched) == ((), (), ())
        assert set(again.after.entries) == set(moves.after.entries)
        assert again.streamed_bytes == moves.streamed_bytes


@given(cases(), LEASED)
def test_what_is_leased_stays_as_it_is_or_grows(case, leased) -> None:
    moves = planned(case, leased)
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


@given(cases())
def test_least_recently_used_goes_first_and_no_more_than_needed(case) -> None:
    """Of what the task does not use: a tail of the order stays whole, at most one is cut, the rest is gone; and when
    anything goes, there is no room left for it."""
    moves = planned(case)
    if moves is None:
        return
    _, now, uses, activation_bytes = case
    used = {use.component for use in uses}
    others = [entry for entry in now.entries if entry.component not in used]
    stays = [0 if (e := moves.after.of(o.component)) is None else e.resident_bytes for o in others]
    seen_partial = False
    for entry, stays_bytes in zip(others, stays, strict=True):
        assert not seen_partial or stays_bytes == entry.resident_bytes, "an earlier one was kept before a later one"
        seen_partial = seen_partial or stays_bytes > 0
    if sum(stays) < sum(entry.resident_bytes for entry in others):
        free_bytes = now.capacity_bytes - needed_bytes(uses, activation_bytes) - moves.after.used_bytes
        assert free_bytes == 0
    assert [e.component for e in moves.after.entries if e.component not in used] == [
        o.component for o, stays_bytes in zip(others, stays, strict=True) if stays_bytes
    ]


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


MODULES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8).map(
    lambda sizes: [ModuleBytes(f"m{n}", resident, upload) for n, (resident, upload) in enumerate(sizes)]
)


@given(MODULES, st.integers(0, 40), st.data())
def test_chosen_modules_fit_and_a_second_choice_is_the_same(modules, target_bytes, data) -> None:
    names = [module.name for module in modules]
    now = frozenset(data.draw(st.sets(st.sampled_from(names))) if names else ())
    sizes = {module.name: module.resident_bytes for module in modules}
    chosen = choose_modules(modules, target_bytes, now)
    assert chosen <= set(names)
    assert sum(sizes[name] for name in chosen) <= target_bytes
    assert choose_modules(modules, target_bytes, chosen) == chosen
    left_bytes = target_bytes - sum(sizes[name] for name in chosen)
    assert all(sizes[name] > left_bytes for name in set(names) - chosen), "room is left for one more"
    if sum(sizes.values()) <= target_bytes:
        assert chosen == set(names)


@given(MODULES, st.integers(0, 40), st.integers(0, 40))
def test_a_growing_target_keeps_what_is_there(modules, first_bytes, more_bytes) -> None:
    now = choose_modules(modules, first_bytes, frozenset())
    assert now <= choose_modules(modules, first_bytes + more_bytes, now)
