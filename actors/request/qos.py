"""Quality of service of a request: user, priority and deadline; parsed and validated.

These fields do not change the output: seeds and digests leave them out (`QOS_FIELDS`). User names are not
authenticated.
"""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Sequence
from typing import Any

from modelpool.pool.values.core.errors import counted, unusable_field

#: request fields that do not change the output
QOS_FIELDS = frozenset({"priority", "user", "deadline", "preview"})
#: priorities range from minus this to this
MAX_PRIORITY = 1000
MAX_USER_LENGTH = 100
#: longest deadline in seconds; longer ones are mistakes, or mean no deadline
MAX_DEADLINE_SECONDS = 366 * 86400.0

#: prefix of warnings about deadlines
DEADLINE_PREFIX = "deadline: "
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)([dhms]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_EXPECTED = "such as 90 (seconds), 45s, 10m, 2h or 1h30m, above 0 and up to 366d"


def parse_seconds(value: Any, name: str = "deadline", what: str = "a time") -> float:
    """Return 90.0 for 90, '90', '90s' and '1m30s'. Raises UnusableField naming the field; `what` is expected."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(min(value, 2 * MAX_DEADLINE_SECONDS))  # the largest int cannot be converted
    elif isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        if _TIME.fullmatch(text):
            seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _PART.findall(text))
        elif re.fullmatch(r"\d+(\.\d+)?", text):
            seconds = float(text)
    if not 0 < seconds <= MAX_DEADLINE_SECONDS:
        raise unusable_field(name, value, f"{what} {_EXPECTED}")
    return seconds


def check_user(value: str) -> str:
    """Validate a user name. Raises UnusableField."""
    if (
        len(value) > MAX_USER_LENGTH
        or not all(c.isprintable() for c in value)
        or value != value.strip()
        or value == "*"
    ):
        expected = f'up to {MAX_USER_LENGTH} printable characters, not "*", without spaces at the ends'
        raise unusable_field("user", value, expected)
    return value


def user_of_this_process() -> str:
    """Return the operating system's name of the user who runs this process; "" if it has none."""
    try:
        return check_user(getpass.getuser())
    except (OSError, KeyError, ImportError, ValueError):  # the exception differs by Python version and platform
        return ""


def deadline_warning(least_seconds: Sequence[float]) -> str:
    """Return the warning for jobs that take at least `least_seconds`, longer than until their deadlines."""
    count = counted(len(least_seconds), "image") if len(least_seconds) > 1 else "an image"
    return (
        f"{DEADLINE_PREFIX}{count} cannot be finished in time: their stages take at least {max(least_seconds):.1f} s; "
        "the jobs still run, as early as possible"
    )
