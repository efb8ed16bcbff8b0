"""Layers that a simulated device computes above torch's dispatcher do exactly what they do below it.

Proves for every stock layer: equal values, shapes, strides and bytes of use and of peak, and that the others decline;
layers with weight functions, with weights elsewhere or of another dtype, on a lost device and with gradients keep to
the dispatcher, with its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.sim.sim_layers import layer as sim_layer
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.each_case import each_case

INDEX = 64  # of a simulated device that no other test uses
DEVICE = "sim:64"
Make = Callable[[], tuple[nn.Module, Tensor]]

TAKEN: dict[str, Make] = {
    "conv1d": lambda: (nn.Conv1d(4, 6, 3, padding=1, groups=2), torch.randn(2, 4, 7)),
    "conv2d": lambda: (nn.Conv2d(4, 6, 3, stride=2, padding="valid"), torch.randn(2, 4, 7, 8)),
    "conv2d, padding same": lambda: (nn.Conv2d(4, 6, 3, padding="same"), torch.randn(2, 4, 7, 8)),
    "conv2d, channels last": lambda: (
        nn.Conv2d(4, 6, 3, bias=False).to(memory_format=torch.channels_last),
        torch.randn(2, 4, 7, 8).contiguous(memory_format=torch.channels_last),
    ),
    "conv2d, unbatched": lambda: (nn.Conv2d(4, 6, 3), torch.randn(4, 7, 8)),
    "conv3d": lambda: (nn.Conv3d(2, 3, (1, 3, 3), dilation=(1, 2, 1), bias=False), torch.randn(1, 2, 3, 7, 8)),
    "group norm": lambda: (nn.GroupNorm(2, 6), torch.randn(2, 6, 4)),
    "group norm of a view": lambda: (nn.GroupNorm(2, 6), torch.randn(2, 4, 6).transpose(1, 2)),
    "layer norm": lambda: (nn.LayerNorm((3, 6)), torch.randn(2, 3, 6)),
    "layer norm of a view": lambda: (nn.LayerNorm(6, bias=False), torch.randn(2, 6, 3).transpose(1, 2)),
    "rms norm": lambda: (nn.RMSNorm(6, eps=1e-5), torch.randn(2, 3, 6)),
    "silu": lambda: (nn.SiLU(), torch.randn(2, 3, 6)),
    "silu of a view": lambda: (nn.SiLU(), torch.randn(2, 6, 3).transpose(1, 2)[:, 1:]),
}
DECLINED: dict[str, Make] = {
    "conv2d, circular": lambda: (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), torch.randn(2, 4, 7, 8)),
    "silu in place": lambda: (nn.SiLU(inplace=True), torch.randn(2, 3)),
    "another dtype": lambda: (nn.Conv1d(4, 6, 3).half(), torch.randn(2, 4, 7)),
}


class _Kernel:
    """The device's kernel, or none, and the number of calls that it took."""

    def __init__(self, is_used: bool) -> None:
        self.is_used, self.taken = is_used, 0

    def __call__(self, *call: Any) -> Tensor | None:
        out = sim_layer(*call) if self.is_used else None
        self.taken += out is not None
        return out


@pytest.fixture(autouse=True)
def _device() -> None:
    sim.configure(INDEX, 1 << 26)


def _computed(make: Make, kernel: _Kernel) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The result on the device and on the CPU, and the former's form and charges."""
    torch.manual_seed(1)
    module, x = make()
    module.requires_grad_(False)
    expected = module.float()(x.clone())
    torch.manual_seed(1)
    module, x = make()
    module = module.requires_grad_(False).to(DEVICE)
    swap_to_casting(module)
    given = x.to(DEVICE)
    sim.reset_peak(INDEX)
    sim.reset_counters(INDEX)
    before_bytes = sim.memory_stats(INDEX).used_bytes
    with torch.no_grad(), compute(torch.device(DEVICE), torch.float32, layer=kernel):
        out = module(given)
    stats = sim.memory_stats(INDEX)
    charges = (stats.used_bytes - before_bytes, stats.peak_bytes - before_bytes, stats.allocation_count)
    return out.cpu(), expected, (out.shape, out.stride(), out.dtype, out.device, charges)


@each_case("name", TAKEN)
def test_a_layer_above_the_dispatcher_is_the_one_below(name: str) -> None:
    above, below = _Kernel(is_used=True), _Kernel(is_used=False)
    out, expected, form = _computed(TAKEN[name], above)
    assert above.taken == 1
    assert torch.equal(out, expected)
    assert form == _computed(TAKEN[name], below)[2]


@each_case("name", DECLINED)
def test_a_call_of_several_operations_or_dtypes_is_declined(name: str) -> None:
    above = _Kernel(is_used=True)
    form = _computed(DECLINED[name], above)[2]
    assert above.taken == 0
    assert form == _computed(DECLINED[name], _Kernel(is_used=False))[2]


def _conv() -> nn.Module:
    module = nn.Conv1d(4, 6, 3).requires_grad_(False).to(DEVICE)
    swap_to_casting(module)
    return module


@torch.no_grad()
def test_the_dispatcher_decides_what_a_layer_may_not() -> None:
    sim.configure(INDEX + 1, 1 << 20)
    kernel, module, x = _Kernel(is_used=True), _conv(), torch.randn(2, 4, 7)
    held, elsewhere = x.to(DEVICE), x.to(f"sim:{INDEX + 1}")
    weight = module._parameters["weight"]
    assert sim_layer(nn.Module(), module, elsewhere, weight, None) is None
    assert sim_layer(nn.Module(), module, held, torch.ones(6, 4, 3), None) is None
    assert sim_layer(nn.Module(), module, x, weight, None) is None
    with compute(torch.device(DEVICE), torch.float32, layer=kernel):
        set_weight_functions(module, "weight", [lambda weight: weight * 2])
        doubled = module(held)
        set_weight_functions(module, "weight", [])
        with torch.enable_grad():
            module(held)
        with torch.inference_mode():
            assert module(held).is_inference()
        sim.lose(INDEX)
        try:
            with pytest.raises(torch.AcceleratorError):
                module(held)
        finally:
            sim.recover(INDEX)
        assert kernel.taken == 0
        assert not torch.equal(doubled.cpu(), module(held).cpu())
    assert kernel.taken == 1


class _Scaled(nn.Conv1d):
    """A convolution with arithmetic of its own, which reads a buffer."""

    def __init__(self) -> None:
        super().__init__(4, 6, 3)
        self.register_buffer("scale", torch.full((1, 1, 1), 2.0))

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight * self.scale, bias)


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return nn.functional.conv1d(nn.functional.pad(x, (1, 1), mode="circular"), weight, bias)


@torch.no_grad()
def test_a_convolution_with_arithmetic_of_its_own_is_declined() -> None:
    """Found in a review: of a class or, as images without seams are made, of one layer. A buffer that it reads was on
    another device than its input, and what it pads was not charged."""
    x, own, patched = torch.randn(2, 4, 7), _Scaled().requires_grad_(False), nn.Conv1d(4, 6, 3).requires_grad_(False)
    expected = [own(x), _padded(x, patched.weight, patched.bias)]
    patched.__dict__["_conv_forward"] = _padded
    held = x.to(DEVICE)
    for module, wanted in zip((own, patched), expected, strict=True):
        swap_to_casting(module.to(DEVICE))
        peaks = []
        for kernel in (_Kernel(is_used=True), _Kernel(is_used=False)):
            sim.reset_peak(INDEX)
            with compute(torch.device(DEVICE), torch.float32, layer=kernel):
                out = module(held)
            assert torch.equal(out.cpu(), wanted)
            assert kernel.taken == 0
            peaks.append(sim.memory_stats(INDEX).peak_bytes)
            del out
        assert peaks[0] == peaks[1]


@torch.no_grad()
def test_a_layer_without_memory_takes_nothing() -> None:
    kernel, module, x = _Kernel(is_used=True), _conv(), torch.randn(2, 4, 700).to(DEVICE)
    used_bytes = sim.memory_stats(INDEX).used_bytes
    sim.configure(INDEX, used_bytes + 100)
    with (
        compute(torch.device(DEVICE), torch.float32, layer=kernel),
        pytest.raises(torch.OutOfMemoryError, match="tried to allocate"),
    ):
        module(x)
    assert sim.memory_stats(INDEX).used_bytes == used_bytes
