"""LoRA: a delta that is a product of two thin matrices; single, summed, or with a core for convolutions.

Shape legend: O output rows, I the flattened other dimensions of a weight, R rank, K the flattened kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modelpool.pool.weights.patches.additive import FromFactors, columns_of
from modelpool.pool.weights.patches.weight_patch import (
    DeltaFunction,
    Offset,
    Shape,
    WeightPatch,
    to_working,
    working_bytes,
)


@dataclass(frozen=True, slots=True)
class LowRank(FromFactors):
    """`scale * up @ down`, with convolution kernels flattened into the columns.

    Tensors stay on the host, in storage dtype; they are transferred each time the patch is computed.
    """

    up_OR: Tensor
    down_RI: Tensor
    scale: float

    @property
    def working_bytes(self) -> int:
        """Both factors, in storage dtype and in float32."""
        return working_bytes(self.up_OR, self.down_RI)

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return self.up_OR.shape[0], self.down_RI.shape[1]

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        return (to_working(self.up_OR, like) * self.scale @ to_working(self.down_RI, like)).reshape(shape)

    def rows(self, start: int, count: int) -> LowRank:
        """See `Additive.rows`."""
        return LowRank(self.up_OR.narrow(0, start, count), self.down_RI, self.scale)

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`. Adds the product while computing it: one pass over the weight."""
        self.check(tuple(weight.shape))
        weight_OI = matrix_view(weight)
        if function is not None or weight_OI is None:
            return FromFactors.apply(self, weight, strength, function)
        up_OR, down_RI = to_working(self.up_OR, weight), to_working(self.down_RI, weight)
        weight_OI.addmm_(up_OR, down_RI, alpha=strength * self.scale)
        return weight


@dataclass(frozen=True, slots=True)
class LowRankSum:
    """Several consecutive low-rank patches of one parameter, as one product for each part of the weight.

    Costs as much as one patch of the summed rank: one pass over the weight, however many patches there are. `parts` are
    patches with `LowRank` values, no function and a model strength of 1.
    """

    parts: tuple[WeightPatch, ...]

    @property
    def working_bytes(self) -> int:
        """All factors, in storage dtype and twice in float32 (converted and scaled)."""
        return sum(p.value.working_bytes + 4 * v.up_OR.numel() for p, v in _low_rank(self.parts))

    @property
    def acts_at_zero(self) -> bool:
        """Not used: the strengths are inside."""
        return True

    def patched_shape(self, shape: Shape) -> Shape:
        """Return the same shape. Raises PatchFailed when a patch does not fit."""
        for part in self.parts:
            part.patched_shape(shape)
        return shape

    def apply(self, weight: Tensor, strength: float, function: DeltaFunction | None) -> Tensor:
        """See `PatchValue.apply`; uses the strengths of the parts."""
        assert strength == 1.0
        assert function is None
        self.patched_shape(tuple(weight.shape))
        by_offset: dict[Offset | None, list[WeightPatch]] = {}
        for part in self.parts:
            by_offset.setdefault(part.offset, []).append(part)
        for offset, patches in by_offset.items():
            target = weight if offset is None else offset.of(weight)
            target_OI = matrix_view(target)
            if target_OI is None or len(patches) == 1:
                for patch in patches:
                    patch.value.apply(target, patch.strength, None)
                continue
            up_OR, down_RI, scales_R = concatenated(patches)
            up_OR = to_working(up_OR, weight) * to_working(scales_R, weight)
            target_OI.addmm_(up_OR, to_working(down_RI, weight))
        return weight


@dataclass(frozen=True, slots=True)
class TuckerLowRank(FromFactors):
    """LoRA of a convolution with its kernel in a core: `scale * sum_mn up[o, m] core[m, n, k] down[n, i]`.

    up  (O, R, 1, ..);  down  (R, I, 1, ..);  core  (R, R, kernel..)
    """

    up: Tensor
    down: Tensor
    core: Tensor
    scale: float

    @property
    def working_bytes(self) -> int:
        """The factors, the contracted core, and the delta."""
        rank, channels, kernel = self.down.shape[0], self.down.shape[1], columns_of(tuple(self.core.shape[1:]))
        delta_bytes = 4 * (2 * rank * channels * kernel + self.up.shape[0] * channels * kernel)
        return working_bytes(self.up, self.down, self.core) + delta_bytes

    @property
    def matrix(self) -> tuple[int, int]:
        """See `FromFactors.matrix`."""
        return self.up.shape[0], self.down.shape[1] * columns_of(tuple(self.core.shape[1:]))

    def delta_of(self, shape: Shape, like: Tensor) -> Tensor:
        """See `FromFactors.delta_of`."""
        core_MNK = to_working(self.core, like).flatten(2)
        down_NI = to_working(self.down, like).flatten(1)
        down_MIK = torch.einsum("mnk,ni->mik", core_MNK, down_NI)
        up_OM = to_working(self.up, like).flatten(1)
        return (up_OM * self.scale @ down_MIK.flatten(1)).reshape(shape)

    def rows(self, start: int, count: int) -> TuckerLowRank:
        """See `Additive.rows`."""
        return TuckerLowRank(self.up.narrow(0, start, count), self.down, self.core, self.scale)


def is_plain(patch: WeightPatch) -> bool:
    """Whether `patch` is only a product of two factors, so that it can be summed with others."""
    return isinstance(patch.value, LowRank) and patch.strength_model == 1.0 and patch.function is None


def merge_low_rank(patches: Iterable[WeightPatch]) -> tuple[WeightPatch, ...]:
    """Return the same patches with each sequence of plain low-rank ones merged into one."""
    found: list[WeightPatch] = []
    run: list[WeightPatch] = []

    def close_run() -> None:
        if len(run) > 1:
            identity = " + ".join(patch.identity for patch in run)
            found.append(WeightPatch(run[0].parameter, identity, LowRankSum(tuple(run))))
        else:
            found.extend(run)
        run.clear()

    for patch in patches:
        if is_plain(patch):
            run.append(patch)
        else:
            close_run()
            found.append(patch)
    close_run()
    return tuple(found)


def concatenated(patches: Sequence[WeightPatch]) -> tuple[Tensor, Tensor, Tensor]:
    """Concatenate the factors of plain patches: up (O, R), down (R, I), and the factor of each rank, (R,).

    Computed on the host, in storage dtype if all have the same (else float32), so that two transfers suffice.
    """
    values = [(p, v) for p, v in _low_rank(patches)]
    scales = [p.strength * v.scale for p, v in values for _ in range(v.down_RI.shape[0])]
    return (
        _joined([v.up_OR for _, v in values], 1),
        _joined([v.down_RI for _, v in values], 0),
        torch.tensor(scales, dtype=torch.float64, device="cpu"),
    )


def rank_of(patches: Sequence[WeightPatch]) -> int | None:
    """Return the rank of the product that `factors_of` returns for a complete weight; None where it returns None."""
    if not patches or not all(is_plain(patch) for patch in patches):
        return None
    return sum(value.down_RI.shape[0] for _, value in _low_rank(patches))


def factors_of(patches: Sequence[WeightPatch], shape: Shape | None) -> tuple[Tensor, Tensor] | None:
    """Return up (O, R), including all strengths, and down (R, I), float32 on the host; their product is the sum of
    plain `patches`.

    None when one of them is not plain, or applies to a part of the weight and `shape` is not passed.
    """
    if not patches or not all(is_plain(p) and (p.offset is None or shape is not None) for p in patches):
        return None
    up_OR, down_RI, scales_R = concatenated([_widened(p, shape) for p in patches])
    return (up_OR.double() * scales_R).float(), down_RI.float()


def matrix_view(weight: Tensor) -> Tensor | None:
    """Return `weight` as a matrix of its rows, sharing memory; None when its strides do not allow it."""
    if weight.ndim == 2:
        return weight
    return weight.view(weight.shape[0], -1) if weight.is_contiguous() and weight.ndim > 2 else None


def _low_rank(patches: Iterable[WeightPatch]) -> list[tuple[WeightPatch, LowRank]]:
    found = []
    for patch in patches:
        assert isinstance(patch.value, LowRank), patch.name
        found.append((patch, patch.value))
    return found


def _joined(factors: list[Tensor], dim: int) -> Tensor:
    if len({f.dtype for f in factors}) > 1:
        factors = [f.float() for f in factors]
    return torch.cat(factors, dim)


def _widened(patch: WeightPatch, shape: Shape | None) -> WeightPatch:
    """Return a patch of the complete weight: factors padded with zeros outside the part of `patch`."""
    ((_, value),) = _low_rank([patch])
    if patch.offset is None or shape is None:
        return patch
    part = patch.offset
    value.check(part.shape_of(shape))
    if part.dim == 0:
        up_OR = value.up_OR.new_zeros(shape[0], value.up_OR.shape[1])
        up_OR.narrow(0, part.start, part.length).copy_(value.up_OR)
        return WeightPatch(patch.parameter, patch.identity, LowRank(up_OR, value.down_RI, value.scale), patch.strength)
    rank = value.down_RI.shape[0]
    down = value.down_RI.new_zeros(rank, *shape[1:])
    down.narrow(part.dim, part.start, part.length).copy_(value.down_RI.reshape(rank, *part.shape_of(shape)[1:]))
    widened = LowRank(value.up_OR, down.flatten(1), value.scale)
    return WeightPatch(patch.parameter, patch.identity, widened, patch.strength)
