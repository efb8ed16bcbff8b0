"""Values in the configurations of diffusers folders, which are untrusted. Torch-free and pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.formats.strict_json import brief, finite_number

FolderConfig: TypeAlias = Mapping[str, Any]


def number_in(folder: str, config: FolderConfig, key: str, default: float) -> float:
    """Return the number `key` in the configuration of `folder`; `default` if it is missing. Raises
    UnknownArchitecture."""
    value = config.get(key)
    if value is None:
        return default
    number = finite_number(value)
    if number is None:
        raise wrong_value(folder, key, value, "a number")
    return number


def wrong_value(folder: str, key: str, found: object, expected: str) -> UnknownArchitecture:
    """Return the error for a value of `key` in the configuration of `folder`."""
    return UnknownArchitecture(
        f"configuration of {folder}: {key.lstrip('_')}: found {brief(found)}, expected {expected}"
    )
