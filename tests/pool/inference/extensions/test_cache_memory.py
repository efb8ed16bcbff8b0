"""Runs with options of transformers hold what was estimated, on a simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.values.specs.spec import Stage
from tests.pool.families.test_needs_shown import on_sim

#: every text is counted as if its tensors were held during the largest call
MOST_OVER = 0.3


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("sd3", {"fbcache": 0.2}),
        ("flux_dev", {"teacache": 0.3}),
        ("flux_dev", {"rope": {"scale_x": 0.5, "shift_t": 2.0}}),
        ("flux_dev", {"block_scale": {"blocks": {"D": 0.5, "S00": 0}}}),
        ("sd3", {"slg": {"layers": [0], "start": 0.0, "end": 1.0}, "cfg_zero": 1}),
    ],
)
def test_an_option_holds_what_was_estimated(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    tiny = on_sim(tmp_path, family)
    try:
        made = tiny.made(width=256, height=256, steps=3, options=options)
        (place,) = [place for place, task in enumerate(made.tasks) if task.stage is Stage.SAMPLE]
        task, working_bytes = made.tasks[place], made.costs[place].working_bytes
        assert working_bytes <= task.activation_bytes <= (1 + MOST_OVER) * working_bytes
    finally:
        tiny.close()
