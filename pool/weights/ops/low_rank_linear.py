"""Adds a low-rank product to the result of a linear layer: `x @ (W + up @ down).T` without changing W.

For weights that stay packed on the device, where adding a delta would require unpacking, or rounding again. Knows
neither patches nor formats.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from modelpool.pool.weights.ops.cast import cast_kept

#: attribute of an instance with its low-rank path
LOW_RANK_ATTRIBUTE = "_low_rank_path"


@dataclass(frozen=True, slots=True)
class LowRankPath:
    """Factors of a delta for a weight of shape (O, I). They may be on another device or in another dtype; cast at use,
    and kept on the device for the run if there is room."""

    up_OR: Tensor
    down_RI: Tensor

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the delta's contribution to `out`, the layer's new result for `x` of shape (..., I). Returns `out`.

        In place: no other tensor of the size of `out` is allocated.
        """
        low_NR = F.linear(x, cast_kept(self.down_RI, x.device, x.dtype)).reshape(-1, self.down_RI.shape[0])
        up_OR = cast_kept(self.up_OR, x.device, x.dtype)
        if not out.is_contiguous():
            return out.add_((low_NR @ up_OR.t()).view(out.shape))
        out.view(-1, out.shape[-1]).addmm_(low_NR, up_OR.t())
        return out


def set_low_rank_path(module: nn.Linear, path: LowRankPath | None) -> None:
    """Make `module` add `path` to every result from now on; None removes it.

    It replaces the weight's functions, which stay for code that reads the weight without calling the layer.
    """
    if path is None:
        module.__dict__.pop(LOW_RANK_ATTRIBUTE, None)
    else:
        module.__dict__[LOW_RANK_ATTRIBUTE] = path
