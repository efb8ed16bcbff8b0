"""Weight deltas as values: what to add to which parameter, and how strongly.

A `PatchSet` is frozen and has a digest; device weights are a function of (host weights, patch set), so taking a patch
off is uploading again. Knows tensors, not files nor modules.

Shape legend: O output rows, I the flattened rest of a weight, R rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Protocol, TypeAlias

from torch import Tensor

from pool.spec import UNPATCHED

#: takes a float32 (or float64) copy of a weight that it may write into, and returns the patched weight
WeightFunction: TypeAlias = Callable[[Tensor], Tensor]


class PatchValue(Protocol):
    """One kind of delta."""

    #: bytes that applying it takes on the device beside the weight itself
    @property
    def working_bytes(self) -> int: ...

    def add_to(self, weight_OI: Tensor, strength: float) -> None:
        """Add `strength` times the delta to `weight_OI`, a contiguous float32 or float64 view of the rows that the
        patch is for, in place and on that tensor's device."""
        ...


@dataclass(frozen=True, slots=True)
class LowRank:
    """A LoRA delta: `scale * up @ down`, with convolution kernels flattened into the columns.

    Tensors stay on the host, in storage dtype; they cross the bus each time the patch is computed.
    """

    up_OR: Tensor
    down_RI: Tensor
    scale: float

    @property
    def working_bytes(self) -> int:
        """Both factors, in storage dtype and in float32."""
        return sum(f.nbytes + 4 * f.numel() for f in (self.up_OR, self.down_RI))

    def add_to(self, weight_OI: Tensor, strength: float) -> None:
        """See `PatchValue.add_to`."""
        up_OR = self.up_OR.to(device=weight_OI.device).to(weight_OI.dtype)
        down_RI = self.down_RI.to(device=weight_OI.device).to(weight_OI.dtype)
        weight_OI.addmm_(up_OR, down_RI, alpha=strength * self.scale)


@dataclass(frozen=True, slots=True)
class WeightPatch:
    """One delta for rows of one parameter.

    parameter  full name in the module, "mid_block.attentions.0.proj_in.weight"
    identity   names the value for the digest: the file's hash and the name inside it
    row_start  first output row that the delta is for; `rows` of them
    """

    parameter: str
    identity: str
    value: PatchValue = field(compare=False)
    strength: float
    row_start: int
    rows: int

    def __call__(self, weight: Tensor) -> Tensor:
        """`weight` with the delta added; writes into its argument."""
        rows = weight.narrow(0, self.row_start, self.rows)
        self.value.add_to(rows.view(self.rows, -1), self.strength)
        return weight


@dataclass(frozen=True)
class PatchSet:
    """The patches that a clone wants, in order. Equal digests mean equal weights."""

    patches: tuple[WeightPatch, ...] = ()

    @cached_property
    def digest(self) -> str:
        """12 hexadecimal digits; `UNPATCHED` for the empty set."""
        return self._digest_of(self.patches)

    @cached_property
    def _by_parameter(self) -> Mapping[str, tuple[WeightPatch, ...]]:
        grouped: dict[str, tuple[WeightPatch, ...]] = {}
        for patch in self.patches:
            grouped[patch.parameter] = (*grouped.get(patch.parameter, ()), patch)
        return MappingProxyType(grouped)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters that are touched."""
        return frozenset(self._by_parameter)

    def functions(self, parameter: str) -> tuple[WeightPatch, ...]:
        """The patches of one parameter, in order; each is a `WeightFunction`."""
        return self._by_parameter.get(parameter, ())

    def digest_for(self, parameters: Iterable[str]) -> str:
        """Digest of only those patches that touch `parameters`: equal when these need not be touched anew."""
        return self._digest_of(p for name in sorted(parameters) for p in self.functions(name))

    def with_patches(self, patches: Iterable[WeightPatch]) -> PatchSet:
        """A set that applies `patches` after the ones here."""
        return PatchSet((*self.patches, *patches))

    @staticmethod
    def _digest_of(patches: Iterable[WeightPatch]) -> str:
        lines = [f"{p.parameter}|{p.identity}|{p.strength!r}|{p.row_start}|{p.rows}" for p in patches]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12] if lines else UNPATCHED
