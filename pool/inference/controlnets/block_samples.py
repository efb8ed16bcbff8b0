"""Residuals of ControlNets: their sums, and the blocks of a model to which they are added.

Knows tensors and the table of kinds; calls nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.inference.conditioning.micro_conditioning import Residuals
from modelpool.pool.inference.controlnets.controlnet_kinds import ControlKind, Spread
from modelpool.pool.inference.guidance.controlled_transformer import SparseResiduals


@dataclass(frozen=True, slots=True, eq=False)
class ControlResiduals:
    """The residuals of one or several ControlNets in one call. `kind` defines how they are spread over the blocks of a
    model; None if there is one for each block already."""

    samples: Residuals
    kind: ControlKind | None

    def to(self, dtype: torch.dtype) -> ControlResiduals:
        """Return the same in `dtype`."""
        return ControlResiduals(
            {name: [one.to(dtype) for one in samples] for name, samples in self.samples.items()}, self.kind
        )

    def plus(self, other: ControlResiduals, blocks: Mapping[str, int]) -> ControlResiduals:
        """Return the sum of both, for a model with these numbers of `blocks`. If both apply to the same blocks, the
        result has as few samples."""
        counts = [{name: len(samples) for name, samples in residuals.samples.items()} for residuals in (self, other)]
        if self.kind is not other.kind or counts[0] != counts[1]:
            # residuals for some blocks only apply to the same blocks if there are equally many
            return ControlResiduals(_sums(self.spread(blocks), other.spread(blocks)), None)
        return ControlResiduals(_sums(self.samples, other.samples), self.kind)

    def spread(self, blocks: Mapping[str, int]) -> Residuals:
        """Return a residual for each of `blocks`; repeated ones share memory."""
        if self.kind is None:
            return {
                name: samples if isinstance(samples, SparseResiduals) else list(samples)
                for name, samples in self.samples.items()
            }
        return {
            # a new list for each call: HunyuanDiT pops residuals from its end
            name: _over(samples, blocks[name], self.kind.spread) if name in blocks else list(samples)
            for name, samples in self.samples.items()
        }

    @property
    def held_bytes(self) -> int:
        """Bytes of all residuals, each counted once."""
        each = {id(one): one for samples in self.samples.values() for one in samples}
        return sum(one.numel() * one.itemsize for one in each.values())


def blocks_of(kind: ControlKind, model: nn.Module) -> dict[str, int]:
    """Return the number of blocks of `model` for each kind of residual."""
    found: Any = model  # diffusers is not typed
    return {name: len(getattr(found, blocks)) for name, blocks in kind.blocks.items()}


def _over(samples: Sequence[Tensor], blocks: int, spread: Spread | None) -> Sequence[Tensor]:
    """Return the residuals for `blocks` blocks."""
    if spread is None:
        apart = max(1, blocks // len(samples))
        return SparseResiduals({place * apart: one for place, one in enumerate(samples)})
    return [samples[spread(place, len(samples), blocks)] for place in range(blocks)]


def _sums(one: Residuals, other: Residuals) -> dict[str, Sequence[Tensor]]:
    """Add residuals pairwise; those that only one has are kept. Repeated pairs are added once."""
    found: dict[str, Sequence[Tensor]] = {}
    for name in (*one, *(name for name in other if name not in one)):
        if name not in one or name not in other:
            found[name] = one[name] if name in one else other[name]
            continue
        samples, others = one[name], other[name]
        if isinstance(samples, SparseResiduals) and isinstance(others, SparseResiduals):
            found[name] = samples.plus(others)
            continue
        known: dict[tuple[int, int], Tensor] = {}
        sums = []
        for a, b in zip(samples, others, strict=True):
            if (id(a), id(b)) not in known:
                known[id(a), id(b)] = a + b
            sums.append(known[id(a), id(b)])
        found[name] = sums
    return found
