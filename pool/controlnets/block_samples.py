"""What ControlNets say together: sums of samples, and behind which blocks of a model each goes.

Knows tensors and the table of kinds; calls nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.conditioning.micro_conditioning import Residuals
from modelpool.pool.controlnets.kinds import ControlKind, Spread
from modelpool.pool.guidance.controlled_transformer import BehindSome


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """What one or several ControlNets say in one call. `kind` says how it is spread over the blocks of a model; None
    where there is a sample for each block by now."""

    samples: Residuals
    kind: ControlKind | None

    def to(self, dtype: torch.dtype) -> Said:
        """The same in `dtype`."""
        return Said({name: [one.to(dtype) for one in own] for name, own in self.samples.items()}, self.kind)

    def plus(self, other: Said, blocks: Mapping[str, int]) -> Said:
        """Both at once, for a model with so many `blocks` of each sort. As few samples as before where both go behind
        the same blocks."""
        counts = [{name: len(own) for name, own in said.samples.items()} for said in (self, other)]
        if self.kind is not other.kind or counts[0] != counts[1]:
            # those that go behind some blocks alone go behind the same where there are as many of them
            return Said(_sums(self.spread(blocks), other.spread(blocks)), None)
        return Said(_sums(self.samples, other.samples), self.kind)

    def spread(self, blocks: Mapping[str, int]) -> Residuals:
        """A sample for each of so many `blocks`; some are there several times, and take no more memory for it."""
        if self.kind is None:
            return {name: own if isinstance(own, BehindSome) else list(own) for name, own in self.samples.items()}
        return {
            # a list of its own for each call: HunyuanDiT takes samples off its end
            name: _over(own, blocks[name], self.kind.spread) if name in blocks else list(own)
            for name, own in self.samples.items()
        }

    @property
    def held_bytes(self) -> int:
        """Of all samples, each counted once."""
        each = {id(one): one for own in self.samples.values() for one in own}
        return sum(one.numel() * one.itemsize for one in each.values())


def blocks_of(kind: ControlKind, model: nn.Module) -> dict[str, int]:
    """How many blocks of each sort `model` has, by what is said to them."""
    found: Any = model  # diffusers is not typed
    return {name: len(getattr(found, blocks)) for name, blocks in kind.blocks.items()}


def _over(own: Sequence[Tensor], blocks: int, spread: Spread | None) -> Sequence[Tensor]:
    """Samples behind so many blocks."""
    if spread is None:
        apart = max(1, blocks // len(own))
        return BehindSome({place * apart: one for place, one in enumerate(own)})
    return [own[spread(place, len(own), blocks)] for place in range(blocks)]


def _sums(one: Residuals, other: Residuals) -> dict[str, Sequence[Tensor]]:
    """Sample by sample; what only one says is left as it is. Those that are there several times are added once."""
    found: dict[str, Sequence[Tensor]] = {}
    for name in (*one, *(name for name in other if name not in one)):
        if name not in one or name not in other:
            found[name] = one[name] if name in one else other[name]
            continue
        own, others = one[name], other[name]
        if isinstance(own, BehindSome) and isinstance(others, BehindSome):
            found[name] = own.plus(others)
            continue
        known: dict[tuple[int, int], Tensor] = {}
        sums = []
        for a, b in zip(own, others, strict=True):
            if (id(a), id(b)) not in known:
                known[id(a), id(b)] = a + b
            sums.append(known[id(a), id(b)])
        found[name] = sums
    return found
