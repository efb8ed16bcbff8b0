"""What guides a run: texts with the weight hooks that belong to them, and which of them the model can see at once.

Knows neither model nor sampler.

Shape legend: B batch, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

#: (hooks of a condition or None, noise level): make the model's weights what they are to be for it
ApplyHooks: TypeAlias = Callable[[object | None, float], None]

#: places of the prompt and of the negative prompt among conditions, and what "cond_or_uncond" calls them
COND, UNCOND = 0, 1


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """One text.

    hooks  what the model's weights depend on while it predicts for this text; None for plain weights. Conditions with
           equal hooks may run together
    """

    context_BLD: Tensor
    hooks: object | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Conditions that the model sees at once.

    context_BLD  their texts one after the other
    members      their places among the conditions, in the order of the batch
    """

    context_BLD: Tensor
    members: tuple[int, ...]
    hooks: object | None


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
            if first.hooks == condition.hooks and first.context_BLD.shape == condition.context_BLD.shape:
                group.append(place)
                break
        else:
            groups.append([place])
    return tuple(_batch(conditions, tuple(group)) for group in groups)


def _batch(conditions: Sequence[Condition | None], members: tuple[int, ...]) -> Batch:
    chosen = [c for c in (conditions[place] for place in members) if c is not None]
    contexts = [c.context_BLD for c in chosen]
    return Batch(contexts[0] if len(contexts) == 1 else torch.cat(contexts), members, chosen[0].hooks)
