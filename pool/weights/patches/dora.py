"""DoRA: any adapter's delta with learned norms of the rows or columns of the result.

Formula: LyCORIS, PEFT and OneTrainer, which agree. ComfyUI measures the rows of the weight without the delta.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import Additive
from modelpool.pool.weights.patches.weight_patch import DeltaFunction, Shape, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class DoRA(Additive):
    """`V * magnitude / norm(V)`, with `V = W + delta`; interpolated with W by the strength.

    value      provides the delta, always at strength 1
    magnitude  (O,) or (O, 1, ..): one number per row; or (1, I, 1, ..): one per input channel
    shape      of the weight that it is for
    """

    value: Additive
    magnitude: Tensor
    shape: Shape

    @property
    def working_bytes(self) -> int:
        """The value's bytes, V and the interpolation."""
        return self.value.working_bytes + working_bytes(self.magnitude) + 4 * 3 * math.prod(self.shape)

    @property
    def _by_rows(self) -> bool:
        return tuple(self.magnitude.shape[:1]) == self.shape[:1] and self.magnitude.numel() == self.shape[0]

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        self.value.check(shape)
        columns = self.shape[1] if len(self.shape) > 1 else 1
        by_columns = tuple(self.magnitude.shape[:2]) == (1, columns) and self.magnitude.numel() == columns
        # the weight may have another form than in the checkpoint: a matrix for a convolution with a kernel of one
        fits = math.prod(shape) == math.prod(self.shape) and shape[:1] == self.shape[:1]
        if not fits or not (self._by_rows or by_columns):
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
        return DoRA(self.value.rows(start, count), self.magnitude.narrow(0, start, count), (count, *self.shape[1:]))

    def _recomposed(self, weight: Tensor, function: DeltaFunction | None) -> Tensor:
        delta = self.value.delta(weight)
        # cloned: the delta may be the factor itself, and the function may modify its argument
        patched = weight + (delta if function is None else function(delta.clone()))
        shaped = patched.reshape(self.shape)
        axis = 0 if self._by_rows else 1
        others = [d for d in range(shaped.ndim) if d != axis]
        # an empty list of dimensions would mean all of them
        norm = torch.linalg.vector_norm(shaped, dim=others, keepdim=True) if others else shaped.abs()
        norm.add_(torch.finfo(weight.dtype).eps)
        magnitude = to_working(self.magnitude, weight).reshape(norm.shape)
        return shaped.mul_(magnitude / norm).reshape(weight.shape)
