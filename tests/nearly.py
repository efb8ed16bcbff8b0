"""Equal but for the last digits.

The same module on the same weights gives other last digits where a weight lies at another place in memory: kernels of
some processors choose by its alignment in which order they add. What a wrong weight changes is far more.
"""

from __future__ import annotations

from torch import Tensor
from torch.testing import assert_close

#: of the largest expected number. Float32 has seven digits, and some hundred numbers are added
SHARE = 1e-5


def assert_nearly(found: Tensor, expected: Tensor) -> None:
    """Assert that shapes and types are equal, and numbers within `SHARE` of the largest of `expected`."""
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    assert_close(found, expected, rtol=0.0, atol=SHARE * largest)
