"""The manager under any sequence of what may happen to it, with failures at every transfer.

Proves, for every policy and for leases (nested, of several components, patched, of several passes, of resident
weights), runs that allocate in them, loads and unloads by hand, holds, priorities, other programs that take memory and
transfers that fail: the device's own peak never passes its budget, residency is the device's ledger to the byte,
weights leave room for what all held leases may allocate, leased bytes never move, held bytes stay, a load by hand moves
nothing else, a failed load leaves nothing behind, a second plan is empty, what may not stream does not and fits where
it can, and after the last unload no byte remains.
"""

from __future__ import annotations

import functools
import gc
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy, rules_for
from modelpool.pool.values.core.errors import DoesNotFit, UserError
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patcher.out_of_memory import RanOutOfMemory
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.vram.vram_manager import Lease, VramManager
from tests.pool.toy import make_toy, patches_for
from tests.tiers import examples

DEVICE = "sim:0"  # a name until `sim.install` has run
WEIGHTS = ("wide.weight", "conv.weight")
DTYPES = (torch.float32, torch.float16, torch.float32)
INDICES = st.integers(0, len(DTYPES) - 1)
PATCH_NAMES = st.sampled_from(["", "a", "b"])
SHARES = st.floats(0.0, 1.2)
#: room for weights, in weights of one component: few examples find their way there by themselves
ROOMS = (2.5, 4.0, 1.5, 0.5, 0.0)
#: of the capacity, for activations
RUN_SHARES = st.sampled_from([0.0, 0.1, 0.3, 0.9])
POLICIES = (VramPolicy.NORMAL, VramPolicy.HIGH, VramPolicy.LOW, VramPolicy.NONE)
#: (component, patches, passes)
Choice: TypeAlias = tuple[int, str, int]


@functools.lru_cache(maxsize=2)
def patches_named(name: str) -> PatchSet:
    return patches_for(make_toy(), name, WEIGHTS)


@dataclass
class Held:
    """A lease that is held, which modules were there when it was taken, and what its run may have and has."""

    block: AbstractContextManager[Lease] | AbstractContextManager[None]
    modules: dict[ComponentKey, frozenset[str]]
    activation_bytes: int
    scratch_bytes: int
    allocated: torch.Tensor | None = None

    @property
    def run_bytes(self) -> int:
        return self.activation_bytes + self.scratch_bytes

    @property
    def allocated_bytes(self) -> int:
        return 0 if self.allocated is None else self.allocated.nbytes


class ManagerMachine(RuleBasedStateMachine):
    """Drives one manager on one simulated device."""

    @initialize(
        share=st.sampled_from(ROOMS), policy=st.sampled_from(POLICIES), there=st.lists(INDICES), held=st.sets(INDICES)
    )
    def begin(self, share: float, policy: VramPolicy, there: list[int], held: set[int]) -> None:
        sim.install()
        sim.configure(0, 1 << 30)
        if sim.memory_stats(0).used_bytes:
            gc.collect()  # what an example that failed has left
        sim.recover(0)
        self.bases = [
            ModelPatcher.of(ComponentKey(f"toy{i}"), Role.DIFFUSION_MODEL, make_toy(i), torch.device(DEVICE), form)
            for i, form in enumerate(map(WeightForm, DTYPES))
        ]
        scratch_bytes = max(self.clone(0, name).use().scratch_bytes for name in ("", "a"))
        self.capacity_bytes = int(self.bases[0].spec().weight_bytes * share) + scratch_bytes
        sim.configure(0, self.capacity_bytes)
        sim.reset_peak(0)
        self.rules = rules_for(policy)
        self.manager = VramManager(self.capacity_bytes, self.rules, self.free_bytes)
        for base in self.bases:
            self.manager.components.add(base)
        self.leases: list[Held] = []
        self.held: dict[ComponentKey, int] = {}
        self.fails = False
        #: of other programs, the least and the most since the first of `leases` was taken
        self.foreign_bytes = (0, 0)
        for index in there:
            self.load(index, "", 1.0)
        for index in held:
            self.hold(index, None)

    def free_bytes(self) -> int:
        stats = sim.memory_stats(0)
        return stats.budget_bytes - stats.used_bytes - stats.foreign_bytes

    def resident(self) -> dict[ComponentKey, int]:
        return {base.key: base.resident().resident_bytes for base in self.bases}

    def clone(self, index: int, patches_name: str) -> ModelPatcher:
        clone = self.bases[index].clone()
        if patches_name:
            clone.patches = patches_named(patches_name)
        return clone

    def leased(self) -> set[ComponentKey]:
        return {key for lease in self.leases for key in lease.modules}

    def run_bytes(self) -> int:
        """What the runs of all leases may have."""
        return sum(lease.run_bytes for lease in self.leases)

    def begin_lease(self, held: Held) -> None:
        if not self.leases:
            self.foreign_bytes = (sim.memory_stats(0).foreign_bytes,) * 2
        self.leases.append(held)

    def check_ran_out(self) -> None:
        """Others are told of only where there are, or were while runs were under way."""
        assert sim.memory_stats(0).foreign_bytes or (self.leases and self.foreign_bytes[1])

    def check_held(self, before: dict[ComponentKey, int], wanted: set[ComponentKey]) -> None:
        for key, held_bytes in self.held.items():
            if key not in wanted:
                assert self.resident()[key] >= min(held_bytes, before[key])

    @rule(
        chosen=st.lists(st.tuples(INDICES, PATCH_NAMES, st.integers(1, 2)), min_size=1, max_size=3),
        share=RUN_SHARES,
        next_up=st.lists(INDICES, max_size=3),
        most=st.none() | SHARES,
    )
    def enter(self, chosen: list[Choice], share: float, next_up: list[int], most: float | None) -> None:
        clones = [self.clone(index, patches_name) for index, patches_name, _ in chosen]
        wanted = [(clone, clone.use(passes)) for clone, (_, _, passes) in zip(clones, chosen, strict=True)]
        activation_bytes = int(self.capacity_bytes * share)
        scratch_bytes = max(use.scratch_bytes for _, use in wanted)
        needed_next = [self.bases[i].key for i in next_up]
        most_bytes = None if most is None or not self.rules.may_stream else int(self.capacity_bytes * most)
        before, transfers = self.resident(), sim.memory_stats(0).h2d_count
        keys = {clone.key for clone in clones}
        block = self.manager.lease(wanted, activation_bytes, needed_next, most_bytes)
        try:
            lease = block.__enter__()
        except (DoesNotFit, RanOutOfMemory) as refused:
            assert self.resident() == before
            assert sim.memory_stats(0).h2d_count == transfers
            if isinstance(refused, RanOutOfMemory):
                self.check_ran_out()
            elif not self.leases and not self.held:  # the budget is too small, whatever is there now
                whole_bytes = 0 if self.rules.may_stream else self.whole_bytes(keys)
                assert activation_bytes + scratch_bytes + whole_bytes > self.capacity_bytes
            return
        except torch.OutOfMemoryError:
            assert self.fails or self.grown_bytes()
            self.fails = False
            for clone in clones:  # what arrived has left again
                assert clone.resident().resident_bytes <= before[clone.key]
            return
        self.check_held(before, keys)
        assert self.rules.may_stream or lease.plan.streamed_bytes == 0
        assert lease.planned_bytes <= self.capacity_bytes
        if self.rules.keeps_idle:
            block.__exit__(None, None, None)
            block = self.manager.lease(wanted, activation_bytes, needed_next, most_bytes)
            again = block.__enter__()
            assert again.uploaded_bytes == 0
            assert not again.plan.evict
            assert again.patch_switches == 0
        modules = {base.key: base.resident_modules() for base in self.bases if base.key in keys}
        self.begin_lease(Held(block, modules, activation_bytes, scratch_bytes))
        unused_bytes = self.run_bytes() - sum(lease.allocated_bytes for lease in self.leases)
        assert self.free_bytes() + self.grown_bytes() >= unused_bytes

    def whole_bytes(self, keys: set[ComponentKey]) -> int:
        return sum(base.spec().weight_bytes for base in self.bases if base.key in keys)

    def grown_bytes(self) -> int:
        """What other programs have taken while runs were under way: it may be taken for theirs."""
        return sim.memory_stats(0).foreign_bytes - self.foreign_bytes[0] if self.leases else 0

    @rule(index=INDICES, patches_name=PATCH_NAMES, share=RUN_SHARES)
    def enter_as_is(self, index: int, patches_name: str, share: float) -> None:
        clone, before = self.clone(index, patches_name), self.resident()
        activation_bytes = int(self.capacity_bytes * share)
        block = self.manager.lease_as_is([(clone, clone.use())], activation_bytes)
        try:
            block.__enter__()
        except DoesNotFit:
            pass
        except RanOutOfMemory:
            self.check_ran_out()
        else:
            modules = {clone.key: clone.resident_modules()}
            self.begin_lease(Held(block, modules, activation_bytes, clone.use().scratch_bytes))
        assert self.resident() == before

    @precondition(lambda self: self.leases)
    @rule(share=st.floats(0.0, 1.0))
    def compute(self, share: float) -> None:
        """The innermost run allocates activations."""
        lease = self.leases[-1]
        lease.allocated = None
        size_bytes = min(int(lease.activation_bytes * share), self.free_bytes())
        lease.allocated = torch.empty(size_bytes, dtype=torch.uint8, device=DEVICE)

    @precondition(lambda self: self.leases)
    @rule()
    def leave(self) -> None:
        before, lease = self.resident(), self.leases.pop()
        lease.allocated = None
        lease.block.__exit__(None, None, None)
        gone = set() if self.rules.keeps_idle else set(lease.modules) - self.leased()
        for key, size_bytes in self.resident().items():
            if key not in gone:
                assert size_bytes == before[key]
            elif key not in self.held:
                assert size_bytes == 0
        self.check_held(before, set())

    @rule(index=INDICES, share=st.none() | SHARES)
    def hold(self, index: int, share: float | None) -> None:
        spec = self.bases[index].spec()
        size_bytes = None if share is None else int(spec.weight_bytes * share)
        self.manager.pins.pin(spec.key, size_bytes)
        self.held[spec.key] = spec.weight_bytes if size_bytes is None else min(size_bytes, spec.weight_bytes)

    @rule(index=INDICES)
    def release(self, index: int) -> None:
        self.manager.pins.unpin(self.bases[index].key)
        self.held.pop(self.bases[index].key, None)

    @rule(index=INDICES, priority=st.integers(-1, 1))
    def prioritize(self, index: int, priority: int) -> None:
        self.manager.pins.prioritize(self.bases[index].key, priority)

    @rule(share=st.sampled_from([0.0, 0.0, 0.3, 1.0]))
    def another_program(self, share: float) -> None:
        stats = sim.memory_stats(0)
        foreign_bytes = int((stats.budget_bytes - stats.used_bytes) * share)
        sim.occupy(0, foreign_bytes)
        least_bytes, most_bytes = self.foreign_bytes
        self.foreign_bytes = (min(least_bytes, foreign_bytes), max(most_bytes, foreign_bytes))

    @rule(after=st.integers(0, 12))
    def plant_a_failure(self, after: int) -> None:
        sim.fail_transfer(0, after)
        self.fails = True

    @rule(index=INDICES, patches_name=PATCH_NAMES, share=st.none() | SHARES)
    def load(self, index: int, patches_name: str, share: float | None) -> None:
        patcher, before = self.clone(index, patches_name), self.resident()
        modules, transfers = {base.key: base.resident_modules() for base in self.bases}, sim.memory_stats(0).h2d_count
        weight_bytes = patcher.spec().weight_bytes
        most_bytes = None if share is None else int(weight_bytes * share)
        try:
            arrived_bytes = self.manager.load(patcher, most_bytes)
        except (DoesNotFit, RanOutOfMemory) as refused:
            assert self.resident() == before
            assert sim.memory_stats(0).h2d_count == transfers
            assert most_bytes is None or patcher.key in self.leased(), "a part of nothing is refused nowhere else"
            if isinstance(refused, RanOutOfMemory):
                self.check_ran_out()
        except torch.OutOfMemoryError:
            assert self.fails or self.grown_bytes()
            self.fails = False
            assert patcher.resident().resident_bytes <= before[patcher.key]
        else:
            after_bytes = patcher.resident().resident_bytes
            assert arrived_bytes == after_bytes - before[patcher.key]
            assert modules[patcher.key] <= patcher.resident_modules()
            assert after_bytes <= max(weight_bytes if most_bytes is None else most_bytes, before[patcher.key])
            assert most_bytes is not None or after_bytes == weight_bytes
        assert all(base.resident_modules() == modules[base.key] for base in self.bases if base.key != patcher.key)

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
        kept = self.leased() | set(self.held)
        could_leave_bytes = sum(n for key, n in before.items() if key not in kept)
        assert freed_bytes >= min(asked_bytes, could_leave_bytes)

    @rule(but=st.sets(INDICES, max_size=1))
    def free_idle(self, but: set[int]) -> None:
        before = self.resident()
        kept = self.leased() | set(self.held) | {self.bases[index].key for index in but}
        freed_bytes = self.manager.free_idle([self.bases[index].key for index in but])
        assert self.resident() == {key: size_bytes if key in kept else 0 for key, size_bytes in before.items()}
        assert freed_bytes == sum(before.values()) - sum(self.resident().values())

    @rule()
    def unload_all(self) -> None:
        self.manager.unload_all()
        assert all(size == 0 for key, size in self.resident().items() if key not in self.leased())

    @invariant()
    def the_account_is_exact(self) -> None:
        if not hasattr(self, "manager"):
            return
        stats = sim.memory_stats(0)
        resident_bytes, allocated_bytes = sum(self.resident().values()), sum(s.allocated_bytes for s in self.leases)
        assert self.manager.residency().used_bytes == resident_bytes == stats.used_bytes - allocated_bytes
        assert stats.peak_bytes <= stats.budget_bytes

    @invariant()
    def weights_leave_room_for_all_runs(self) -> None:
        if hasattr(self, "manager"):
            assert sum(self.resident().values()) + self.run_bytes() <= self.capacity_bytes

    @invariant()
    def leased_bytes_stay(self) -> None:
        for lease in getattr(self, "leases", []):
            for base in self.bases:
                assert lease.modules.get(base.key, frozenset()) <= base.resident_modules()

    def teardown(self) -> None:
        while getattr(self, "leases", []):
            self.leave()
        if hasattr(self, "manager"):
            sim.recover(0)
            self.manager.unload_all()
            assert sim.memory_stats(0).used_bytes == 0
            self.manager.close()


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
