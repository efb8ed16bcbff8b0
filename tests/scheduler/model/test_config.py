"""Numbers outside the bounds are refused, by name."""

from __future__ import annotations

import math

import pytest

from modelpool.pool.values.core.errors import UnusableField
from modelpool.scheduler.decisions.placement.registry import PLACEMENTS
from modelpool.scheduler.model.config import PLACEMENT_NAMES, SchedulerConfig


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("max_attempts", 0),
        ("window", 0),
        ("overtaking_limit", 0),
        ("kept_results", -1),
        ("start_backoff_seconds", -0.5),
        # found in a review: with a timeout of nan every run was stopped, since nothing is at least nan
        ("run_timeout_seconds", math.nan),
        ("run_timeout_seconds", math.inf),
        ("quarantine_seconds", math.inf),
        ("stop_grace_seconds", math.nan),
        ("max_attempts", True),
        ("run_timeout_seconds", True),
        ("kept_results", False),
        ("send_ahead_seconds", 60.1),
    ],
)
def test_a_number_outside_its_range_is_refused_by_name(field, found) -> None:
    with pytest.raises(UnusableField, match=field):
        SchedulerConfig(**{field: found})


def test_an_unknown_placement_is_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="arrival_order"):
        SchedulerConfig(placement="soon")


def test_every_placement_has_its_name() -> None:
    assert sorted(PLACEMENT_NAMES) == sorted(PLACEMENTS)
