"""Builds the errors of request fields that a model requires or does not support."""

from __future__ import annotations

from modelpool.pool.values.core.errors import UnusableField


def unsupported_field(field: str, model: str, reason: str, found: object = None) -> UnusableField:
    """Return the error of a field that `model` does not support; `reason` continues "which ..."."""
    value = "" if found is None else f"found {found!r}, "
    return UnusableField(f"{field}: {value}not supported by model {model!r}, which {reason}")


def missing_field(field: str, reason: str) -> UnusableField:
    """Return the error of a field that must be set; `reason` explains why, as a separate clause."""
    return UnusableField(f"{field}: missing; {reason}")
