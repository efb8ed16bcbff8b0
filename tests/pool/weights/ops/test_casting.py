"""Casting layers: budgets, weight functions, classes, contexts, interrupts. (That they compute the right numbers for
every architecture is `test_zoo.py`'s.)

Proves that streaming keeps within a budget; that weight functions give what merged weights give, bit for bit; that
classes, copies and state dictionaries survive, interrupts end a run, and nothing is cast outside a context.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfers import TransferLedger
from modelpool.pool.weights.ops.cast import apply_weight_functions, cast
from modelpool.pool.weights.ops.casting_classes import restore_classes, set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import build, store_in

CPU = torch.device("cpu")
PLENTY_BYTES = 1 << 28


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.install()
    sim.configure(0, PLENTY_BYTES)


def test_streaming_keeps_within_a_budget_that_the_weights_do_not_fit() -> None:
    case = build("unet", torch.float16)
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    device = torch.device("sim:0")
    weight_bytes = sum(p.numel() * 4 for p in case.module.parameters())
    largest_bytes = max(p.numel() * 6 for p in case.module.parameters())
    sim.configure(0, weight_bytes // 2)
    sim.reset_peak(0)
    with compute(device, torch.float32):
        case.run(device)
    assert largest_bytes < sim.memory_stats(0).peak_bytes <= weight_bytes // 2
    assert sim.memory_stats(0).used_bytes == 0
    sim.configure(0, largest_bytes // 2)
    with pytest.raises(torch.OutOfMemoryError), compute(device, torch.float32):
        case.run(device)
    assert sim.memory_stats(0).used_bytes == 0


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=["fp32", "fp16", "fp8"])
def test_functions_on_the_fly_equal_merged_weights(storage: torch.dtype) -> None:
    case = build("unet", storage)
    deltas = {
        name: torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.01
        for name, parameter in case.module.named_parameters()
        if parameter.ndim > 1
    }
    merged = copy.deepcopy(case)
    for name, parameter in merged.module.named_parameters():
        if name in deltas:
            parameter.data = parameter.data.add(deltas[name]).add(deltas[name], alpha=0.5)
    expected = merged.run()
    store_in(case.module, storage)
    swap_to_casting(case.module)
    for name, delta in deltas.items():
        owner, _, own_name = name.rpartition(".")
        functions = (lambda w, d=delta: w.add_(d.to(w.device)), lambda w, d=delta: w.add(d.to(w.device), alpha=0.5))
        set_weight_functions(case.module.get_submodule(owner), own_name, functions)
    before = {name: p.clone() for name, p in case.module.named_parameters()}
    for device in (CPU, torch.device("sim:0")):
        with compute(device, torch.float32):
            assert all(torch.equal(a, b) for a, b in zip(case.run(device), expected, strict=True))
    for name, parameter in case.module.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)), f"{name} was written"


def test_a_patched_embedding_is_cast_whole() -> None:
    table = nn.Embedding(20, 8).half().requires_grad_(False)
    swap_to_casting(table)
    ids = torch.tensor([3, 3, 19])
    set_weight_functions(table, "weight", (lambda w: w.add_(1.0),))
    with compute(CPU, torch.float32):
        assert torch.equal(table(ids), table._parameters["weight"].float()[ids] + 1.0)
    set_weight_functions(table, "weight", ())
    with compute(CPU, torch.float32):
        assert torch.equal(table(ids), table._parameters["weight"].float()[ids])


def test_an_embedding_moves_rows_and_not_the_table() -> None:
    table = nn.Embedding(1000, 8).half().requires_grad_(False)
    swap_to_casting(table)
    device = torch.device("sim:0")
    ids = torch.tensor([3, 999]).to(device)
    sim.reset_counters(0)
    with compute(device, torch.float32):
        rows = table(ids)
    assert rows.device == device
    assert sim.memory_stats(0).h2d_bytes == 2 * 8 * 2


def test_classes_copies_and_state_survive() -> None:
    case = build("clip", torch.float32)
    kinds = [type(m) for m in case.module.modules()]
    state = case.module.state_dict()
    expected = case.run()
    swap_to_casting(case.module)
    swapped = [type(m) for m in case.module.modules()]
    swap_to_casting(case.module)
    assert [type(m) for m in case.module.modules()] == swapped
    assert all(isinstance(m, kind) for m, kind in zip(case.module.modules(), kinds, strict=True))
    twin = copy.deepcopy(case)
    twin.module.load_state_dict(state)
    with compute(CPU, torch.float32):
        assert torch.equal(twin.run()[0], expected[0])
    assert case.module.state_dict().keys() == state.keys()
    restore_classes(case.module)
    assert [type(m) for m in case.module.modules()] == kinds
    assert torch.equal(case.run()[0], expected[0])


def test_outside_a_context_a_module_tells_what_it_holds() -> None:
    case = build("unet", torch.float16)
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    assert case.module.dtype is torch.float16
    assert next(case.module.parameters()).dtype is torch.float16
    with compute(torch.device("sim:0"), torch.float32):
        assert case.module.dtype is torch.float32
        assert case.module.device.type == "sim"
        assert next(case.module.parameters()).dtype is torch.float32
        with compute(CPU, torch.bfloat16):
            assert case.module.dtype is torch.bfloat16
        assert case.module.dtype is torch.float32
    assert case.module.dtype is torch.float16


def test_an_interrupt_ends_the_run_at_a_layer() -> None:
    case = build("unet", torch.float32)
    swap_to_casting(case.module)
    calls = 0

    def interrupt() -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), compute(CPU, torch.float32, interrupt):
        case.run()
    assert calls == 5
    with compute(CPU, torch.float32):
        case.run()
    assert calls == 5


def test_a_ledger_is_told_of_streamed_weights() -> None:
    case = build("vae", torch.float16)
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    device, ledger = torch.device("sim:0"), TransferLedger()
    sim.reset_counters(0)
    inputs_bytes = sum(x.nbytes for x in case.input_tensors())
    with compute(device, torch.float32, ledger=ledger):
        case.run(device)
    assert ledger.counters().h2d_bytes == sim.memory_stats(0).h2d_bytes - inputs_bytes > 0


def test_casting_moves_in_storage_dtype_and_leaves_integers_alone() -> None:
    device = torch.device("sim:0")
    sim.reset_counters(0)
    moved = cast(torch.ones(100, dtype=torch.float16), device, torch.float32)
    assert moved.dtype is torch.float32
    assert sim.memory_stats(0).h2d_bytes == 200
    assert cast(torch.arange(4), device, torch.float32).dtype is torch.int64
    weight = torch.ones(3)
    assert cast(weight, CPU, torch.float32) is weight


def test_float64_is_computed_in_float64() -> None:
    weight = torch.tensor([1.0], dtype=torch.float64)
    changed = apply_weight_functions(weight, (lambda w: w.add_(1e-12),), CPU, torch.float64)
    assert changed.item() == 1.0 + 1e-12
    assert weight.item() == 1.0


def test_an_embedding_that_would_write_to_its_table_is_refused() -> None:
    table = nn.Embedding(4, 2, max_norm=1.0).requires_grad_(False)
    swap_to_casting(table)
    with pytest.raises(NotImplementedError, match="max_norm"):
        table(torch.tensor([1]))


def test_every_hook_of_a_casting_module_is_called() -> None:
    """Modules without hooks are called past torch's own way; one with a hook of any kind is not."""
    seen: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: seen.append(name)

    registers: dict[str, Callable[[nn.Module], Any]] = {
        "before": lambda m: m.register_forward_pre_hook(note("before")),
        "before, with keywords": lambda m: m.register_forward_pre_hook(note("before, with keywords"), with_kwargs=True),
        "after": lambda m: m.register_forward_hook(note("after")),
        "after, always": lambda m: m.register_forward_hook(note("after, always"), always_call=True),
        "backward": lambda m: m.register_full_backward_hook(note("backward")),
        "before backward": lambda m: m.register_full_backward_pre_hook(note("before backward")),
        "of all modules": lambda m: module_hooks.register_module_forward_hook(note("of all modules")),
    }
    for name, register in registers.items():
        layer = nn.Linear(2, 2)
        swap_to_casting(layer)
        plain = layer(torch.ones(1, 2))
        assert not seen
        handle = register(layer)
        called = layer(torch.ones(1, 2, requires_grad=True))
        called.sum().backward()
        handle.remove()
        assert torch.equal(called, plain)
        assert seen == [name]
        seen.clear()


def test_arguments_of_a_forward_have_any_name() -> None:
    """Found in a review: a call with `module=` was refused, as the name was a parameter of what makes the call."""

    class Named(nn.Module):
        def forward(self, held: Tensor, module: Tensor) -> Tensor:
            return held + module

    named = Named()
    swap_to_casting(named)
    assert named(torch.ones(1), module=torch.ones(1)).item() == 2


def test_a_class_that_is_called_in_its_own_way_stays_so() -> None:
    class Twice(nn.Identity):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(super().__call__(x) * 2)

    module = Twice()
    swap_to_casting(module)
    assert module(torch.ones(1)).item() == 2
