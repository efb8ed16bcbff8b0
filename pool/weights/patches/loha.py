"""LoHa: a delta that is the elementwise product of two low-rank ones. Formulas: LyCORIS.

Shape legend: O output rows, I input channels, R rank, K the flattened kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import FromFactors, columns_of
from modelpool.pool.weights.patches.weight_patch import Shape, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class HadamardFactor:
    """One of the two products: `a @ b`, or `sum_rs a[r, o] core[r, s, k] b[s, i]` with a core.

    a  (O, R), with a core (R, O);  b  (R, columns), with a core (R, I);  core  (R, R, kernel..)
    """

    a: Tensor
    b: Tensor
    core: Tensor | None = None

    @property
    def row_dim(self) -> int:
        """The dimension of `a` that counts output rows."""
        return 0 if self.core is None else 1

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        kernel = 1 if self.core is None else columns_of(tuple(self.core.shape[1:]))
        return self.a.shape[self.row_dim], columns_of(tuple(self.b.shape)) * kernel

    def rows(self, start: int, count: int) -> HadamardFactor:
        """Return the factor of some rows of the product."""
        return HadamardFactor(self.a.narrow(self.row_dim, start, count), self.b, self.core)

    def product(self, like: Tensor) -> Tensor:
        """Return the product, as a matrix of output rows."""
        a, b = to_working(self.a, like), to_working(self.b, like)
        return (
            a.flatten(1) @ b.flatten(1) if self.core is None else tucker(to_working(self.core, like), a, b).flatten(1)
        )


@dataclass(frozen=True, slots=True)
class LoHa(FromFactors):
    """`scale * first * second`, elementwise."""

    first: HadamardFactor
    second: HadamardFactor
    scale: float

    @property
    def working_bytes(self) -> int:
        """The factors, both products and intermediate results."""
        rows, columns = self.first.matrix
        tensors = (self.first.a, self.first.b, self.first.core, self.second.a, self.second.b, self.second.core)
        return working_bytes(*tensors) + 4 * 4 * rows * columns

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return self.first.matrix

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        FromFactors.check(self, shape)
        if self.first.matrix != self.second.matrix:
            raise PatchFailed(f"LoHa of a product of {self.first.matrix} and one of {self.second.matrix} numbers")

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        return self.first.product(like).mul_(self.second.product(like)).mul_(self.scale).reshape(shape)

    def rows(self, start: int, count: int) -> LoHa:
        """See `Additive.rows`."""
        return LoHa(self.first.rows(start, count), self.second.rows(start, count), self.scale)


def tucker(core: Tensor, a_RO: Tensor, b_RI: Tensor) -> Tensor:
    """Return `sum_rs a[r, o] core[r, s, k..] b[s, i]` as (O, I, kernel..), contiguous."""
    a_RO, b_RI = a_RO.flatten(1), b_RI.flatten(1)
    product = torch.einsum("rsk,ro,si->oik", core.flatten(2), a_RO, b_RI)
    return product.reshape(a_RO.shape[1], b_RI.shape[1], *core.shape[2:])
