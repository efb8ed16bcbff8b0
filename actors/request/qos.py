"""On what terms an image is made: for whom, how urgently, and by when. Words of drivers into those of the scheduler.

Nothing here changes an image: seeds and digests leave these fields out (`TERMS`). Who somebody is, is taken on trust.
"""

from __future__ import annotations

import getpass
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from modelpool.pool.core.errors import unusable_field

if TYPE_CHECKING:
    pass

#: fields of a request that say nothing about the image
TERMS = frozenset({"priority", "user", "deadline"})
#: priorities reach from minus this to this
MOST_PRIORITY = 1000
MOST_USER_LENGTH = 100
#: longest deadline, in seconds: longer ones are mistakes, and cannot be told from none
MOST_DEADLINE_SECONDS = 366 * 86400.0

#: how a warning about deadlines begins
TOO_LATE = "deadline: "
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_TIME = re.compile(r"(?:(\d+(?:\.\d+)?)([dhms]))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")
_EXPECTED = "such as 90 (seconds), 45s, 10m, 2h or 1h30m, above 0 and up to 366d"


def parse_seconds(value: Any, name: str = "deadline", what: str = "a time") -> float:
    """90.0 of 90, '90', '90s' and '1m30s'. Raises UnusableField, naming the field, and `what` was expected."""
    seconds = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        text = value.strip().lower().replace(" ", "")
        if _TIME.fullmatch(text):
            seconds = sum(float(number) * _UNIT_SECONDS[unit] for number, unit in _PART.findall(text))
        elif re.fullmatch(r"\d+(\.\d+)?", text):
            seconds = float(text)
    if not 0 < seconds <= MOST_DEADLINE_SECONDS:
        raise unusable_field(name, value, f"{what} {_EXPECTED}")
    return seconds


def check_user(value: str) -> str:
    """A name that can be an account's. Raises UnusableField."""
    if (
        len(value) > MOST_USER_LENGTH
        or not all(c.isprintable() for c in value)
        or value != value.strip()
        or value == "*"
    ):
        raise unusable_field("user", value, f'up to {MOST_USER_LENGTH} printable characters, not "*", no spaces around')
    return value


def user_of_this_process() -> str:
    """Who runs this program, as the operating system says; "" where it does not."""
    try:
        return check_user(getpass.getuser())
    except (OSError, KeyError, ImportError, ValueError):  # what it raises differs by version and system
        return ""


def too_late(least_seconds: Sequence[float]) -> str:
    """What to tell of jobs that take at least so long each, which is longer than until their deadlines."""
    count = f"{len(least_seconds)} images" if len(least_seconds) > 1 else "an image"
    return (
        f"{TOO_LATE}{count} cannot be done in time: the runs alone should take {max(least_seconds):.1f} s. "
        "They are made all the same, as soon as can be"
    )
