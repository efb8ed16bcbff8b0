"""Every architecture runs in every budget from "its largest layer and its activations" to "all", with equal results.

Proves, for each architecture of the zoo on a simulated device that holds no byte more than the budget: the plan's
choice of modules realized, the module's result equals the resident run's bit for bit; the device's own peak stays
within what the plan said (weights, scratch and activations, the last estimated without a device); and after unloading
nothing is left. Weights rest in float16 and are computed with in float32, so that streaming converts, too.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.plan.eviction_plan import Residency, choose_modules, needed_bytes, plan
from tests.pool.weights.ops.test_zoo import INEXACT, TOLERANCE, deviation
from tests.pool.zoo import FAMILIES, Case, build, store_in
from tests.pool.zoo.case import quiet_libraries, tensors_in
from tests.pool.zoo.peaks import estimated_bytes

INDEX = 60  # of a simulated device that no other test uses
PLENTY_BYTES = 1 << 28
KEY = ComponentKey("zoo/module@1")


@pytest.fixture(scope="module")
def device() -> torch.device:
    sim.install()
    sim.configure(INDEX, PLENTY_BYTES)
    return torch.device("sim", INDEX)


class Runner:
    """One architecture on one device, at any budget."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.inputs, self.device = case.inputs, device
        self.activation_bytes = estimated_bytes(case.module, case.inputs, torch.float32)
        form = WeightForm(torch.float32)
        self.patcher = ModelPatcher.of(KEY, Role.DIFFUSION_MODEL, case.module, device, form)
        self.use, self.spec = self.patcher.use(), self.patcher.spec()
        self.smallest_bytes = needed_bytes([self.use], self.activation_bytes)

    def budgets(self, rng: random.Random) -> list[int]:
        """The smallest, around the edges of modules, one at random, and all; the largest first."""
        sizes = sorted(m.resident_bytes for m in self.patcher.modules())
        whole_bytes = self.spec.weight_bytes
        steps = {0, sizes[-1] - 1, sizes[-1], whole_bytes - 1, whole_bytes, rng.randrange(whole_bytes)}
        return sorted((self.smallest_bytes + step for step in steps), reverse=True)

    def run(self, capacity_bytes: int, kept_bytes: int) -> tuple[list[Tensor], int]:
        """The result in so much memory, beside `kept_bytes` that the module's code keeps on the device; and the bytes
        of weights that were resident. Fails when the device held more than the plan said."""
        sim.configure(INDEX, PLENTY_BYTES)
        decided = plan(Residency(capacity_bytes), [self.use], {KEY: self.spec}, self.activation_bytes)
        entry = decided.after.of(KEY)
        target = choose_modules(self.patcher.modules(), entry.resident_bytes if entry else 0, frozenset())
        self.patcher.unload()
        sim.configure(INDEX, capacity_bytes + kept_bytes)
        sim.reset_peak(INDEX)
        self.patcher.realize(WeightsTarget(target, self.patcher.patches))
        with self.patcher.running() as module, quiet_libraries():
            inputs = pytree.tree_map_only(Tensor, lambda t: t.to(self.device), self.inputs)
            found = [t.to("cpu") for t in tensors_in(module(**inputs))]
        del inputs
        planned_bytes = decided.after.used_bytes + self.use.scratch_bytes + self.activation_bytes
        peak_bytes = sim.memory_stats(INDEX).peak_bytes - kept_bytes
        assert peak_bytes <= planned_bytes <= capacity_bytes
        return found, self.patcher.resident().resident_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_results_do_not_depend_on_the_budget(family: str, device: torch.device) -> None:
    case = build(family, torch.float16)
    store_in(case.module, torch.float16)
    before_bytes = sim.memory_stats(INDEX).used_bytes
    runner = Runner(case, device)
    budgets = runner.budgets(random.Random(family))
    expected, whole_bytes = runner.run(budgets[0], before_bytes)
    assert whole_bytes == runner.spec.weight_bytes
    runner.patcher.unload()
    kept_bytes = sim.memory_stats(INDEX).used_bytes  # tables that the module's code made in its first run
    residents = []
    for capacity_bytes in budgets[1:]:
        found, resident_bytes = runner.run(capacity_bytes, kept_bytes)
        residents.append(resident_bytes)
        if family in INEXACT:
            assert deviation(found, expected) <= TOLERANCE
        else:
            assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True)), capacity_bytes
    assert residents[-1] == 0
    assert all(resident < whole_bytes for resident in residents)
    runner.patcher.unload()
    sim.configure(INDEX, PLENTY_BYTES)
    assert sim.memory_stats(INDEX).used_bytes == kept_bytes
