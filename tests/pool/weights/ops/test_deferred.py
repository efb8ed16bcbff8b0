"""A weight that is asked what it is does not move; one that is used moves once.

Proves: dtype and device are answered for the context without a copy; streaming moves every weight of a real model
exactly once; the value read through the stand-in equals the cast weight; and nothing writes to a weight through it.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.weights.ops.cast import cast
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import build, store_in

CPU = torch.device("cpu")
INDEX = 4  # of a device that no other test uses


@pytest.fixture
def device() -> torch.device:
    sim.configure(INDEX, 1 << 26)
    sim.reset_counters(INDEX)
    return torch.device("sim", INDEX)


class Scale(nn.Module):
    """A layer that is not torch's: reads its own weight, asks it for its dtype, keeps a table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8), requires_grad=False)
        self.register_buffer("table", torch.rand(8).half())
        self.register_buffer("precise", torch.rand(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.dtype == x.dtype
        assert self.weight.device == self.table.device == x.device
        return x.to(self.weight.dtype) * self.weight + self.table


class ScaledEmbedding(nn.Embedding):
    """An embedding with a forward around torch's, as some text encoders have."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * torch.tensor(2.0).to(self.weight.dtype)


def swapped(module: nn.Module, storage: torch.dtype) -> nn.Module:
    store_in(module, storage)
    swap_to_casting(module)
    return module


@pytest.mark.parametrize("family", ["unet", "flux", "auraflow", "vae"])
def test_streaming_moves_each_weight_once(family: str, device: torch.device) -> None:
    case = build(family, torch.float16)
    swapped(case.module, torch.float16)
    weights = list(case.module.parameters())
    with compute(device, torch.float32):
        case.run(device)
    stats = sim.memory_stats(INDEX)
    assert stats.h2d_bytes == sum(w.nbytes for w in weights) + sum(x.nbytes for x in case.input_tensors())
    assert stats.h2d_count == len(weights) + len(case.input_tensors())


def test_weights_that_are_asked_for_their_dtype_stream_once_too(device: torch.device) -> None:
    case = build("t5", torch.float16)
    swapped(case.module, torch.float16)
    tables = {m.weight for m in case.module.modules() if isinstance(m, nn.Embedding)}
    dense = [w for w in case.module.parameters() if w not in tables]
    with compute(device, torch.float32):
        case.run(device)
    gathered = 2  # rows of the token table and of the position table
    assert sim.memory_stats(INDEX).h2d_count == len(dense) + gathered + len(case.input_tensors())


def test_questions_move_nothing(device: torch.device) -> None:
    layer = swapped(Scale(), torch.float16)
    with compute(device, torch.float32):
        for asked in (layer.weight, next(layer.parameters()), dict(layer.named_parameters())["weight"]):
            assert (asked.dtype, asked.device, asked.shape) == (torch.float32, device, (8,))
        assert layer.table.device == device
    stats = sim.memory_stats(INDEX)
    assert (stats.h2d_count, stats.allocation_count) == (0, 0)


@pytest.mark.parametrize("storage", [torch.float16, torch.float8_e4m3fn], ids=["fp16", "fp8"])
def test_what_is_read_is_the_cast_weight(storage: torch.dtype, device: torch.device) -> None:
    layer = swapped(Scale(), storage)
    at_rest = layer._parameters["weight"]
    x = torch.rand(2, 8)
    expected = x * at_rest.float() + layer._buffers["table"].float()
    for place in (CPU, device):
        with compute(place, torch.float32):
            assert torch.equal(layer(x.to(place)).cpu(), expected)
            assert torch.equal(layer.weight.unsqueeze(0).cpu(), at_rest.float()[None])
            assert layer.weight[3].item() == at_rest[3].float().item()


def test_a_table_is_brought_to_the_compute_dtype_unless_it_is_more_precise() -> None:
    layer = swapped(Scale(), torch.float16)
    layer._buffers["table"] = layer._buffers["table"].to(torch.float8_e4m3fn)
    with compute(CPU, torch.float32):
        assert (layer.table.dtype, layer.precise.dtype) == (torch.float32, torch.float64)
        assert torch.equal(layer.table + 0, layer._buffers["table"].float())


def test_nothing_is_written_through_a_stand_in(device: torch.device) -> None:
    layer = swapped(Scale(), torch.float16)
    before = layer._parameters["weight"].clone()
    with compute(device, torch.float32), pytest.raises(RuntimeError, match="read-only"):
        layer.weight.add_(1)
    assert torch.equal(layer._parameters["weight"], before)


def test_an_embedding_inside_another_forward_moves_rows_only(device: torch.device) -> None:
    layer = swapped(ScaledEmbedding(1000, 4), torch.float16)
    ids = torch.tensor([7, 999]).to(device)
    sim.reset_counters(INDEX)
    with compute(device, torch.float32):
        rows = layer(ids)
    assert torch.equal(rows.cpu(), layer._parameters["weight"][[7, 999]].float() * 2)
    assert sim.memory_stats(INDEX).h2d_bytes == 2 * 4 * 2


def test_a_layer_that_makes_its_weight_from_others_is_computed() -> None:
    torch.manual_seed(0)
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(3, 4, 2)).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.copy_(parameter.half())
    x = torch.rand(1, 3, 5)
    expected = layer(x)
    swapped(layer, torch.float16)
    with torch.no_grad(), compute(CPU, torch.float32):
        assert torch.equal(layer(x), expected)


def test_functions_leave_a_resident_weight_alone(device: torch.device) -> None:
    for storage in (torch.float16, torch.float32):
        layer = swapped(nn.Linear(64, 64, bias=False), storage).to(device)
        before = layer._parameters["weight"].cpu()
        set_weight_functions(layer, "weight", (lambda w: w.add_(1.0),))
        sim.reset_peak(INDEX)
        used = sim.memory_stats(INDEX).used_bytes
        with compute(device, torch.float32):
            out = layer(torch.ones(1, 64).to(device))
        assert torch.equal(out.cpu(), nn.functional.linear(torch.ones(1, 64), before.float() + 1))
        assert torch.equal(layer._parameters["weight"].cpu(), before)
        assert sim.memory_stats(INDEX).peak_bytes <= used + 64 * 64 * 4 + 2 * 64 * 4  # one copy, the input, the result
        del layer, out


def test_stock_layers_compile_to_one_graph() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).requires_grad_(False)
    swapped(module, torch.float16)
    x = torch.ones(2, 8)
    interrupts = []
    with torch.no_grad(), compute(CPU, torch.float32, interrupt=lambda: interrupts.append(1)):
        expected = module(x)
        assert len(interrupts) == 3
        compiled = torch.compile(module, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)


def test_casting_converts_once() -> None:
    weight = torch.rand(5).to(torch.float8_e4m3fn)
    assert torch.equal(cast(weight, CPU, torch.bfloat16), weight.to(torch.bfloat16))
