"""The random numbers of one image, independent of device and batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.values.core.argument_checks import whole_number

SEEDS = range(2**64)


def checked_seed(seed: Any) -> int:
    """Return `seed` as an int. Raises UnusableField if it is not a whole number, or outside `SEEDS`."""
    # never `seed in SEEDS`: for anything but an int, a range compares each of its numbers
    return whole_number("seed", seed, "a whole number from 0 to 2**64 - 1", SEEDS.start, SEEDS.stop - 1)


#: the largest seed
_LAST_SEED = 2**64 - 1


def image_noise_seed(seed: int) -> int:
    """Return the seed of the noise that is added to a conditioning image, different from the seed of the run itself."""
    return _LAST_SEED - seed


class ImageNoise:
    """All random numbers of one image, in the order in which they are drawn: the initial noise, then each step.

    They come from the image's own CPU generator, in float32, one image at a time. They depend only on the seed: not on
    the device, the rest of the batch, or earlier runs. The initial noise equals ComfyUI's for the same seed and size.

    torch's CPU generator reads the low 32 bits of a seed, so seeds 2**32 apart give the same image, as in ComfyUI.
    Raises UnusableField for a seed that is not a whole number or outside `SEEDS`.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(checked_seed(seed))

    def draw(self, shape: Sequence[int]) -> Tensor:
        """Return the next standard normal numbers, on the CPU, in float32. Advances the generator."""
        return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float32, device="cpu")

    def draw_into(self, values: Tensor) -> None:
        """Fill `values`, contiguous float32 on the CPU, with what `draw` would return for their shape."""
        torch.randn(values.shape, generator=self._generator, out=values)
