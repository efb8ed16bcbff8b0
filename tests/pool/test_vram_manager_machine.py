"""The manager under any sequence of what may happen to it, with failures at every transfer.

Proves, for leases (nested, of several components, patched), loads and unloads by hand, holds, priorities, other
programs that take memory and transfers that fail: the device's own peak never passes its budget, residency is the
device's ledger to the byte, leased bytes never move, what is held stays, a failed load leaves nothing behind, a second
plan is empty, and after the last unload no byte remains.
"""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pool.devices import sim
from pool.errors import DoesNotFit, UserError
from pool.patcher import ModelPatcher
from pool.spec import ComponentKey, Role
from pool.vram_manager import Lease, VramManager
from pool.weight_form import WeightForm
from tests.pool.toy import make_toy, patches_for

DEVICE = "sim:0"  # a name until `sim.install` has run
WEIGHTS = ("wide.weight", "conv.weight")
DTYPES = (torch.float32, torch.float16, torch.float32)
INDICES = st.integers(0, len(DTYPES) - 1)
PATCH_NAMES = st.sampled_from(["", "a", "b"])
SHARES = st.floats(0.0, 1.2)


@dataclass
class Held:
    """A lease that is held, and which modules were there when it was taken."""

    block: AbstractContextManager[Lease]
    modules: dict[ComponentKey, frozenset[str]]


class ManagerMachine(RuleBasedStateMachine):
    """Drives one manager on one simulated device."""

    @initialize(share=st.floats(0.1, 3.5))
    def begin(self, share: float) -> None:
        gc.collect()  # what an example that failed has left
        sim.install()
        sim.configure(0, 1 << 30)
        sim.recover(0)
        self.bases = [
            ModelPatcher.of(ComponentKey(f"toy{i}"), Role.DIFFUSION_MODEL, make_toy(i), torch.device(DEVICE), form)
            for i, form in enumerate(map(WeightForm, DTYPES))
        ]
        self.capacity_bytes = int(self.bases[0].spec().weight_bytes * share)
        sim.configure(0, self.capacity_bytes)
        sim.reset_peak(0)
        self.manager = VramManager(self.capacity_bytes, free_bytes=self.free_bytes)
        for base in self.bases:
            self.manager.add(base)
        self.leases: list[Held] = []
        self.held: dict[ComponentKey, int] = {}
        self.fails = False

    def free_bytes(self) -> int:
        stats = sim.memory_stats(0)
        return stats.budget_bytes - stats.used_bytes - stats.foreign_bytes

    def resident(self) -> dict[ComponentKey, int]:
        return {base.key: base.resident().resident_bytes for base in self.bases}

    def clone(self, index: int, patches_name: str) -> ModelPatcher:
        clone = self.bases[index].clone()
        if patches_name:
            clone.patches = patches_for(make_toy(), patches_name, WEIGHTS)
        return clone

    def check_held(self, before: dict[ComponentKey, int], wanted: set[ComponentKey]) -> None:
        for key, held_bytes in self.held.items():
            if key not in wanted:
                assert self.resident()[key] >= min(held_bytes, before[key])

    @rule(
        chosen=st.lists(st.tuples(INDICES, PATCH_NAMES), min_size=1, max_size=3),
        share=st.floats(0.0, 0.5),
        next_up=st.lists(INDICES, max_size=3),
        most=st.none() | SHARES,
    )
    def enter(self, chosen: list[tuple[int, str]], share: float, next_up: list[int], most: float | None) -> None:
        clones = [self.clone(*choice) for choice in chosen]
        wanted = [(clone, clone.use()) for clone in clones]
        activation_bytes = int(self.capacity_bytes * share)
        needed_next = [self.bases[i].key for i in next_up]
        most_bytes = None if most is None else int(self.capacity_bytes * most)
        before, transfers = self.resident(), sim.memory_stats(0).h2d_count
        block = self.manager.lease(wanted, activation_bytes, needed_next, most_bytes)
        try:
            lease = block.__enter__()
        except DoesNotFit:
            assert self.resident() == before
            assert sim.memory_stats(0).h2d_count == transfers
            return
        except torch.OutOfMemoryError:
            self.fails = False
            for clone in clones:  # what arrived has left again
                assert clone.resident().resident_bytes <= before[clone.key]
            return
        keys = {clone.key for clone in clones}
        modules = {base.key: base.resident_modules() for base in self.bases if base.key in keys}
        self.leases.append(Held(block, modules))
        self.check_held(before, keys)
        scratch_bytes = max(use.scratch_bytes for _, use in wanted)
        assert self.free_bytes() >= activation_bytes + scratch_bytes
        assert lease.planned_bytes <= self.capacity_bytes
        with self.manager.lease(wanted, activation_bytes, needed_next, most_bytes) as again:
            assert again.uploaded_bytes == 0
            assert not again.plan.evict
            assert again.patch_switches == 0

    @precondition(lambda self: self.leases)
    @rule()
    def leave(self) -> None:
        before = self.resident()
        self.leases.pop().block.__exit__(None, None, None)
        assert self.resident() == before

    @rule(index=INDICES, share=st.none() | SHARES)
    def hold(self, index: int, share: float | None) -> None:
        spec = self.bases[index].spec()
        size_bytes = None if share is None else int(spec.weight_bytes * share)
        self.manager.hold(spec.key, size_bytes)
        self.held[spec.key] = spec.weight_bytes if size_bytes is None else min(size_bytes, spec.weight_bytes)

    @rule(index=INDICES)
    def release(self, index: int) -> None:
        self.manager.release(self.bases[index].key)
        self.held.pop(self.bases[index].key, None)

    @rule(index=INDICES, priority=st.integers(-1, 1))
    def prioritize(self, index: int, priority: int) -> None:
        self.manager.prioritize(self.bases[index].key, priority)

    @rule(share=st.floats(0.0, 1.0))
    def another_program(self, share: float) -> None:
        stats = sim.memory_stats(0)
        sim.occupy(0, int((stats.budget_bytes - stats.used_bytes) * share))

    @rule(after=st.integers(0, 12))
    def plant_a_failure(self, after: int) -> None:
        sim.fail_transfer(0, after)
        self.fails = True

    @rule(index=INDICES, patches_name=PATCH_NAMES, share=st.none() | SHARES)
    def load(self, index: int, patches_name: str, share: float | None) -> None:
        patcher, before = self.clone(index, patches_name), self.resident()
        most_bytes = None if share is None else int(patcher.spec().weight_bytes * share)
        try:
            arrived_bytes = self.manager.load(patcher, most_bytes)
        except DoesNotFit:
            assert self.resident() == before
        except torch.OutOfMemoryError:
            self.fails = False
            assert patcher.resident().resident_bytes <= before[patcher.key]
        else:
            after_bytes = patcher.resident().resident_bytes
            assert arrived_bytes == after_bytes - before[patcher.key]
            assert most_bytes is None or after_bytes <= max(most_bytes, before[patcher.key])
            self.check_held(before, {patcher.key})

    @rule(index=INDICES, share=st.none() | SHARES)
    def unload(self, index: int, share: float | None) -> None:
        base, before = self.bases[index], self.resident()
        least_bytes = None if share is None else int(base.spec().weight_bytes * share)
        if any(base.key in lease.modules for lease in self.leases):
            with pytest.raises(UserError, match="a run is using it"):
                self.manager.unload(base.key, least_bytes)
            return
        freed_bytes = self.manager.unload(base.key, least_bytes)
        asked_bytes = before[base.key] if least_bytes is None else min(least_bytes, before[base.key])
        assert freed_bytes == before[base.key] - self.resident()[base.key] >= asked_bytes

    @rule(share=SHARES)
    def free(self, share: float) -> None:
        before, asked_bytes = self.resident(), int(self.capacity_bytes * share)
        freed_bytes = self.manager.free(asked_bytes)
        assert freed_bytes == sum(before.values()) - sum(self.resident().values())
        self.check_held(before, set())
        leased = {key for lease in self.leases for key in lease.modules}
        could_leave_bytes = sum(n for key, n in before.items() if key not in leased and key not in self.held)
        assert freed_bytes >= min(asked_bytes, could_leave_bytes)

    @rule()
    def unload_all(self) -> None:
        self.manager.unload_all()
        leased = {key for lease in self.leases for key in lease.modules}
        assert all(size == 0 for key, size in self.resident().items() if key not in leased)

    @invariant()
    def the_account_is_exact(self) -> None:
        if not hasattr(self, "manager"):
            return
        stats = sim.memory_stats(0)
        assert self.manager.residency().used_bytes == sum(self.resident().values()) == stats.used_bytes
        assert stats.peak_bytes <= stats.budget_bytes

    @invariant()
    def leased_bytes_stay(self) -> None:
        for lease in getattr(self, "leases", []):
            for base in self.bases:
                assert lease.modules.get(base.key, frozenset()) <= base.resident_modules()

    def teardown(self) -> None:
        while getattr(self, "leases", []):
            self.leases.pop().block.__exit__(None, None, None)
        if hasattr(self, "manager"):
            sim.recover(0)
            self.manager.unload_all()
            assert sim.memory_stats(0).used_bytes == 0
            self.manager.close()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)
