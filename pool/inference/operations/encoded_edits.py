"""Edits of encoded texts: zero, one behind another, average.

An `Encoded` is one text. Combinations, areas, masks and ranges of steps are no tensors: they are in
`conditioning_parts`.

Shape legend: L tokens, D text width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from modelpool.pool.inference.operations.image_edits import NoSettings
from modelpool.pool.inference.operations.operation import ENCODED, Inputs, Operation, Size, Sizes, need, no_size
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.core.stage_params import Encoded


@dataclass(frozen=True, slots=True)
class Average:
    """The share of the first text."""

    strength: float


def _zero(params: NoSettings, inputs: Inputs) -> Encoded:
    """Return zeros instead of the states, the pooled embedding and further states; marks of tokens stay."""
    text: Encoded = inputs["text"]
    others = {name: np.zeros_like(value) if value.dtype.kind == "f" else value for name, value in text.others.items()}
    pooled_V = None if text.pooled_V is None else np.zeros_like(text.pooled_V)
    return Encoded(np.zeros_like(text.context_LD), pooled_V, others)


def _check(first: Encoded, second: Encoded) -> None:
    if first.others or second.others:
        names = ", ".join(sorted({*first.others, *second.others}))
        raise UnusableField(f"first, second: found texts with {names}, expected texts of states and a pooled embedding")
    if first.context_LD.shape[1:] != second.context_LD.shape[1:]:
        found, expected = second.context_LD.shape[-1], first.context_LD.shape[-1]
        raise UnusableField(f"second: found a text of width {found}, expected {expected}: the same text encoder")


def _joined(params: NoSettings, inputs: Inputs) -> Encoded:
    """Return the states of the second text behind those of the first, whose pooled embedding stays."""
    first, second = inputs["first"], inputs["second"]
    _check(first, second)
    return Encoded(np.concatenate([first.context_LD, second.context_LD]), first.pooled_V)


def _average_size(params: Average, sizes: Sizes) -> Size:
    need("strength", params.strength, 0, 1)
    return no_size(params, sizes)


def _averaged(params: Average, inputs: Inputs) -> Encoded:
    """Return first * strength + second * (1 - strength), states and pooled embedding. The second text is cut off, or
    continued with zeros, to the tokens of the first; a pooled embedding that only one has is taken from it."""
    first, second = inputs["first"], inputs["second"]
    _check(first, second)
    tokens = len(first.context_LD)
    other_LD = np.zeros_like(first.context_LD)
    other_LD[: len(second.context_LD)] = second.context_LD[:tokens]
    one_V, other_V = first.pooled_V, second.pooled_V
    pooled_V = other_V if one_V is None else one_V
    if one_V is not None and other_V is not None:
        pooled_V = _mixed(one_V, other_V, params.strength)
    return Encoded(_mixed(first.context_LD, other_LD, params.strength), pooled_V)


def _mixed(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32], share: float) -> npt.NDArray[np.float32]:
    return one * np.float32(share) + other * np.float32(1 - share)


def _row(name: str, params: type[Any], inputs: tuple[str, ...], run: Any, size: Any = no_size) -> Operation:
    return Operation(name, params, dict.fromkeys(inputs, ENCODED), ENCODED, run, size)


_TWO = ("first", "second")
ENCODED_EDITS = (
    _row("encoded_zero", NoSettings, ("text",), _zero),
    _row("encoded_concat", NoSettings, _TWO, _joined),
    _row("encoded_average", Average, _TWO, _averaged, _average_size),
)
