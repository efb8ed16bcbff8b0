"""A declared node of a user, for tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelpool.pool.inference.operations.own_nodes import CustomNode, node_setting


@dataclass(frozen=True)
class Shades:
    """Settings of every kind of tuple, and a text."""

    levels: tuple[float, ...] = node_setting((0.5,))
    sides: tuple[int, ...] = node_setting((4, 8))
    name: str = node_setting("")


def _same(settings: Any, inputs: Any) -> Any:
    return inputs["image"]


def shaded() -> CustomNode:
    """Return a node that returns its image."""
    return CustomNode("1", {"image": "image"}, "image", Shades, _same, _same)
