"""Transformer options of a condition's hooks act as the run's do: entries, devices, models and comparison."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.conditioning.conditions import Condition, batches
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.options.transformer_options import TransformerOptions
from modelpool.pool.weights.patcher.hooked_run import hooked_run
from modelpool.pool.weights.patcher.hooks import HookGroup
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, models_to_load
from modelpool.pool.weights.patcher.weight_form import WeightForm

DEVICE = "sim:0"  # a name until `sim.install` has run


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, 1 << 30)


class Block(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class Blocks(nn.Module):
    """The smallest transformer that options have a place in."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Block()])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.transformer_blocks[0](hidden_states)


def patcher_of(name: str = "blocks") -> ModelPatcher:
    form = WeightForm(torch.float32)
    return ModelPatcher.of(ComponentKey(name), Role.DIFFUSION_MODEL, Blocks(), torch.device(DEVICE), form)


def group(options: TransformerOptions) -> HookGroup:
    return HookGroup().with_transformer_options(options)


class Movable:
    """A patch with a tensor and a model of its own; counts its moves."""

    def __init__(self, tensor: Tensor, log: list[Any], models: tuple[ModelPatcher, ...] = ()) -> None:
        self.tensor, self.log, self.named = tensor, log, models

    def to(self, device: torch.device) -> Movable:
        self.log.append("moved")
        return Movable(self.tensor.to(device), self.log, self.named)

    def models(self) -> list[ModelPatcher]:
        return list(self.named)

    def __call__(self, args: dict[str, Any]) -> dict[str, Any]:
        self.log.append(self.tensor.device)
        return args


def test_a_group_with_entries_alone_tells_the_runs_functions() -> None:
    seen: list[Any] = []

    def note(args: dict[str, Any]) -> dict[str, Any]:
        seen.append(args["transformer_options"].get("who"))
        return args

    patcher = patcher_of()
    patcher.state = patcher.state.with_options(lambda o: o.with_transformer(lambda t: t.with_double_block_patch(note)))
    named = group(TransformerOptions(extra={"who": "A"}))
    with patcher.running() as module, hooked_run(patcher, 14.0, lambda percent: 0.0) as apply_hooks:
        for one in (named, None, named, HookGroup()):
            apply_hooks(one, 14.0)
            module(torch.ones(1, device=DEVICE))
    assert seen == ["A", None, "A", None]


def test_a_groups_functions_are_on_the_runs_device_and_moved_once() -> None:
    log: list[Any] = []
    movable = group(TransformerOptions().with_double_block_patch(Movable(torch.ones(1), log)))
    patcher = patcher_of()
    with patcher.running() as module, hooked_run(patcher, 14.0, lambda percent: 0.0) as apply_hooks:
        for one in (movable, None, movable):
            apply_hooks(one, 14.0)
            module(torch.ones(1, device=DEVICE))
    device = torch.device(DEVICE)
    assert [entry for entry in log if entry != "moved"] == [device, device]
    moves_before_use = log.index(device)
    assert log.count("moved") == moves_before_use  # none when the group comes back


def test_models_that_a_groups_functions_name_are_loaded_too() -> None:
    patcher, helper, deeper = patcher_of(), patcher_of("helper"), patcher_of("deeper")
    helper.state = helper.state.with_additional_models("x", deeper)
    named = group(TransformerOptions().with_double_block_patch(Movable(torch.ones(1), [], (helper, patcher))))
    assert models_to_load(patcher) == ()
    assert models_to_load(patcher, (named, None)) == (helper, deeper)


@pytest.mark.parametrize(("value", "together"), [(1.0, True), (0.0, False)])
def test_groups_with_tensors_among_their_entries_can_be_compared(value: float, together: bool) -> None:
    groups = [group(TransformerOptions(extra={"mask": torch.full((3,), v)})) for v in (1.0, value)]
    conditions = [Condition(torch.ones(1, 2, 3), one) for one in groups]
    assert len(batches(conditions)) == (1 if together else 2)
    patcher = patcher_of()
    with patcher.running(), hooked_run(patcher, 14.0, lambda percent: 0.0) as apply_hooks:
        for one in groups:
            apply_hooks(one, 14.0)
