"""`NodeListing`: a node of a user as doors show it: without its code. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class NodeSettingListing:
    """A setting of a node, as doors show it. `type` is bool, int, float, str, or a tuple of numbers."""

    name: str
    type: str
    default: Any
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeListing:
    """A node of a user, as doors show it: without its code."""

    name: str
    version: str
    title: str
    category: str
    inputs: tuple[tuple[str, str], ...]
    optional: tuple[str, ...]
    result: str
    settings: tuple[NodeSettingListing, ...]
