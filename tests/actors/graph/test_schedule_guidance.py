"""The schedule of a run is the one named, and "ays" is the one that was published for the model."""

from __future__ import annotations

import pytest

from modelpool.actors.graph.features.schedule_guidance import resolve_schedule
from modelpool.pool.families.supported import running_families
from modelpool.pool.values.core.errors import UnusableField


def test_align_your_steps_is_that_of_the_model() -> None:
    found = {
        name: resolve_schedule(running_families()[name].sampling, "dpmpp_2m", "Align Your Steps")[1]
        for name in ("sd1", "sd1_inpaint", "sdxl", "sdxl_inpaint", "svd")
    }
    assert found == {
        "sd1": "ays_sd1", "sd1_inpaint": "ays_sd1", "sdxl": "ays_sdxl", "sdxl_inpaint": "ays_sdxl", "svd": "ays_svd",
    }  # fmt: skip
    for name in ("flux_dev", "playground_25"):
        with pytest.raises(UnusableField, match=r"schedule: found 'ays', .* was published for SD1, SDXL and"):
            resolve_schedule(running_families()[name].sampling, "euler", "ays")
