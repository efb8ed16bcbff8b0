"""The placement policies by name, as the configuration selects them."""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.scheduler.decisions.placement.baseline_policies import arrival_order, least_loaded
from modelpool.scheduler.decisions.placement.expected_completion import soonest
from modelpool.scheduler.decisions.placement.placement_query import Placement

#: the keys are the names in `scheduler.model.config.PLACEMENT_NAMES`
PLACEMENTS: Mapping[str, Placement] = {
    "soonest": soonest,
    "arrival_order": arrival_order,
    "least_loaded": least_loaded,
}
