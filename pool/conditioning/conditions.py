"""What guides a run: texts with the weight hooks that belong to them, and which of them the model can see at once.

Knows neither model nor sampler.

Shape legend: B batch, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.conditioning.micro_conditioning import Extras

#: (hooks of a condition or None, noise level): make the model's weights what they are to be for it
ApplyHooks: TypeAlias = Callable[[object | None, float], None]

#: places of the prompt and of the negative prompt among conditions, and what "cond_or_uncond" calls them
COND, UNCOND = 0, 1


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """One text.

    hooks   what the model's weights depend on while it predicts for this text; None for plain weights. Conditions with
            equal hooks may run together
    extras  what else the model is told, each [B, ...]
    """

    context_BLD: Tensor
    hooks: object | None = None
    extras: Extras = field(default_factory=dict)

    def to(self, device: torch.device) -> Condition:
        """The same on `device`."""
        extras = {name: value.to(device) for name, value in self.extras.items()}
        return Condition(self.context_BLD.to(device), self.hooks, extras)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Conditions that the model sees at once.

    context_BLD  their texts one after the other
    members      their places among the conditions, in the order of the batch
    extras       what else the model is told, in the same order
    """

    context_BLD: Tensor
    members: tuple[int, ...]
    hooks: object | None
    extras: Extras = field(default_factory=dict)


def batches(conditions: Sequence[Condition | None], most: int = 0) -> tuple[Batch, ...]:
    """The batches that run `conditions`, the last condition first, at most `most` of them in one (0: as many as can);
    None runs in none.

    Conditions go together when their hooks are equal and their texts equally long, so that none is padded with what the
    model was not trained on.
    """
    groups: list[list[int]] = []
    for place in reversed(range(len(conditions))):
        condition = conditions[place]
        if condition is None:
            continue
        for group in groups:
            if len(group) == most:
                continue
            first = conditions[group[0]]
            assert first is not None
            if first.hooks == condition.hooks and _shapes(first) == _shapes(condition):
                group.append(place)
                break
        else:
            groups.append([place])
    return tuple(_batch(conditions, tuple(group)) for group in groups)


def _batch(conditions: Sequence[Condition | None], members: tuple[int, ...]) -> Batch:
    chosen = [c for c in (conditions[place] for place in members) if c is not None]
    contexts = [c.context_BLD for c in chosen]
    return Batch(_joined(contexts), members, chosen[0].hooks, joined_extras([c.extras for c in chosen]))


def joined_extras(each: Sequence[Extras]) -> Extras:
    """What several conditions are told beside their texts, all by the same names, one after the other in a batch."""
    return {name: _joined([extras[name] for extras in each]) for name in each[0]}


def _shapes(condition: Condition) -> dict[str, torch.Size]:
    """What must be equal of conditions that run together."""
    return {"": condition.context_BLD.shape, **{name: value.shape for name, value in condition.extras.items()}}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
