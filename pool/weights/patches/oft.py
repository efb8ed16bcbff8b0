"""OFT and BOFT: adapters that rotate a weight's rows, or its columns.

Formulas: LyCORIS and kohya's scripts for rows, PEFT and OneTrainer for columns. Cayley's formula maps the
skew-symmetric blocks that they store to rotations; early versions of LyCORIS store the rotations. The strength is
applied once: ComfyUI applies it twice, and rejects a BOFT without an alpha. An OFT's `rescale` is applied; ComfyUI
ignores it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.weights.patches.additive import Additive, columns_of
from modelpool.pool.weights.patches.weight_patch import DeltaFunction, Shape, add_delta, to_working, working_bytes


@dataclass(frozen=True, slots=True)
class OFT(Additive):
    """`rescale * (R W) - W`, with R block-diagonal over the output rows.

    blocks       (n, b, b), all of them, for n * b output rows
    rescale      (O, 1, ..) or None
    cap          limit of the norm of all blocks together; 0 for none
    shape        of the weight that it is for
    first_block  block of the weight's row 0
    is_part      whether the weight is only some of the rows that the blocks are for
    is_rotation  whether the blocks are rotations, not what Cayley's formula makes rotations of
    """

    blocks: Tensor
    rescale: Tensor | None
    cap: float
    shape: Shape
    first_block: int = 0
    is_part: bool = False
    is_rotation: bool = False

    @property
    def working_bytes(self) -> int:
        """The blocks during their inversion, the rotated weight, and copies."""
        return 5 * working_bytes(self.blocks) + working_bytes(self.rescale) + 4 * 4 * math.prod(self.shape)

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        rows = self.blocks.shape[0] * self.blocks.shape[-1]
        left_rows = rows - self.first_block * self.blocks.shape[-1]
        fits = 0 < shape[0] <= left_rows if self.is_part else shape[0] == rows
        if not fits or math.prod(shape) != math.prod(self.shape) or not _is_for_rows(self.rescale, shape[0]):
            raise PatchFailed(
                f"OFT blocks of shape {tuple(self.blocks.shape)}, from block {self.first_block} on, are for a weight "
                f"of shape {self.shape}, found one of shape {shape}"
            )

    def delta(self, weight: Tensor) -> Tensor:
        """See `Additive.delta`."""
        size = self.blocks.shape[-1]
        blocks = to_working(self.blocks, weight)
        rotation = blocks if self.is_rotation else cayley(blocks, self.cap)
        rotation = rotation.narrow(0, self.first_block, weight.shape[0] // size)
        rotated = torch.einsum("knm,knc->kmc", rotation, weight.reshape(-1, size, math.prod(weight.shape[1:])))
        rotated = rotated.reshape(weight.shape)
        if self.rescale is not None:
            rotated = rotated * _per_row(to_working(self.rescale, weight), weight.ndim)
        return rotated - weight

    def rows(self, start: int, count: int) -> OFT:
        """See `Additive.rows`: complete blocks only."""
        size = self.blocks.shape[-1]
        if start % size or count % size:
            raise PatchFailed(f"OFT blocks of {size} rows mix rows that belong to several parameters")
        rescale = None if self.rescale is None else self.rescale.reshape(-1).narrow(0, start, count)
        first_block = self.first_block + start // size
        return replace(self, rescale=rescale, shape=(count, *self.shape[1:]), first_block=first_block, is_part=True)


@dataclass(frozen=True, slots=True)
class InputOFT(Additive):
    """`W R - W`, with R block-diagonal over the columns; convolution kernels are flattened into the columns.

    numbers    (n, b * (b - 1) / 2): the numbers above the diagonals of skew-symmetric blocks, for n * b columns; or
               one block for all of them
    scale      factor of the numbers
    shape      of the weight that it is for
    terms      of the series for Cayley's formula `(I - Q) (I + Q)^-1` of the blocks Q; 0 for the exact rotation
    is_turned  whether each block of R is Cayley's formula, instead of its transpose
    """

    numbers: Tensor
    scale: float
    shape: Shape
    terms: int
    is_turned: bool

    @property
    def size(self) -> int:
        """The rows of a block."""
        return (1 + math.isqrt(1 + 8 * self.numbers.shape[1])) // 2

    @property
    def working_bytes(self) -> int:
        """The blocks and their powers, the rotated weight, and copies."""
        blocks_bytes = 4 * self.numbers.shape[0] * self.size**2
        return working_bytes(self.numbers) + 5 * blocks_bytes + 4 * 3 * math.prod(self.shape)

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        columns, size, count = columns_of(self.shape), self.size, self.numbers.shape[0]
        fits = columns % size == 0 and count in (1, columns // size)
        if not fits or math.prod(shape) != math.prod(self.shape) or shape[:1] != self.shape[:1]:
            raise PatchFailed(
                f"{count} OFT blocks of {size} columns for a weight of shape {self.shape}: found one of {shape}, "
                "expected as many columns as in all blocks"
            )

    def delta(self, weight: Tensor) -> Tensor:
        """See `Additive.delta`."""
        rotation = self._rotation(weight)
        rotation = rotation.expand(columns_of(self.shape) // self.size, -1, -1)
        blocks = weight.reshape(weight.shape[0], -1, self.size)
        rotated = torch.einsum("onk,nkc->onc" if self.is_turned else "onc,nkc->onk", blocks, rotation)
        return rotated.reshape(weight.shape) - weight

    def rows(self, start: int, count: int) -> InputOFT:
        """See `Additive.rows`."""
        return replace(self, shape=(count, *self.shape[1:]))

    def _rotation(self, like: Tensor) -> Tensor:
        numbers = to_working(self.numbers, like) * self.scale
        row, column = torch.triu_indices(self.size, self.size, 1, device=like.device)
        skew = numbers.new_zeros(numbers.shape[0], self.size, self.size)
        skew[:, row, column] = numbers
        skew = skew - skew.transpose(-1, -2)
        identity = torch.eye(self.size, dtype=skew.dtype, device=skew.device).expand_as(skew)
        if not self.terms:
            exact: Tensor = torch.linalg.solve(identity + skew, identity - skew, left=False)
            return exact
        # PEFT's series: I + 2 Q + 2 Q^2 .. + Q^n, with the last term once; 3 terms make the same as 4
        rotation, power, last = identity + 2 * skew, skew, max(3, self.terms - 1) if self.terms > 2 else 1
        for exponent in range(2, last + 1):
            power = power @ skew
            rotation = rotation + power * (1 if exponent == last else 2)
        return rotation


@dataclass(frozen=True, slots=True)
class BOFT(Additive):
    """`rescale * (B_m .. B_1 W) - W`, each B a rotation of the rows in blocks, shuffled like a butterfly.

    blocks   (m, n, b, b) for m stages over n * b output rows
    rescale  (O, 1, ..) or None
    cap      limit of the norm of all blocks together; 0 for none
    shape    of the weight that it is for

    At a strength below 1 every stage rotates less and `rescale` moves towards 1.
    """

    blocks: Tensor
    rescale: Tensor | None
    cap: float
    shape: Shape

    @property
    def working_bytes(self) -> int:
        """The blocks during their inversion, and the weight in one stage."""
        return 6 * working_bytes(self.blocks) + working_bytes(self.rescale) + 4 * 5 * math.prod(self.shape)

    def check(self, shape: Shape) -> None:
        """See `Additive.check`."""
        stages, count, size = self.blocks.shape[0], self.blocks.shape[1], self.blocks.shape[-1]
        fits = stages > 0 and size > 0 and size % 2 == 0 and count * size == shape[0] > 0
        # the last stage pairs the rows that are farthest apart
        fits = fits and shape[0] % (2**stages * (size // 2)) == 0 and _is_for_rows(self.rescale, shape[0])
        if math.prod(shape) != math.prod(self.shape) or not fits:
            raise PatchFailed(
                f"BOFT blocks of shape {tuple(self.blocks.shape)} are for a weight of shape {self.shape}, found one of "
                f"shape {shape}"
            )

    def delta(self, weight: Tensor) -> Tensor:
        """See `Additive.delta`."""
        return self.rotated(weight, 1.0) - weight

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`. Not linear in the strength."""
        self.check(tuple(weight.shape))
        return add_delta(weight, self.rotated(weight, strength) - weight, 1.0, function)

    def rotated(self, weight: Tensor, strength: float) -> Tensor:
        """Return the weight after all stages, each at `strength`."""
        size = self.blocks.shape[-1]
        rotation = cayley(to_working(self.blocks, weight), self.cap)
        identity = torch.eye(size, dtype=weight.dtype, device=weight.device)
        rotation = rotation * strength + (1.0 - strength) * identity
        rows_OC = weight.reshape(weight.shape[0], -1)
        for stage in range(rotation.shape[0]):
            half = 2**stage * (size // 2)
            shuffled = rows_OC.unflatten(0, (-1, 2, half)).transpose(1, 2).reshape(-1, size, rows_OC.shape[1])
            mixed = torch.einsum("bij,bjc->bic", rotation[stage], shuffled)
            rows_OC = mixed.flatten(0, 1).unflatten(0, (-1, half, 2)).transpose(1, 2).flatten(0, 2)
        rotated = rows_OC.reshape(weight.shape)
        if self.rescale is None:
            return rotated
        return rotated * (1.0 + strength * (_per_row(to_working(self.rescale, weight), weight.ndim) - 1.0))

    def rows(self, start: int, count: int) -> BOFT:
        """See `Additive.rows`: never, the stages mix all rows."""
        raise PatchFailed("BOFT mixes rows that belong to several parameters")


def cayley(blocks: Tensor, cap: float) -> Tensor:
    """Return rotations `(I + Q)(I - Q)^-1` with Q the skew part of each of `blocks`, which are scaled down to the norm
    `cap` if it is positive and they exceed it."""
    skew = blocks - blocks.transpose(-1, -2)
    if cap > 0.0:
        norm = torch.linalg.vector_norm(skew) + 1e-8
        skew = skew * (cap / norm).clamp(max=1.0)
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device)
    inverse: Tensor = torch.linalg.inv(identity - skew)
    return (identity + skew) @ inverse


def _per_row(rescale: Tensor, ndim: int) -> Tensor:
    return rescale.reshape(-1, *[1] * (ndim - 1))


def _is_for_rows(rescale: Tensor | None, rows: int) -> bool:
    return rescale is None or rescale.numel() == rows
