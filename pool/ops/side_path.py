"""A low-rank product beside a linear layer: `x @ (W + up @ down).T` without touching W.

For weights that stay packed on the device, where adding a delta would mean unpacking or rounding them anew. Knows
neither patches nor formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from pool.ops.cast import cast

#: where an instance keeps its side path
SIDE_PATH_ATTRIBUTE = "_side_path"


@dataclass(frozen=True, slots=True)
class SidePath:
    """Factors of a delta for a weight of shape (O, I). They may be elsewhere and in another dtype; cast at use."""

    up_OR: Tensor
    down_RI: Tensor

    def added_to(self, out: Tensor, x: Tensor) -> Tensor:
        """`out`, the layer's result for `x` of shape (..., I), with the delta's share added. A new tensor."""
        low = F.linear(x, cast(self.down_RI, x.device, x.dtype))
        return out + F.linear(low, cast(self.up_OR, x.device, x.dtype))


def set_side_path(module: nn.Linear, side_path: SidePath | None) -> None:
    """Let `module` add `side_path` to every result from now on; None takes it off."""
    if side_path is None:
        module.__dict__.pop(SIDE_PATH_ATTRIBUTE, None)
    else:
        module.__dict__[SIDE_PATH_ATTRIBUTE] = side_path
