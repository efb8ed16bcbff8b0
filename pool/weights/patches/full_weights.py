"""Patch values that are full weights: differences, replacements, and other models."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import FromFactors, Padded, columns_of
from modelpool.pool.weights.patches.weight_patch import (
    DeltaFunction,
    Shape,
    WeightPatch,
    add_delta,
    expect_shape,
    to_working,
    working_bytes,
)

#: converts a weight in storage form to a plain floating point tensor, on its device
Convert: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Difference(FromFactors):
    """A delta stored as a full tensor."""

    tensor: Tensor

    @property
    def working_bytes(self) -> int:
        """The delta in storage dtype, in float32, and multiplied by the strength."""
        return working_bytes(self.tensor) + 4 * self.tensor.numel()

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return matrix_of(self.tensor)

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        return to_working(self.tensor, like).reshape(shape)

    def rows(self, start: int, count: int) -> Difference:
        """See `Additive.rows`."""
        return Difference(self.tensor.narrow(0, start, count))


def padded_difference(tensor: Tensor) -> Padded:
    """Return a delta for a weight that is first padded with zeros to the delta's shape."""
    return Padded(Difference(tensor), tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class Replacement:
    """Replaces the weight by another. Ignores the strength."""

    tensor: Tensor

    @property
    def working_bytes(self) -> int:
        """The weight in storage dtype and in float32."""
        return working_bytes(self.tensor)

    @property
    def acts_at_zero(self) -> bool:
        """True: the strength is ignored."""
        return True

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the same shape. Raises PatchFailed when the other weight has different rows or columns."""
        Difference(self.tensor).check(shape)
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        return weight.copy_(to_working(self.tensor, weight).reshape(self.patched_shape(tuple(weight.shape))))


@dataclass(frozen=True, slots=True)
class ModelDifference:
    """Another model's weight minus this one's unpatched weight.

    The difference is never stored: both may be views of mapped files. `convert` dequantizes either.
    """

    target: Tensor
    original: Tensor
    convert: Convert | None = None

    @property
    def working_bytes(self) -> int:
        """Both weights, converted, and their difference."""
        return working_bytes(self.target, self.original) + 3 * 4 * self.target.numel()

    @property
    def acts_at_zero(self) -> bool:
        """False: it has no effect at strength 0."""
        return False

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the same shape. Raises PatchFailed unless both weights have it."""
        expect_shape("the other model's weight", tuple(self.target.shape), shape)
        expect_shape("the original weight", tuple(self.original.shape), shape)
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        self.patched_shape(tuple(weight.shape))
        delta = _converted(self.target, weight, self.convert) - _converted(self.original, weight, self.convert)
        return add_delta(weight, delta, strength, function)


@dataclass(frozen=True, slots=True)
class PatchedWeight:
    """Another weight with its patches, added as a delta: the building block of model merging.

    Weights that are stored quantized come with a `convert`.
    """

    tensor: Tensor
    patches: tuple[WeightPatch, ...] = ()
    convert: Convert | None = None

    @property
    def working_bytes(self) -> int:
        """The weight, a copy to patch, its product with the strength, and the largest need of its patches."""
        weight_bytes = working_bytes(self.tensor) + 3 * 4 * self.tensor.numel()
        shape, largest_bytes = tuple(self.tensor.shape), 0
        for patch in self.patches:
            largest_bytes = max(largest_bytes, patch.working_bytes_for(shape))
            shape = patch.patched_shape(shape)
        return weight_bytes + largest_bytes

    @property
    def acts_at_zero(self) -> bool:
        """False: it has no effect at strength 0."""
        return False

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the same shape. Raises PatchFailed unless the other weight has it once patched."""
        found = tuple(self.tensor.shape)
        for patch in self.patches:
            found = patch.patched_shape(found)
        expect_shape("the other weight, patched,", found, shape)
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        self.patched_shape(tuple(weight.shape))
        other = _converted(self.tensor, weight, self.convert)
        if self.patches:
            other = other.clone()
            for patch in self.patches:
                other = patch(other)
        return add_delta(weight, other, strength, function)


def matrix_of(tensor: Tensor) -> tuple[int, int]:
    """Rows of `tensor` and elements per row; (1, 1) for a scalar."""
    return (tensor.shape[0], columns_of(tuple(tensor.shape))) if tensor.ndim else (1, 1)


def _converted(tensor: Tensor, like: Tensor, convert: Convert | None) -> Tensor:
    if convert is None:
        return to_working(tensor, like)
    converted = convert(tensor.to(like.device))
    if not converted.is_floating_point() or math.prod(converted.shape) == 0:
        raise PatchFailed(
            f"converting a weight gave {converted.dtype} of shape {tuple(converted.shape)}, expected plain numbers"
        )
    return converted.to(like.dtype)
