"""The random numbers of one image.

Knows nothing of devices and batches, on purpose: see `ImageNoise`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.core.arguments import whole_number

SEEDS = range(2**64)


def checked_seed(seed: Any) -> int:
    """`seed` as a plain int. Raises UnusableField for what is no whole number or outside `SEEDS`."""
    # never `seed in SEEDS`: for what is no plain int a range compares number after number
    return whole_number("seed", seed, "a whole number from 0 to 2**64 - 1", SEEDS.start, SEEDS.stop - 1)


#: the largest seed
_LAST_SEED = 2**64 - 1


def seed_beside(seed: int) -> int:
    """The seed of the random numbers that are put on a given image, for a run of `seed`: others than its own."""
    return _LAST_SEED - seed


class ImageNoise:
    """All random numbers of one image, in the order in which they are drawn: the initial noise, then step by step.

    They come from the image's own CPU generator, as float32, one image at a time. So they depend on the seed
    alone: not on the device, on the images beside it, or on what ran before. The initial noise is what ComfyUI
    draws for the same seed and size.

    torch's CPU generator reads the low 32 bits of a seed, so seeds 2**32 apart give the same image, here as there.
    Raises UnusableField for a seed that is no whole number or outside `SEEDS`.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator(device="cpu").manual_seed(checked_seed(seed))

    def draw(self, shape: Sequence[int]) -> Tensor:
        """The next standard normal numbers, on the CPU, in float32. Advances the generator."""
        return torch.randn(tuple(shape), generator=self._generator, dtype=torch.float32, device="cpu")
