"""8-bit floats become wider ones as torch converts them, bit for bit, and faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.weights.ops.cast import MIN_ELEMENTS, converted

NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDE = (torch.float16, torch.bfloat16, torch.float32)


def every_number(dtype: torch.dtype) -> Tensor:
    """All 256 bit patterns, often enough that the faster way is taken."""
    return torch.arange(256, dtype=torch.uint8).repeat(MIN_ELEMENTS // 256 + 1).view(dtype)


def same_bits(first: Tensor, second: Tensor) -> bool:
    width = torch.int16 if first.dtype.itemsize == 2 else torch.int32
    return first.dtype == second.dtype and torch.equal(first.view(width), second.view(width))


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("narrow", NARROW)
def test_every_number_is_what_torch_makes_of_it(narrow: torch.dtype, wide: torch.dtype) -> None:
    """In either place of a pair, and in the last block, which is not a whole one."""
    x = torch.cat([every_number(narrow), every_number(narrow).roll(1), every_number(narrow)[:258]])
    assert same_bits(converted(x, wide), x.to(wide))


@pytest.mark.parametrize("narrow", NARROW)
def test_what_is_not_in_pairs_or_in_order_is_right_too(narrow: torch.dtype) -> None:
    """Columns of a matrix, an odd number of numbers, and a view that begins in the middle of a pair."""
    table = every_number(narrow).reshape(256, -1)
    for x in (table.t(), table.flatten()[:-1], table.flatten()[1:], table.flatten()[1:-1]):
        assert same_bits(converted(x, torch.bfloat16).contiguous(), x.to(torch.bfloat16).contiguous())


def test_a_parameter_is_read_and_not_written() -> None:
    x = nn.Parameter(every_number(torch.float8_e4m3fn), requires_grad=False)
    before = x.detach().view(torch.uint8).clone()
    assert same_bits(converted(x, torch.float16), x.to(torch.float16))
    assert torch.equal(x.detach().view(torch.uint8), before)


def test_other_types_are_left_to_torch() -> None:
    x = torch.randn(MIN_ELEMENTS)
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
