"""DoRA: any adapter's delta, with the length of each row or column of the result learned apart."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.core.errors import PatchFailed
from modelpool.pool.patches.additive import Additive
from modelpool.pool.patches.weight_patch import DeltaFunction, Shape, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class DoRA(Additive):
    """`V * magnitude / length`, with `V = W + delta`; blended with W by the strength.

    value          makes the delta; its own strength is always 1
    magnitude      (O, 1, ..): one number a row; or (1, I, 1, ..): one for each input channel
    length_of_sum  what the lengths of rows are measured on: V, as PEFT trains; otherwise W, as ComfyUI does. Lengths
                   over input channels are always those of V.
    shape          of the weight that it is for
    """

    value: Additive
    magnitude: Tensor
    shape: Shape
    length_of_sum: bool = False

    @property
    def working_bytes(self) -> int:
        """The value's own, V and the blend."""
        return self.value.working_bytes + working_bytes(self.magnitude) + 4 * 3 * math.prod(self.shape)

    @property
    def _by_rows(self) -> bool:
        return self.magnitude.shape[:1] == self.shape[:1]

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        self.value.check(shape)
        count = shape[0] if self._by_rows else (shape[1] if len(shape) > 1 else 1)
        if math.prod(shape) != math.prod(self.shape) or self.magnitude.numel() != count:
            raise PatchFailed(
                f"the DoRA magnitude has shape {tuple(self.magnitude.shape)}, expected one number for each row or each "
                f"input channel of a weight of shape {shape}"
            )

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        self.check(tuple(weight.shape))
        return weight.lerp_(self._recomposed(weight, function), strength)

    def delta(self, weight: Tensor) -> Tensor:
        """See `Additive.delta`."""
        return self._recomposed(weight, None) - weight

    def rows(self, start: int, count: int) -> DoRA:
        """See `Additive.rows`: when there is a magnitude for each row."""
        if not self._by_rows:
            raise PatchFailed(
                "the DoRA magnitude is over input channels, across rows that belong to several parameters"
            )
        magnitude = self.magnitude.narrow(0, start, count)
        return DoRA(self.value.rows(start, count), magnitude, (count, *self.shape[1:]), self.length_of_sum)

    def _recomposed(self, weight: Tensor, function: DeltaFunction | None) -> Tensor:
        delta = self.value.delta(weight)
        # the delta may be the factor itself, and the function may write into what it is given
        moved = weight + (delta if function is None else function(delta.clone()))
        axis = 0 if self._by_rows else 1
        measured = weight if self._by_rows and not self.length_of_sum else moved
        others = [d for d in range(weight.ndim) if d != axis]
        # no dimensions at all would mean all of them
        length = torch.linalg.vector_norm(measured, dim=others, keepdim=True) if others else measured.abs()
        length.add_(torch.finfo(weight.dtype).eps)
        magnitude = to_working(self.magnitude, weight).reshape(length.shape)
        return moved.mul_(magnitude / length)
