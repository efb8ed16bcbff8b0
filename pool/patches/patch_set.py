"""The patches of one component as one value.

A `PatchSet` is frozen and has a digest; device weights are a function of (host weights, patch set), so taking a patch
off is uploading again. Knows tensors, not files nor modules.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

from torch import Tensor

from modelpool.pool.core.errors import PatchFailed
from modelpool.pool.patches.low_rank import LowRank, factors_of, in_sums
from modelpool.pool.patches.weight_patch import DeltaFunction, Offset, PatchValue, Shape, WeightPatch
from modelpool.pool.specs.spec import UNPATCHED

__all__ = ["DeltaFunction", "LowRank", "Offset", "PatchSet", "PatchValue", "WeightFunction", "WeightPatch"]

#: takes a float32 (or float64) copy of a weight that it may write into, and returns the patched weight
WeightFunction: TypeAlias = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PatchSet:
    """The patches that a clone wants, in order. Equal digests mean equal weights.

    Patches that change nothing (`WeightPatch.is_idle`) are kept in `patches` and are nowhere else: a weight that only
    such patches are for is not touched.
    """

    patches: tuple[WeightPatch, ...] = ()

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits; `UNPATCHED` when nothing is changed."""
        return _digest_of(p for p in self.patches if not p.is_idle)

    @cached_property
    def _by_parameter(self) -> Mapping[str, tuple[WeightPatch, ...]]:
        grouped: dict[str, list[WeightPatch]] = {}
        for patch in self.patches:
            if not patch.is_idle:
                grouped.setdefault(patch.parameter, []).append(patch)
        return MappingProxyType({parameter: tuple(patches) for parameter, patches in grouped.items()})

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters that are touched."""
        return frozenset(self._by_parameter)

    def patches_for(self, parameter: str) -> tuple[WeightPatch, ...]:
        """The patches that touch one parameter, in order."""
        return self._by_parameter.get(parameter, ())

    def functions(self, parameter: str) -> tuple[WeightPatch, ...]:
        """What to apply to one parameter, in order; each is a `WeightFunction`.

        Plain low-rank patches in a row are one: their cost does not grow by a pass over the weight for each. Merged and
        computed on the fly, a weight is the same bit for bit, for these are all there is.
        """
        return in_sums(self.patches_for(parameter))

    def low_rank_factors(self, parameter: str, shape: Shape | None = None) -> tuple[Tensor, Tensor] | None:
        """Up (O, R) and down (R, I), float32 on the host, when `W + up @ down` is all that the patches do.

        Strengths are in `up`; a convolution's kernel is flattened into I. None when some patch does something else,
        when there is none, or when one is about a part of the weight and the weight's `shape` is not given. They are
        made anew by each call: keep them.
        """
        return factors_of(self.patches_for(parameter), shape)

    def patched_shape(self, parameter: str, shape: Shape) -> Shape:
        """The shape that a parameter of `shape` has once patched. Raises PatchFailed when a patch does not fit."""
        for patch in self.patches_for(parameter):
            shape = patch.patched_shape(shape)
        return shape

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Make sure that every patch fits its parameter, among `shapes`. Raises PatchFailed for the first that does
        not."""
        for parameter, patches in self._by_parameter.items():
            if parameter not in shapes:
                raise PatchFailed(f"{patches[0].name}: found no such parameter among {len(shapes)}, expected one")
            self.patched_shape(parameter, shapes[parameter])

    def digest_for(self, parameters: Iterable[str]) -> str:
        """Digest of only those patches that touch `parameters`: equal when these need not be touched anew."""
        return _digest_of(p for name in sorted(parameters) for p in self.patches_for(name))

    def with_patches(self, patches: Iterable[WeightPatch]) -> PatchSet:
        """A set that applies `patches` after the ones here."""
        return PatchSet((*self.patches, *patches))


def _digest_of(patches: Iterable[WeightPatch]) -> str:
    lines = [patch.digest_line for patch in patches]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] if lines else UNPATCHED
