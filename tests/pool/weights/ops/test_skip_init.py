"""Building without drawing weights: nothing is filled, tables are computed, and outside all is as ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from modelpool.pool.weights.ops.skip_init import uninitialised_on_meta, without_initialisation
from tests.pool.zoo import FAMILIES

FILLS = ("uniform_", "normal_", "fill_", "zero_", "random_", "erfinv_")


class FillRecorder(TorchDispatchMode):
    """The elements that are filled inside the block, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in FILLS:
            self.filled[name] = self.filled.get(name, 0) + args[0].numel()
        return func(*args, **(kwargs or {}))


STOCK = [
    lambda: nn.Linear(30, 40),
    lambda: nn.Conv1d(3, 4, 3),
    lambda: nn.Conv2d(3, 4, 3),
    lambda: nn.Conv3d(3, 4, 3),
    lambda: nn.ConvTranspose1d(3, 4, 3),
    lambda: nn.ConvTranspose2d(3, 4, 3),
    lambda: nn.ConvTranspose3d(3, 4, 3),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.LayerNorm(7),
    lambda: nn.RMSNorm(7),
    lambda: nn.Embedding(20, 8),
    lambda: nn.MultiheadAttention(8, 2),
]


@pytest.mark.parametrize("make", STOCK)
def test_no_parameter_of_a_stock_layer_is_filled(make: Any) -> None:
    with FillRecorder() as usual:
        make()
    assert usual.filled, "this layer fills nothing anyway: the test proves nothing"
    with FillRecorder() as recorder, without_initialisation():
        layer = make()
    assert recorder.filled == {}
    assert all(p.device.type == "cpu" for p in layer.parameters())


@pytest.mark.parametrize("make", STOCK)
def test_on_meta_no_parameter_of_a_stock_layer_is_filled_nor_has_memory(make: Any) -> None:
    with FillRecorder() as recorder, uninitialised_on_meta():
        layer = make()
        table, named = torch.arange(3), torch.arange(3, device="cpu")
    assert recorder.filled == {}
    assert all(p.is_meta for p in layer.parameters())
    assert (table.is_meta, named.is_meta, torch.arange(3).is_meta) == (True, False, False)


def test_no_random_number_is_drawn() -> None:
    before = torch.get_rng_state()
    with without_initialisation():
        nn.TransformerEncoderLayer(8, 2, 16)
        nn.init.xavier_normal_(nn.Parameter(torch.empty(3, 3)))
        nn.init.kaiming_normal_(nn.Parameter(torch.empty(3, 3)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_large_layer_touches_no_memory() -> None:
    process = psutil.Process()
    resident_bytes = process.memory_info().rss
    with without_initialisation():
        layer = nn.Linear(1 << 13, 1 << 13, bias=False)
    assert layer.weight.nbytes == 1 << 28
    assert process.memory_info().rss - resident_bytes < 1 << 25


def test_a_real_model_is_built_whole() -> None:
    with without_initialisation():
        module, inputs = FAMILIES["wan"]()
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        assert module(**inputs).sample.abs().max() == 0


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.empty(3).fill_(2.0))
        self.register_buffer("drawn", torch.empty(3).normal_())

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_buffers_are_computed() -> None:
    torch.manual_seed(3)
    with without_initialisation():
        module = WithTable()
    torch.manual_seed(3)
    assert torch.equal(module.drawn, torch.empty(3).normal_())
    assert module.table.tolist() == [2.0] * 3


def test_outside_and_after_an_error_all_is_as_ever() -> None:
    with pytest.raises(RuntimeError, match="halfway"), without_initialisation():
        raise RuntimeError("halfway")
    torch.manual_seed(5)
    first = nn.Linear(4, 4).weight
    torch.manual_seed(5)
    assert torch.equal(nn.Linear(4, 4).weight, first)
    assert first.abs().max() <= 0.5


def test_tables_of_filters_on_the_meta_device_are_as_torch_makes_them() -> None:
    """torch decomposes these in Python there: half of the time in which the vocoder of Kandinsky 6 was built."""
    numbers = torch.arange(6)
    calls: dict[str, Callable[[], Tensor]] = {
        "floats": lambda: torch.sinc(2.0 * (torch.arange(-3, 3) + 0.5)),
        "half": lambda: torch.sinc(torch.arange(6, dtype=torch.float16).view(2, 3)),
        "numbers": lambda: torch.sinc(torch.arange(4)),
        "window": lambda: torch.kaiser_window(12, beta=4.7, periodic=False),
        "another dtype": lambda: torch.kaiser_window(8, True, 3.0, dtype=torch.float64),
        "on the CPU": lambda: torch.kaiser_window(8, periodic=False, device="cpu"),
        "of a tensor on the CPU": lambda: torch.sinc(numbers),
    }
    for name, call in calls.items():
        with torch.device("meta"):
            expected = call()
        with uninitialised_on_meta():
            made = call()
        assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device), name
        assert made.is_meta or torch.equal(made, expected), name
