"""Attention kernels: which are named for a device, that torch is told, and that everything is as before afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - torch's own name for it
from torch.overrides import TorchFunctionMode

from modelpool.pool.devices.capabilities import cuda_capabilities, host_capabilities
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.weights.ops.attention import (
    DEFAULT_PRIORITY,
    AttentionBackend,
    attention_priority,
    supports_kernel_priority,
    use_attention_kernels,
)
from modelpool.pool.weights.ops.attention_calls import torch_attention
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import build

CUDNN, FLASH, EFFICIENT, MATH = DEFAULT_PRIORITY
GIB = 1 << 30
CPU = torch.device("cpu")
Order = tuple[AttentionBackend, ...]


def enabled() -> dict[str, bool]:
    cuda = torch.backends.cuda
    return {
        CUDNN: cuda.cudnn_sdp_enabled(),
        FLASH: cuda.flash_sdp_enabled(),
        EFFICIENT: cuda.mem_efficient_sdp_enabled(),
        MATH: cuda.math_sdp_enabled(),
    }


def order() -> list[int]:
    return list(torch._C._get_sdp_priority_order())


@pytest.mark.parametrize(
    ("generation", "wanted", "expected"),
    [
        ((9, 0), DEFAULT_PRIORITY, (CUDNN, FLASH, EFFICIENT, MATH)),
        ((7, 5), DEFAULT_PRIORITY, (EFFICIENT, MATH)),
        ((3, 7), DEFAULT_PRIORITY, (MATH,)),
        ((8, 0), (FLASH,), (FLASH, MATH)),
        ((8, 0), (MATH, EFFICIENT, EFFICIENT), (EFFICIENT, MATH)),
        ((8, 0), (), (MATH,)),
        ((9, 0), None, (CUDNN, FLASH, EFFICIENT, MATH)),
        ((8, 9), None, (FLASH, EFFICIENT, CUDNN, MATH)),  # found in a review: cuDNN came first on every card
        ((7, 5), None, (EFFICIENT, MATH)),
    ],
)
def test_what_a_card_may_use(generation: tuple[int, int], wanted: Order | None, expected: Order) -> None:
    assert attention_priority(cuda_capabilities("a card", generation, GIB), wanted) == expected


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.SIM])
def test_elsewhere_there_is_nothing_to_choose(kind: DeviceKind) -> None:
    assert attention_priority(host_capabilities(kind, GIB)) == ()


@pytest.mark.parametrize("sets_priority", [True, False, None])
@pytest.mark.parametrize("priority", [(CUDNN, MATH), (EFFICIENT, FLASH, MATH), (MATH,)], ids=str)
def test_torch_is_told_and_restored(priority: Order, sets_priority: bool | None) -> None:
    before = enabled(), order()
    inside: list[tuple[dict[str, bool], list[int]]] = []

    def leave_halfway() -> None:
        with use_attention_kernels(priority, sets_priority):
            inside.append((enabled(), order()))
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        leave_halfway()
    ((switches, told),) = inside
    assert {backend for backend, on in switches.items() if on} == set(priority)
    if sets_priority is not False:
        names = {MATH: 0, FLASH: 1, EFFICIENT: 2, CUDNN: 3}
        assert told[: len(priority)] == [names[backend] for backend in priority]
    assert (enabled(), order()) == before


def test_no_priority_changes_nothing() -> None:
    before = enabled(), order()
    with use_attention_kernels(()):
        assert (enabled(), order()) == before


def test_this_torch_takes_an_order() -> None:
    assert supports_kernel_priority()


def test_a_context_governs_the_calls_inside_it() -> None:
    before = enabled()
    q = torch.randn(1, 2, 5, 8)
    expected = F.scaled_dot_product_attention(q, q, q)
    with compute(CPU, torch.float32, attention=(MATH,)):
        assert not enabled()[FLASH]
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), expected)
        with compute(CPU, torch.float32):
            assert not enabled()[FLASH], "a context that says nothing leaves the order that is in force"
    assert enabled() == before


class _Watch(TorchFunctionMode):
    """The kernels that are on at each call of attention."""

    def __init__(self) -> None:
        self.calls: list[set[str]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_attention or func is F.scaled_dot_product_attention:
            self.calls.append({backend for backend, on in enabled().items() if on})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["unet", "flux", "wan", "clip", "t5"])
def test_the_attention_of_diffusers_and_transformers_is_governed(family: str) -> None:
    case = build(family)
    swap_to_casting(case.module)
    with compute(CPU, torch.float32, attention=(EFFICIENT, MATH)), _Watch() as watch:
        case.run()
    assert all(kernels == {EFFICIENT, MATH} for kernels in watch.calls)
    assert watch.calls
