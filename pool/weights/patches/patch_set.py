"""The patches of one component as one immutable value.

A `PatchSet` has a digest; device weights are a function of (host weights, patch set), so removing a patch means
uploading again. Knows tensors, not files nor modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.values.specs.spec import UNPATCHED
from modelpool.pool.weights.patches.lora import LowRank, factors_of, merge_low_rank, rank_of
from modelpool.pool.weights.patches.weight_patch import DeltaFunction, Offset, PatchValue, Shape, WeightPatch

__all__ = ["DeltaFunction", "LowRank", "Offset", "PatchSet", "PatchValue", "WeightFunction", "WeightPatch"]

#: gets a float32 (or float64) copy of a weight, which it may modify, and returns the patched weight
WeightFunction: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PatchSet:
    """The patches of a clone, in order. Equal digests mean equal weights.

    Patches without effect (`WeightPatch.is_noop`) are kept in `patches` and ignored otherwise: weights with only such
    patches are not touched.
    """

    patches: tuple[WeightPatch, ...] = ()

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits; `UNPATCHED` when no weight is changed."""
        return _digest_of(p for p in self.patches if not p.is_noop)

    @cached_property
    def _by_parameter(self) -> Mapping[str, tuple[WeightPatch, ...]]:
        grouped: dict[str, list[WeightPatch]] = {}
        for patch in self.patches:
            if not patch.is_noop:
                grouped.setdefault(patch.parameter, []).append(patch)
        return MappingProxyType({parameter: tuple(patches) for parameter, patches in grouped.items()})

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters that are patched."""
        return frozenset(self._by_parameter)

    def patches_for(self, parameter: str) -> tuple[WeightPatch, ...]:
        """Return the patches of one parameter, in order."""
        return self._by_parameter.get(parameter, ())

    def functions(self, parameter: str) -> tuple[WeightPatch, ...]:
        """Return the functions to apply to one parameter, in order; each is a `WeightFunction`.

        Consecutive plain low-rank patches are merged into one: further ones need no pass over the weight. Merged
        weights and weights computed at each use are the same bit for bit, since both use these functions.
        """
        return merge_low_rank(self.patches_for(parameter))

    def low_rank_factors(self, parameter: str, shape: Shape | None = None) -> tuple[Tensor, Tensor] | None:
        """Return up (O, R) and down (R, I), float32 on the host, if the patches compute just `W + up @ down`.

        Strengths are in `up`; a convolution's kernel is flattened into I. None when some patch computes something else,
        when there is none, or when one applies to a part of the weight and the weight's `shape` is not passed. Computed
        by each call: cache them.
        """
        return factors_of(self.patches_for(parameter), shape)

    def rank(self, parameter: str) -> int | None:
        """Return the rank of the factors of `low_rank_factors` for a complete weight; None if there are none."""
        return rank_of(self.patches_for(parameter))

    def patched_shape(self, parameter: str, shape: Shape) -> Shape:
        """Return the shape of a parameter of `shape` after patching. Raises PatchFailed when a patch does not fit."""
        for patch in self.patches_for(parameter):
            shape = patch.patched_shape(shape)
        return shape

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise PatchFailed for the first patch that does not fit its parameter, among `shapes`."""
        for parameter, patches in self._by_parameter.items():
            if parameter not in shapes:
                raise PatchFailed(f"{patches[0].name}: found no such parameter among {len(shapes)}, expected one")
            self.patched_shape(parameter, shapes[parameter])

    def digest_for(self, parameters: Iterable[str]) -> str:
        """Return the digest of the patches of `parameters`: if it is equal, these need not be patched again."""
        return _digest_of(p for name in sorted(parameters) for p in self.patches_for(name))

    def with_patches(self, patches: Iterable[WeightPatch]) -> PatchSet:
        """Return a set that applies `patches` after the ones here."""
        return PatchSet((*self.patches, *patches))


def _digest_of(patches: Iterable[WeightPatch]) -> str:
    lines = [patch.digest_line for patch in patches]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] if lines else UNPATCHED
