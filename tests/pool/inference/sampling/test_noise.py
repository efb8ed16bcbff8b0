"""An image's random numbers are a function of its seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.inference.sampling.noise import SEEDS, ImageNoise
from modelpool.pool.values.core.errors import UnusableField

SHAPE = (4, 8, 8)


@settings(deadline=None)
@given(seed=st.integers(SEEDS.start, SEEDS.stop - 1), disturbance=st.integers(0, 2**32))
def test_noise_depends_on_the_seed_alone(seed: int, disturbance: int) -> None:
    """Neither the global generator nor another image drawn in between changes the numbers."""
    alone = ImageNoise(seed)
    expected = [alone.draw(SHAPE) for _ in range(3)]
    torch.manual_seed(disturbance)
    image, other = ImageNoise(seed), ImageNoise(seed ^ 1)
    for numbers in expected:
        assert torch.equal(image.draw(SHAPE), numbers)
        assert not torch.equal(other.draw(SHAPE), numbers)
        torch.randn(3)


def test_initial_noise_is_what_torch_and_comfyui_draw_for_the_seed() -> None:
    expected = torch.randn((1, *SHAPE), generator=torch.manual_seed(42))
    assert torch.equal(ImageNoise(42).draw((1, *SHAPE)), expected)


def test_leading_ones_of_the_shape_do_not_matter() -> None:
    assert torch.equal(ImageNoise(5).draw((1, *SHAPE))[0], ImageNoise(5).draw(SHAPE))


def test_draws_are_cpu_float32_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        numbers = ImageNoise(0).draw(SHAPE)
    finally:
        torch.set_default_dtype(torch.float32)
    assert (numbers.dtype, numbers.device.type) == (torch.float32, "cpu")
    assert torch.equal(numbers, ImageNoise(0).draw(SHAPE))


def test_the_first_and_the_last_seed_work_and_the_ones_beside_them_do_not() -> None:
    assert not torch.equal(ImageNoise(0).draw(SHAPE), ImageNoise(2**64 - 1).draw(SHAPE))
    for seed in (-1, 2**64):
        with pytest.raises(UnusableField, match=r"seed: found -?\d+, expected a whole number from 0 to 2\*\*64 - 1"):
            ImageNoise(seed)


class _NotToBeCompared:
    """A whole number, as numpy's are, that a scan of all numbers stumbles over at the first of them."""

    def __index__(self) -> int:
        return 7

    def __eq__(self, other: object) -> bool:
        raise AssertionError(f"compared with {other}: as long as all seeds take")


def test_a_seed_that_is_no_plain_int_is_not_looked_for_among_all_seeds() -> None:
    """Found in a review: numpy's numbers, floats and texts were compared with one seed after another, without end."""
    seven = ImageNoise(7).draw(SHAPE)
    for seed in (_NotToBeCompared(), np.int64(7), np.uint64(7)):
        assert torch.equal(ImageNoise(seed).draw(SHAPE), seven)  # type: ignore[arg-type]
    for wrong in (1.5, "7", None, True):
        with pytest.raises(UnusableField, match="seed: found"):
            ImageNoise(wrong)  # type: ignore[arg-type]


def test_seeds_are_read_modulo_2_to_the_32_as_torch_does() -> None:
    """Not wished for, but what every program that seeds torch on the CPU does; this fails if torch changes it."""
    assert torch.equal(ImageNoise(7).draw(SHAPE), ImageNoise(7 + 2**32).draw(SHAPE))
