"""Converts values to JSON values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def plain_value(value: Any) -> Any:
    """Convert `value` to JSON values: dataclasses and mappings to objects, enum members to their values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(plain_value(key)): plain_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item) for item in value]
    return getattr(value, "value", value)
