"""The placements by name, as a configuration chooses one."""

from __future__ import annotations

from collections.abc import Mapping

from scheduler.placement import Placement, arrival_order, least_loaded
from scheduler.soonest import soonest

#: the names are those of `scheduler.config.PLACEMENT_NAMES`
PLACEMENTS: Mapping[str, Placement] = {
    "soonest": soonest,
    "arrival_order": arrival_order,
    "least_loaded": least_loaded,
}
