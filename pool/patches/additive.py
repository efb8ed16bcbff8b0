"""What adapters have in common: they add a delta to a weight.

Knows how a delta reaches a weight and which part of one a row range needs. The kinds are in the modules beside this
one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from modelpool.pool.core.errors import PatchFailed
from modelpool.pool.keymaps.key_map import RowRange
from modelpool.pool.patches.weight_patch import DeltaFunction, Shape, add_delta


class Additive(ABC):
    """A delta that may depend on the weight. Base of frozen values; see `PatchValue`."""

    __slots__ = ()

    @property
    @abstractmethod
    def working_bytes(self) -> int:
        """Bytes that applying it takes on the device beside the weight itself, at most."""

    @property
    def acts_at_zero(self) -> bool:
        """At strength 0 there is nothing left of a delta."""
        return False

    @abstractmethod
    def check(self, shape: Shape) -> None:
        """Raise PatchFailed unless the delta is one for a weight of `shape`."""

    @abstractmethod
    def delta(self, weight: Tensor) -> Tensor:
        """The delta at strength 1, in the shape, dtype and on the device of `weight`, which is not written.

        It may share memory with the factors: do not write.
        """

    @abstractmethod
    def rows(self, start: int, count: int) -> Additive:
        """The delta for `count` rows of the weight, from `start` on, given a weight of just these rows.

        Raises PatchFailed, with the reason, when these rows cannot be computed without the others.
        """

    def patched_shape(self, shape: Shape) -> Shape:
        """The same shape. Raises PatchFailed when the delta is not one for it."""
        self.check(shape)
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`."""
        self.check(tuple(weight.shape))
        return add_delta(weight, self.delta(weight), strength, function)


class FromFactors(Additive):
    """A delta that does not depend on the weight: a matrix, in the shape of whatever has as many rows and columns."""

    __slots__ = ()

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int]:
        """Output rows of the delta, and numbers in each."""

    @abstractmethod
    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """The delta in `shape`, in the dtype and on the device of `like`."""

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
        return SomeRows(self, start, count)


@dataclass(frozen=True, slots=True)
class SomeRows(FromFactors):
    """Rows of a delta that is made as a whole."""

    whole: FromFactors
    start: int
    count: int

    @property
    def working_bytes(self) -> int:
        """The whole delta's."""
        return self.whole.working_bytes

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return self.count, self.whole.matrix[1]

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        whole = self.whole.delta_of((self.whole.matrix[0], *shape[1:]), like)
        return whole.narrow(0, self.start, self.count)


@dataclass(frozen=True, slots=True)
class Placed(FromFactors):
    """A delta in the form of a checkpoint's tensor, for a parameter that keeps the same numbers in another order."""

    whole: FromFactors
    range: RowRange

    @property
    def working_bytes(self) -> int:
        """The whole delta's, and a copy of it in the parameter's order."""
        return self.whole.working_bytes + 4 * math.prod(self.range.source_shape)

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`: in the parameter's order, found without any numbers."""
        placed = self.range.place(torch.empty(self.range.source_shape, device="meta"))
        return placed.shape[0], columns_of(tuple(placed.shape))

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        self.whole.check(self.range.source_shape)
        if math.prod(shape) != self.range.rows * columns_of(self.range.source_shape):
            raise PatchFailed(f"a delta of {self.range.rows} rows of {self.range.source_shape} for shape {shape}")

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        return self.range.place(self.whole.delta_of(self.range.source_shape, like)).reshape(shape)


@dataclass(frozen=True, slots=True)
class Padded:
    """A delta for a larger weight: zeros are put after the rows, columns and so on that are there.

    shape  of the weight that `value` is for
    """

    value: Additive
    shape: Shape

    @property
    def working_bytes(self) -> int:
        """The value's own, and the larger weight."""
        return self.value.working_bytes + 4 * math.prod(self.shape)

    @property
    def acts_at_zero(self) -> bool:
        """The shape changes whatever the strength is."""
        return True

    def patched_shape(self, shape: Shape) -> Shape:
        """The larger shape. Raises PatchFailed when it is not larger, or has other dimensions."""
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

    def with_value(self, value: Additive, rows: int) -> Self:
        """The same for `rows` rows, which `value` is for."""
        return type(self)(value, (rows, *self.shape[1:]))


def columns_of(shape: Shape) -> int:
    """Numbers in each row of a tensor of `shape`."""
    return math.prod(shape[1:])
