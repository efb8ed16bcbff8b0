"""A low-rank product beside a linear layer: `x @ (W + up @ down).T` without touching W.

For weights that stay packed on the device, where adding a delta would mean unpacking or rounding them anew. Knows
neither patches nor formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.ops.cast import cast

#: where an instance keeps its side path
SIDE_PATH_ATTRIBUTE = "_side_path"


@dataclass(frozen=True, slots=True)
class SidePath:
    """Factors of a delta for a weight of shape (O, I). They may be elsewhere and in another dtype; cast at use."""

    up_OR: Tensor
    down_RI: Tensor

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the delta's share to `out`, the layer's fresh result for `x` of shape (..., I). Returns `out`.

        In place: beside `out` there is never another tensor of its size.
        """
        low_NR = F.linear(x, cast(self.down_RI, x.device, x.dtype)).reshape(-1, self.down_RI.shape[0])
        up_OR = cast(self.up_OR, x.device, x.dtype)
        if not out.is_contiguous():
            return out.add_((low_NR @ up_OR.t()).view(out.shape))
        out.view(-1, out.shape[-1]).addmm_(low_NR, up_OR.t())
        return out


def set_side_path(module: nn.Linear, side_path: SidePath | None) -> None:
    """Let `module` add `side_path` to every result from now on; None takes it off.

    It stands for the weight's functions, which stay for code that reads the weight without calling the layer.
    """
    if side_path is None:
        module.__dict__.pop(SIDE_PATH_ATTRIBUTE, None)
    else:
        module.__dict__[SIDE_PATH_ATTRIBUTE] = side_path
