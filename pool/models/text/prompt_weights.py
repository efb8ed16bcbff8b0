"""Parses prompt weights in the notation of A1111 and ComfyUI.

    (word)        1.1 times
    ((word))      1.21 times: brackets multiply
    (word:1.3)    1.3 times; inside other brackets, multiplied with theirs
    \\( \\)         literal brackets; a backslash before anything else is text

Unpaired brackets are text, and so is a number without text to weigh, as in `(:3)`. Torch-free; knows no tokens.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

from modelpool.pool.values.core.errors import unusable_field

#: factor of a pair of brackets without a number
BRACKET_WEIGHT = 1.1
#: pairs of brackets in each other; 100 of them multiply a weight by 13,781
MAX_BRACKETS = 1000
#: prompts with remembered parts: each is read for several encoders
_REMEMBERED = 8

_SIGNIFICANT = re.compile(r"\\[()]|[()]")
# possessive, so that a long invalid number takes linear and not quadratic time
_NUMBER_AT_END = re.compile(r":\s*+([+-]?(?:\d++(?:\.\d*+)?|\.\d++))\s*+$")


@dataclass(frozen=True, slots=True)
class WeightedText:
    """A part of a prompt and its weight; 1 is plain."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class _Open:
    """A paired opening bracket and its factor."""

    factor: float


class _Close(Enum):
    """The closing bracket of an `_Open`."""

    BRACKET = ")"


_Item: TypeAlias = str | _Open | _Close


@lru_cache(maxsize=_REMEMBERED)
def parse_weights(text: str) -> tuple[WeightedText, ...]:
    """Return the parts of `text` with their weights, in order. Neighbours differ in weight; no part is empty.

    Linear in the length of the text for any nesting.
    Raises UnusableField for a weight that overflows, and for too many brackets in each other.
    """
    pieces: list[tuple[str, float]] = []
    weights = [1.0]
    for item in _items(text):
        match item:
            case _Open(factor):
                weights.append(weights[-1] * factor)
                if len(weights) > MAX_BRACKETS + 1:
                    raise unusable_field("prompt", f"more than {MAX_BRACKETS} brackets in each other", "fewer")
            case _Close():
                weights.pop()
            case str():
                pieces.append((item, weights[-1]))
    parts = []
    for weight, group in groupby(((t, w) for t, w in pieces if t), key=lambda piece: piece[1]):
        part = WeightedText("".join(piece for piece, _ in group), weight)
        if not math.isfinite(weight):
            raise unusable_field("prompt weight", weight, f"a finite weight for {part.text!r}")
        parts.append(part)
    return tuple(parts)


def _items(text: str) -> list[_Item]:
    """Split `text` at its brackets: paired ones become separate items, the others are text."""
    items: list[_Item] = []
    unpaired: list[int] = []
    place = 0
    for found in _SIGNIFICANT.finditer(text):
        items.append(text[place : found.start()])
        place = found.end()
        if found[0] == "(":
            unpaired.append(len(items))
            items.append("(")  # text, unless its closing bracket is found
        elif found[0] == ")" and unpaired:
            begin = unpaired.pop()
            items[begin] = _Open(_take_number(items, begin))
            items.append(_Close.BRACKET)
        else:
            items.append(found[0][-1])
    items.append(text[place:])
    return items


def _take_number(items: list[_Item], begin: int) -> float:
    """Return the factor of the bracket at `begin`, which ends with the last item, and remove its number."""
    tail: list[str] = []
    while len(items) > begin + 1 and isinstance(last := items[-1], str):
        tail.append(last)
        items.pop()
    text = "".join(reversed(tail))
    found = _NUMBER_AT_END.search(text)
    has_content = len(items) > begin + 1 or (found is not None and found.start() > 0)
    items.append(text[: found.start()] if found and has_content else text)
    return float(found[1]) if found and has_content else BRACKET_WEIGHT
