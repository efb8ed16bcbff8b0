"""ComfyUI nodes that give texts a mask and a part of the steps, for one text or for a pair of them. Pure.

What they do with hooks is not here: a node that makes hooks is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from modelpool.actors.http.comfy.comfy_node_types import (
    NodeInput,
    NodeUnsupported,
    combo,
    is_one,
    link,
    node_row,
    number,
)
from modelpool.actors.http.comfy.comfy_text_nodes import combined, in_mask, in_part_of_steps
from modelpool.actors.http.comfy.comfy_values import TextValue


def _ranges(given: Mapping[str, Any]) -> tuple[Any, ...]:
    """A part of the steps, the one before it, and the one after it."""
    start, end = given["start_percent"], given["end_percent"]
    return (start, end), (0.0, start), (end, 1.0)


def _with_properties(given: Mapping[str, Any], value: TextValue) -> TextValue:
    """Return a text in a mask, or in a part of the steps, or both."""
    if given["mask"] is not None:
        value = in_mask(given, value)
    elif not is_one(given["strength"]):
        raise NodeUnsupported(f"strength: found {given['strength']:g}, expected 1 without a mask")
    return value if given["timesteps"] is None else in_part_of_steps(value, given["timesteps"])


def _each_with_properties(*names: str) -> Any:
    return lambda given: tuple(_with_properties(given, given[name]) for name in names)


def _combined_with_properties(*pairs: tuple[str, str]) -> Any:
    return lambda given: tuple(combined(given[name], _with_properties(given, given[new])) for name, new in pairs)


def _combined_pairs(given: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(combined(given[f"{side}_A"], given[f"{side}_B"]) for side in ("positive", "negative"))


_row = partial(node_row, category="conditioning")


def _texts(*names: str) -> tuple[NodeInput, ...]:
    return tuple(link(name, "CONDITIONING") for name in names)


_TEXT = "CONDITIONING"
_PROPERTIES = (
    number("strength", 1.0, 0.0, 10.0),
    combo("set_cond_area", ("default", "mask bounds")),
    link("mask", "MASK", is_required=False),
    link("timesteps", "TIMESTEPS_RANGE", is_required=False),
)
PAIR_NODES = (
    _row(
        "ConditioningTimestepsRange",
        (number("start_percent", 0.0, 0.0, 1.0), number("end_percent", 1.0, 0.0, 1.0)),
        _ranges,
        *["TIMESTEPS_RANGE"] * 3,
    ),
    _row(
        "ConditioningSetProperties",
        (*_texts("cond_NEW"), *_PROPERTIES),
        _each_with_properties("cond_NEW"),
        _TEXT,
    ),
    _row(
        "ConditioningSetPropertiesAndCombine",
        (*_texts("cond", "cond_NEW"), *_PROPERTIES),
        _combined_with_properties(("cond", "cond_NEW")),
        _TEXT,
    ),
    _row(
        "PairConditioningSetProperties",
        (*_texts("positive_NEW", "negative_NEW"), *_PROPERTIES),
        _each_with_properties("positive_NEW", "negative_NEW"),
        _TEXT,
        _TEXT,
    ),
    _row(
        "PairConditioningSetPropertiesAndCombine",
        (*_texts("positive", "negative", "positive_NEW", "negative_NEW"), *_PROPERTIES),
        _combined_with_properties(("positive", "positive_NEW"), ("negative", "negative_NEW")),
        _TEXT,
        _TEXT,
    ),
    _row(
        "PairConditioningCombine",
        _texts("positive_A", "negative_A", "positive_B", "negative_B"),
        _combined_pairs,
        _TEXT,
        _TEXT,
    ),
)
