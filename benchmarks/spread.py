"""`spread`: median and range of figures, as the tables of the benchmarks have them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spread(figures: Sequence[float | None], digits: int = 2) -> str:
    """Return median, minimum and maximum, without the missing ones; empty if nothing was measured."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return ""
    return f"{statistics.median(known):.{digits}f} ({min(known):.{digits}f} - {max(known):.{digits}f})"
