"""DoRA: any adapter's delta with learned norms of the rows or columns of the result."""

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
    """`V * magnitude / norm`, with `V = W + delta`; interpolated with W by the strength.

    value        provides the delta, always at strength 1
    magnitude    (O, 1, ..): one number per row; or (1, I, 1, ..): one per input channel
    norm_of_sum  whether row norms are measured on V, as PEFT trains, or on W, as ComfyUI does. Norms over input
                 channels are always those of V.
    shape        of the weight that it is for
    """

    value: Additive
    magnitude: Tensor
    shape: Shape
    norm_of_sum: bool = False

    @property
    def working_bytes(self) -> int:
        """The value's bytes, V and the interpolation."""
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
        """See `Additive.rows`: possible with a magnitude per row."""
        if not self._by_rows:
            raise PatchFailed(
                "the DoRA magnitude is over input channels, across rows that belong to several parameters"
            )
        magnitude = self.magnitude.narrow(0, start, count)
        return DoRA(self.value.rows(start, count), magnitude, (count, *self.shape[1:]), self.norm_of_sum)

    def _recomposed(self, weight: Tensor, function: DeltaFunction | None) -> Tensor:
        delta = self.value.delta(weight)
        # cloned: the delta may be the factor itself, and the function may modify its argument
        patched = weight + (delta if function is None else function(delta.clone()))
        axis = 0 if self._by_rows else 1
        measured = weight if self._by_rows and not self.norm_of_sum else patched
        others = [d for d in range(weight.ndim) if d != axis]
        # an empty list of dimensions would mean all of them
        norm = torch.linalg.vector_norm(measured, dim=others, keepdim=True) if others else measured.abs()
        norm.add_(torch.finfo(weight.dtype).eps)
        magnitude = to_working(self.magnitude, weight).reshape(norm.shape)
        return patched.mul_(magnitude / norm)
