"""8-bit floats become wider ones as torch converts them, bit for bit, and faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pool.ops.eight_bit_floats import LEAST_ELEMENTS, converted

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float16, torch.bfloat16, torch.float32)


def every_number(dtype: torch.dtype, *, finite: bool) -> Tensor:
    """All 256 bit patterns, or those of finite numbers, often enough that the faster way is taken."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype)
    if finite:
        numbers = numbers.view(torch.uint8)[torch.isfinite(numbers.float())].view(dtype)
    return numbers.repeat(LEAST_ELEMENTS // len(numbers) + 1)


def same_bits(first: Tensor, second: Tensor) -> bool:
    width = torch.int16 if first.dtype.itemsize == 2 else torch.int32
    return first.dtype == second.dtype and torch.equal(first.view(width), second.view(width))


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("narrow", NARROW)
def test_every_number_is_what_torch_makes_of_it(narrow: torch.dtype, wide: torch.dtype, finite: bool) -> None:
    """Subnormal ones and both zeros too; what is infinite or no number stays that."""
    x = every_number(narrow, finite=finite)
    made, expected = converted(x, wide), x.to(wide)
    if finite:
        assert same_bits(made, expected)
    assert torch.equal(made.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert torch.equal(made[known], expected[known])


@pytest.mark.parametrize("narrow", NARROW)
def test_a_weight_is_read_whatever_its_strides_and_not_written(narrow: torch.dtype) -> None:
    """Columns of a matrix, and a parameter of a module."""
    table = every_number(narrow, finite=True)[:LEAST_ELEMENTS].reshape(128, -1)
    before = table.view(torch.uint8).clone()
    turned = nn.Parameter(table.t(), requires_grad=False)
    assert same_bits(converted(turned, torch.bfloat16).contiguous(), turned.to(torch.bfloat16).contiguous())
    assert torch.equal(table.view(torch.uint8), before)


def test_other_types_are_left_to_torch() -> None:
    x = torch.randn(LEAST_ELEMENTS)
    assert converted(x, torch.float32) is x
    assert torch.equal(converted(x, torch.float16), x.half())


def test_it_is_faster() -> None:
    """Than torch's own conversion: the reason why it is there. If torch has become as fast, it may go."""

    def seconds(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(5):
            begun = time.process_time()
            call()
            taken.append(time.process_time() - begun)
        return min(taken)

    x = torch.randn(1 << 21).to(torch.float8_e4m3fn)
    assert seconds(lambda: converted(x, torch.float16)) < seconds(lambda: x.to(torch.float16))
