"""The number of GPUs of a request: parsed, and as the parameters of a task have it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.specs.gang import ANY_GPUS, DEGREES

AUTO: Literal["auto"] = "auto"
Gpus: TypeAlias = int | Literal["auto"]


def checked_gpus(value: Any) -> Gpus:
    """Return 2 for 2 and "2", and "auto". Raises UnusableField."""
    if isinstance(value, str) and value.strip().lower() == AUTO:
        return AUTO
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number not in DEGREES:
        raise unusable_field("gpus", value, f"auto, {', '.join(map(str, DEGREES))}")
    return number


def gpus_of_work(gpus: Gpus) -> int:
    """Return what `SampleParams.gpus` is for a request."""
    return ANY_GPUS if gpus == AUTO else 0 if gpus == 1 else int(gpus)
