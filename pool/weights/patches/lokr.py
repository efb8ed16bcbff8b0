"""LoKr: a delta that is a Kronecker product, with either factor decomposed or full. Formulas: LyCORIS.

Upstream cannot compute a LoKr with a core on current torch (its Kronecker product refuses strided factors); this one
can.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from modelpool.pool.weights.patches.additive import FromFactors, columns_of
from modelpool.pool.weights.patches.loha import tucker
from modelpool.pool.weights.patches.weight_patch import Shape, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class KroneckerFactor:
    """One factor: full, or `a @ b`, or a core between them.

    full  (o, i) or (o, i, kernel..), or None
    a     (o, R), with a core (R, o);  b  (R, i..), with a core (R, i);  core  (R, R, kernel..)
    """

    full: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    core: Tensor | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the computed factor."""
        if self.full is not None:
            return tuple(self.full.shape)
        assert self.a is not None
        assert self.b is not None
        if self.core is not None:
            return (self.a.shape[1], self.b.shape[1], *self.core.shape[2:])
        return self.a.shape[0], columns_of(tuple(self.b.shape))

    @property
    def rank(self) -> int | None:
        """The inner size of a decomposed factor; None for a full one."""
        return None if self.b is None else int(self.b.shape[0])

    def compute(self, like: Tensor) -> Tensor:
        """Return the factor in the dtype and on the device of `like`."""
        if self.full is not None:
            return to_working(self.full, like)
        assert self.a is not None
        assert self.b is not None
        a, b = to_working(self.a, like), to_working(self.b, like)
        return a.flatten(1) @ b.flatten(1) if self.core is None else tucker(to_working(self.core, like), a, b)


@dataclass(frozen=True, slots=True)
class LoKr(FromFactors):
    """`scale * kron(outer, inner)`. Convolution kernels belong to the inner factor."""

    outer: KroneckerFactor
    inner: KroneckerFactor
    scale: float

    @property
    def working_bytes(self) -> int:
        """The factors, the delta and a copy of it in the weight's order."""
        rows, columns = self.matrix
        tensors = [t for f in (self.outer, self.inner) for t in (f.full, f.a, f.b, f.core)]
        return working_bytes(*tensors) + 4 * 3 * rows * columns

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        outer, inner = self.outer.shape, self.inner.shape
        return outer[0] * inner[0], columns_of(outer) * columns_of(inner)

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        outer_oi = self.outer.compute(like).flatten(1) * self.scale
        inner_pj = self.inner.compute(like).flatten(1)
        return (outer_oi[:, None, :, None] * inner_pj[None, :, None, :]).reshape(shape)
