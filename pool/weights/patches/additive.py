"""Base classes of adapters that add a delta to a weight: application, row slices, reshaping, padding.

The kinds of deltas are in the other modules of this package.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.keymaps.key_map import RowRange
from modelpool.pool.weights.patches.weight_patch import DeltaFunction, Shape, add_delta


class Additive(ABC):
    """A delta that may depend on the weight. Base of frozen values; see `PatchValue`."""

    __slots__ = ()

    @property
    @abstractmethod
    def working_bytes(self) -> int:
        """Upper bound of the device bytes that applying it needs besides the weight itself."""

    @property
    def acts_at_zero(self) -> bool:
        """False: a delta has no effect at strength 0."""
        return False

    @abstractmethod
    def check(self, shape: Shape) -> None:
        """Raise PatchFailed unless the delta fits a weight of `shape`."""

    @abstractmethod
    def delta(self, weight: Tensor) -> Tensor:
        """Return the delta at strength 1, in the shape, dtype and on the device of `weight`, which is not modified.

        It may share memory with the factors: do not write to it.
        """

    @abstractmethod
    def rows(self, start: int, count: int) -> Additive:
        """Return the delta for `count` rows of the weight, from `start` on; it applies to a weight of just these rows.

        Raises PatchFailed, with the reason, when these rows cannot be computed without the others.
        """

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the same shape. Raises PatchFailed when the delta does not fit it."""
        self.check(shape)
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        self.check(tuple(weight.shape))
        return add_delta(weight, self.delta(weight), strength, function)


class FromFactors(Additive):
    """A delta that does not depend on the weight: a matrix, reshaped to any weight with as many rows and columns."""

    __slots__ = ()

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the delta as a matrix."""

    @abstractmethod
    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """Return the delta in `shape`, in the dtype and on the device of `like`."""

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        if self.matrix != ((shape[0], columns_of(shape)) if shape else (1, 1)):
            rows, columns = self.matrix
            raise PatchFailed(f"{type(self).__name__}: a delta of {rows} x {columns} for a weight of shape {shape}")

    def delta(self, weight: Tensor) -> Tensor:
        """See `Additive.delta`."""
        return self.delta_of(tuple(weight.shape), weight)

    def rows(self, start: int, count: int) -> FromFactors:
        """See `Additive.rows`."""
        return RowSlice(self, start, count)


@dataclass(frozen=True, slots=True)
class RowSlice(FromFactors):
    """Some rows of a delta that can only be computed completely."""

    source: FromFactors
    start: int
    count: int

    @property
    def working_bytes(self) -> int:
        """Bytes of the complete delta."""
        return self.source.working_bytes

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return self.count, self.source.matrix[1]

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        delta = self.source.delta_of((self.source.matrix[0], *shape[1:]), like)
        return delta.narrow(0, self.start, self.count)


@dataclass(frozen=True, slots=True)
class ReshapedDelta(FromFactors):
    """A delta in the form of a checkpoint's tensor, for a parameter with the same numbers in another order."""

    source: FromFactors
    range: RowRange

    @property
    def working_bytes(self) -> int:
        """Bytes of the complete delta, and of a copy in the parameter's order."""
        return self.source.working_bytes + 4 * math.prod(self.range.source_shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`: in the parameter's order, computed on the meta device."""
        placed = self.range.place(torch.empty(self.range.source_shape, device="meta"))
        return placed.shape[0], columns_of(tuple(placed.shape))

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        self.source.check(self.range.source_shape)
        if math.prod(shape) != self.range.rows * columns_of(self.range.source_shape):
            raise PatchFailed(f"a delta of {self.range.rows} rows of {self.range.source_shape} for shape {shape}")

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        return self.range.place(self.source.delta_of(self.range.source_shape, like)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Padded:
    """A delta for a larger weight: the weight is padded with zeros at the end of each dimension.

    shape  of the weight that `value` is for
    """

    value: Additive
    shape: Shape

    @property
    def working_bytes(self) -> int:
        """The value's bytes, and the larger weight."""
        return self.value.working_bytes + 4 * math.prod(self.shape)

    @property
    def acts_at_zero(self) -> bool:
        """True: the shape changes at any strength."""
        return True

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the larger shape. Raises PatchFailed when it is not larger, or has other dimensions."""
        if len(shape) != len(self.shape) or any(old > new for old, new in zip(shape, self.shape, strict=True)):
            raise PatchFailed(f"found a weight of shape {shape}, expected one that fits into {self.shape}")
        self.value.check(self.shape)
        return self.shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        if tuple(weight.shape) != self.patched_shape(tuple(weight.shape)):
            larger = weight.new_zeros(self.shape)
            larger[tuple(slice(size) for size in weight.shape)] = weight
            weight = larger
        return self.value.apply(weight, strength, function)


def columns_of(shape: Shape) -> int:
    """The number of elements per row of a tensor of `shape`."""
    return math.prod(shape[1:])
