"""The manager's promise: whatever is asked in whatever order, the budget holds and the account is exact.

Proves: the device's own peak never passes its budget for any sequence of leases that `plan` allows; residency equals
the device's ledger; leased bytes stay; a block that raises leaves no lease; a repeated lease moves nothing.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.devices import sim
from pool.errors import DoesNotFit
from pool.patcher import ModelPatcher
from pool.spec import ComponentKey, Role
from pool.vram_manager import VramManager
from pool.weight_form import WeightForm
from tests.pool.toy import make_toy, patches_for

DEVICE = "sim:0"  # a name until `sim.install` has run
WEIGHTS = ("wide.weight", "conv.weight")
ACTIVATION_BYTES = 4096


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, 1 << 30)
    sim.reset_counters(0)


def patcher_of(name: str, seed: int) -> ModelPatcher:
    return ModelPatcher.of(
        ComponentKey(name), Role.DIFFUSION_MODEL, make_toy(seed), torch.device(DEVICE), WeightForm(torch.float32)
    )


def variant(base: ModelPatcher, patches_name: str) -> ModelPatcher:
    clone = base.clone()
    if patches_name:
        clone.patches = patches_for(make_toy(), patches_name, WEIGHTS)
    return clone


@settings(max_examples=60)
@given(
    capacity_share=st.floats(0.05, 3.5),
    leases=st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True), st.sampled_from(["", "a", "b"])),
        min_size=1,
        max_size=8,
    ),
)
def test_the_budget_holds_for_any_sequence_of_leases(
    capacity_share: float, leases: list[tuple[list[int], str]]
) -> None:
    bases = [patcher_of(f"toy{i}", i) for i in range(3)]
    capacity_bytes = int(bases[0].spec().weight_bytes * capacity_share)
    sim.configure(0, capacity_bytes)
    sim.reset_peak(0)
    manager = VramManager(capacity_bytes)
    for base in bases:
        manager.add(base)
    for indices, patches_name in leases:
        clones = [variant(bases[i], patches_name) for i in indices]
        wanted = [(c, c.use()) for c in clones]
        smallest_bytes = ACTIVATION_BYTES + max(use.scratch_bytes for _, use in wanted)
        if smallest_bytes > capacity_bytes:
            with pytest.raises(DoesNotFit, match="needs at least"), manager.lease(wanted, ACTIVATION_BYTES):
                pass
            continue
        with manager.lease(wanted, ACTIVATION_BYTES) as lease:
            assert manager.residency().used_bytes == sim.memory_stats(0).used_bytes
            assert sim.memory_stats(0).used_bytes + smallest_bytes <= capacity_bytes
            for clone, use in wanted:
                resident = lease.plan.after.of(use.component)
                held_bytes = clone.resident().resident_bytes
                assert held_bytes <= (resident.resident_bytes if resident else 0)
        with manager.lease(wanted, ACTIVATION_BYTES) as again:
            assert again.uploaded_bytes == 0
            assert again.patch_switches == 0
    assert sim.memory_stats(0).peak_bytes <= capacity_bytes
    manager.unload_all()
    assert sim.memory_stats(0).used_bytes == 0
    assert manager.residency().entries == ()


def test_what_is_leased_stays() -> None:
    """Room for one and a half: while the first is leased, the second streams its rest instead of evicting it."""
    first, second = patcher_of("first", 1), patcher_of("second", 2)
    weight_bytes = first.spec().weight_bytes
    use = second.use()
    manager = VramManager(weight_bytes * 3 // 2 + use.scratch_bytes + ACTIVATION_BYTES)
    manager.add(first)
    manager.add(second)
    with manager.lease([(first, first.use())], ACTIVATION_BYTES):
        with manager.lease([(second, use)], ACTIVATION_BYTES) as inner:
            assert first.resident().resident_bytes == weight_bytes
            assert 0 < second.resident().resident_bytes < weight_bytes
            assert inner.plan.streamed_bytes > 0
        manager.unload_all()
        assert first.resident().resident_bytes == weight_bytes
        assert second.resident().resident_bytes == 0
    with manager.lease([(second, use)], ACTIVATION_BYTES):
        assert second.resident().resident_bytes == weight_bytes
        assert first.resident().resident_bytes < weight_bytes


def test_a_block_that_raises_leaves_no_lease() -> None:
    patcher = patcher_of("toy", 1)
    manager = VramManager(1 << 24)
    manager.add(patcher)
    with pytest.raises(RuntimeError, match="in the middle"), manager.lease([(patcher, patcher.use())], 0):
        raise RuntimeError("in the middle")
    manager.unload_all()
    assert sim.memory_stats(0).used_bytes == 0


def test_a_device_that_is_fuller_than_planned_is_an_error_with_an_exact_account() -> None:
    """Another program took memory between plan and load: out of memory, and what arrived is accounted for."""
    patcher = patcher_of("toy", 1)
    manager = VramManager(1 << 24)
    manager.add(patcher)
    sim.configure(0, patcher.spec().weight_bytes // 2)
    with pytest.raises(torch.OutOfMemoryError), manager.lease([(patcher, patcher.use())], 0):
        pass
    assert manager.residency().used_bytes == sim.memory_stats(0).used_bytes
    manager.unload_all()
    assert sim.memory_stats(0).used_bytes == 0


def test_patch_switches_are_counted_once_each() -> None:
    base = patcher_of("toy", 1)
    manager = VramManager(1 << 24)
    manager.add(base)
    switches = []
    for name in ("", "a", "a", "b", ""):
        clone = variant(base, name)
        with manager.lease([(clone, clone.use())], 0) as lease:
            switches.append(lease.patch_switches)
    assert switches == [0, 1, 0, 1, 1]
