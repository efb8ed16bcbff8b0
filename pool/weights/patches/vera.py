"""VeRA: two fixed random matrices that all layers share, scaled by a vector for each layer.

Source of the formula: "VeRA: Vector-based Random Matrix Adaptation" (Kopiczko et al., 2023), and the names of PEFT.

Shape legend: O output rows, I the other dimensions of a weight, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import FromFactors
from modelpool.pool.weights.patches.weight_patch import Shape, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class VeRA(FromFactors):
    """`diag(b) B diag(d) A`. The shared matrices are as large as the largest layer; each layer uses their first rows
    and columns.

    shared_B  (>= O, R);  shared_A  (R, >= I);  b_O, d_R  the layer's vectors
    """

    shared_B: Tensor
    shared_A: Tensor
    b_O: Tensor
    d_R: Tensor
    columns: int

    def __post_init__(self) -> None:
        """Raises PatchFailed when the shared matrices are too small for the layer."""
        rows, rank = self.b_O.shape[0], self.d_R.shape[0]
        fits = self.shared_A.shape[0] == self.shared_B.shape[1] == rank
        if not fits or self.shared_B.shape[0] < rows or self.shared_A.shape[1] < self.columns:
            raise PatchFailed(
                f"found vera_B {tuple(self.shared_B.shape)} and vera_A {tuple(self.shared_A.shape)}, expected at least "
                f"({rows}, {rank}) and ({rank}, {self.columns})"
            )

    @property
    def working_bytes(self) -> int:
        """The used part of both matrices, the vectors, and the scaled matrix."""
        up_OR, down_RI = self.shared_B[: len(self.b_O)], self.shared_A[:, : self.columns]
        return working_bytes(up_OR, down_RI, self.b_O, self.d_R) + 4 * up_OR.numel() + 4 * down_RI.numel()

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return self.b_O.shape[0], self.columns

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        up_OR = to_working(self.shared_B[: len(self.b_O)], like) * to_working(self.b_O, like)[:, None]
        down_RI = to_working(self.shared_A[:, : self.columns], like) * to_working(self.d_R, like)[:, None]
        return (up_OR @ down_RI).reshape(shape)

    def rows(self, start: int, count: int) -> VeRA:
        """See `Additive.rows`."""
        return replace(self, shared_B=self.shared_B[start:], b_O=self.b_O.narrow(0, start, count))
