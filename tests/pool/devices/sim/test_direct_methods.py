"""Methods that run above torch's dispatcher do exactly what they do below it.

Proves for each of them: equal values, shapes, strides and bytes of use and of peak; the same refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.sim.operations import DIRECT_METHODS
from modelpool.pool.devices.sim.sim_layers import linear as direct_linear
from tests.each_case import each_case

INDEX = 6  # of a device that only tests of this folder use
DEVICE = "sim:6"

CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("__add__", "__mul__", "__sub__", "__truediv__", "add", "div", "mul", "sub"), (2.0,)),
    **dict.fromkeys(("__matmul__", "matmul"), (torch.ones(6, 2),)),
    **dict.fromkeys(("__neg__", "neg", "contiguous", "float", "flatten"), ()),
    **dict.fromkeys(("chunk", "split"), (2, -1)),
    **dict.fromkeys(("view", "reshape"), (2, 24)),
    "__getitem__": ((0, slice(1, 3), None),),
    "expand": (2, 4, 6),
    "mean": (-1,),
    "permute": (2, 0, 1),
    "pow": (2,),
    "squeeze": (0,),
    "to": (torch.float16,),
    "transpose": (0, 2),
    "unbind": (1,),
    "unflatten": (2, (3, 2)),
    "unsqueeze": (1,),
}


def _on(device: str, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _results(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@each_case("name", DIRECT_METHODS)
def test_a_direct_method_does_what_the_dispatcher_does(name: str) -> None:
    sim.configure(INDEX, 1 << 20)
    host = torch.arange(48.0).view(2, 4, 6)
    expected = _results(getattr(host, name)(*CALLS[name]))
    charges = []
    for grad_mode in (torch.no_grad, torch.enable_grad):  # above the dispatcher, and below it
        held = host.to(DEVICE)
        arguments = [_on(DEVICE, value) for value in CALLS[name]]
        before_bytes = sim.memory_stats(INDEX).used_bytes
        sim.reset_peak(INDEX)
        with grad_mode():
            made = _results(getattr(held, name)(*arguments))
        stats = sim.memory_stats(INDEX)
        charges.append((stats.used_bytes - before_bytes, stats.peak_bytes - before_bytes))
        for own, other in zip(made, expected, strict=True):
            assert str(own.device) == DEVICE
            assert (own.shape, own.stride(), own.dtype) == (other.shape, other.stride(), other.dtype)
            assert torch.equal(own.cpu(), other)
        assert [own is held for own in made] == [other is host for other in expected]
        del held, made, own, arguments
    assert charges[0] == charges[1]
    assert sim.memory_stats(INDEX).used_bytes == 0


@torch.no_grad()
def test_the_dispatcher_refuses_for_a_direct_method() -> None:
    for index in (INDEX, 5):
        sim.configure(index, 1 << 20)
    held = torch.ones(4, device=DEVICE)
    refused: list[Callable[[], object]] = [
        lambda: held + torch.ones(4),
        lambda: held * torch.ones(4, device="sim:5"),
        lambda: held.matmul(torch.ones(4)),
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match="same device"):
            call()
    with pytest.raises(TypeError):
        held + "x"
    sim.lose(INDEX)
    try:
        assert held.view(2, 2)[0].shape == (2,)
        for compute in (lambda: held + 1, lambda: held.mul(2), lambda: held.to(torch.float16)):
            with pytest.raises(torch.AcceleratorError):
                compute()
    finally:
        sim.recover(INDEX)


@torch.no_grad()
def test_a_direct_linear_layer_is_torchs_or_declines() -> None:
    sim.configure(INDEX, 1 << 20)
    x, weight, bias = (torch.randn(*shape) for shape in ((3, 8), (4, 8), (4,)))
    own = [tensor.to(DEVICE) for tensor in (x, weight, bias)]
    made = direct_linear(own[0], own[1], own[2])
    assert made is not None
    assert torch.equal(made.cpu(), linear(x, weight, bias))
    assert direct_linear(own[0], own[1].half(), own[2]) is None
    assert direct_linear(own[0], weight, bias) is None
    with torch.enable_grad():
        assert direct_linear(own[0], own[1], own[2]) is None
