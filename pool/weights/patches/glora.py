"""GLoRA: a delta that depends on the weight, `W A + B`, with both matrices of low rank.

Two layouts are in use, with the factors of each product exchanged; `glora_of` distinguishes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import Additive, columns_of
from modelpool.pool.weights.patches.weight_patch import Shape, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class GLoRA(Additive):
    """`scale * (W in_a in_b + out_a out_b)`; the first product leaves convolution kernels unchanged.

    in_a  (I, R);  in_b  (R, I);  out_a  (O, R);  out_b  (R, columns): matrices of input channels I, output rows O
    """

    in_a: Tensor
    in_b: Tensor
    out_a: Tensor
    out_b: Tensor
    scale: float

    @property
    def working_bytes(self) -> int:
        """The factors, the two products and intermediate results."""
        rows, columns = self.out_a.shape[0], self.out_b.shape[1]
        between = rows * self.in_b.shape[0] * (columns // max(1, self.in_b.shape[1]))
        return working_bytes(self.in_a, self.in_b, self.out_a, self.out_b) + 4 * (4 * rows * columns + 2 * between)

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        if (
            len(shape) < 2
            or self.in_a.shape[0] != shape[1]
            or self.in_b.shape[1] != shape[1]
            or (self.out_a.shape[0], self.out_b.shape[1]) != (shape[0], columns_of(shape))
        ):
            found = ", ".join(str(tuple(t.shape)) for t in (self.in_a, self.in_b, self.out_a, self.out_b))
            raise PatchFailed(f"GLoRA factors of shapes {found} are not for a weight of shape {shape}")

    def delta(self, weight: Tensor) -> Tensor:
        """See `Additive.delta`."""
        channels_last = weight.transpose(1, -1)
        turned = channels_last @ to_working(self.in_a, weight) @ to_working(self.in_b, weight)
        added = (to_working(self.out_a, weight) @ to_working(self.out_b, weight)).reshape(weight.shape)
        return added.add_(turned.transpose(1, -1)).mul_(self.scale)

    def rows(self, start: int, count: int) -> GLoRA:
        """See `Additive.rows`."""
        return GLoRA(self.in_a, self.in_b, self.out_a.narrow(0, start, count), self.out_b, self.scale)


def glora_of(a1: Tensor, a2: Tensor, b1: Tensor, b2: Tensor, alpha: float | None, shape: Shape) -> GLoRA:
    """Return the adapter of the tensors `a1`, `a2`, `b1`, `b2` of a file, for a weight of `shape`.

    New layout: `W a1 a2 + b1 b2`; old: `W a2 a1 + b2 b1`. Where the shapes allow both, the weight is square and its
    size decides; if that does not decide either, the old one is used. Raises PatchFailed when neither fits.
    """
    a1, a2, b1, b2 = (t.flatten(1) for t in (a1, a2, b1, b2))
    fits_new = b2.shape[0] == b1.shape[1] == a1.shape[1] == a2.shape[0]
    fits_old = b2.shape[1] == b1.shape[0] == a1.shape[0] == a2.shape[1]
    if fits_old and (not fits_new or shape[:2] == (a2.shape[0], a2.shape[0])):
        rank = a1.shape[0]
        glora = GLoRA(a2, a1, b2, b1, 1.0 if alpha is None else alpha / rank)
    elif fits_new:
        rank = a2.shape[0]
        glora = GLoRA(a1, a2, b1, b2, 1.0 if alpha is None else alpha / rank)
    else:
        found = ", ".join(str(tuple(t.shape)) for t in (a1, a2, b1, b2))
        raise PatchFailed(f"GLoRA factors a1, a2, b1, b2 of shapes {found} share no rank")
    glora.check(shape)
    return glora
