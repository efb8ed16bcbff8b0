"""Conditions of a run: texts with their weight hooks and other model inputs, and how they are batched.

Shape legend: B batch, L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.inference.conditioning.micro_conditioning import FRAME_RATE, IMAGE_PLACES, STEP, ModelKwargs

#: (hooks of a condition or None, noise level): sets the model's weights for the condition
ApplyHooks: TypeAlias = Callable[[object | None, float], None]

#: indices of the prompt and of the negative prompt among the conditions, as in "cond_or_uncond"
COND, UNCOND = 0, 1

#: model inputs that the host computes with: reading them from a device would wait for all of its work, in each step
HOST_INPUTS = frozenset({FRAME_RATE, IMAGE_PLACES, STEP})


def inputs_on(model_kwargs: ModelKwargs, device: torch.device) -> dict[str, Tensor]:
    """Return model inputs on `device`; `HOST_INPUTS` unchanged."""
    return {name: value if name in HOST_INPUTS else value.to(device) for name, value in model_kwargs.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Condition:
    """One text and the other inputs of a model.

    hooks   weight hooks while the model predicts for this text; None for the plain weights. Conditions with equal hooks
            may share a batch
    extras  other model inputs, each [B, ...]
    """

    context_BLD: Tensor
    hooks: object | None = None
    model_kwargs: ModelKwargs = field(default_factory=dict)

    def to(self, device: torch.device) -> Condition:
        """Return the same on `device`; numbers of `HOST_INPUTS` stay on the host."""
        return Condition(self.context_BLD.to(device), self.hooks, inputs_on(self.model_kwargs, device))


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Conditions that the model predicts together.

    context_BLD  their texts, concatenated
    members      their indices among the conditions, in the order of the batch
    extras       other model inputs, in the same order
    """

    context_BLD: Tensor
    members: tuple[int, ...]
    hooks: object | None
    model_kwargs: ModelKwargs = field(default_factory=dict)


def batches(conditions: Sequence[Condition | None], most: int = 0) -> tuple[Batch, ...]:
    """Return the batches that run `conditions`, the last condition first, with at most `most` in one (0: no limit);
    conditions that are None are skipped.

    Conditions share a batch if their hooks are equal and their texts have the same length, so that none is padded with
    tokens that the model was not trained on.
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
    return Batch(_joined(contexts), members, chosen[0].hooks, join_kwargs([c.model_kwargs for c in chosen]))


def join_kwargs(each: Sequence[ModelKwargs]) -> ModelKwargs:
    """Concatenate the other inputs of several conditions, which have the same names."""
    return {name: _joined([model_kwargs[name] for model_kwargs in each]) for name in each[0]}


def _shapes(condition: Condition) -> dict[str, torch.Size]:
    """Return the shapes that must be equal for conditions in one batch."""
    return {"": condition.context_BLD.shape, **{name: value.shape for name, value in condition.model_kwargs.items()}}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
