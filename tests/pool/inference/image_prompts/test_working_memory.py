"""Runs with an IP-Adapter and a T2I-Adapter stream like others, and hold what was estimated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import Engine, EngineSettings
from modelpool.pool.values.specs.spec import Stage
from tests.pool.families.test_controlnets import FIELDS, IMAGES, SIZE
from tests.pool.families.test_t2i_adapters import adapter, channels_of
from tests.pool.families.tiny_transformers import seeded
from tests.pool.inference.image_prompts.test_ip_adapters import Adapted, used
from tests.pool.models.loading import layouts

BUDGET_BYTES = 1 << 28
#: keys and values are counted in addition to a peak at which some are not read
MOST_OVER = 0.1


def test_it_streams_and_holds_what_was_estimated(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, layouts.tiny_sd1(), ("plus",))
    tiny = adapted.tiny
    module = seeded(lambda: adapter(channels_of(tiny), "full_adapter"), 1)
    save_file(module.state_dict(), tmp_path / "t2i.safetensors")
    fields: dict[str, Any] = {**SIZE, **FIELDS, "controls": [{"model": "t2i", "image": IMAGES["canny"]}]}
    fields["image_prompts"] = [used("plus", strength=0.5)]
    whole = tiny.made(**fields)
    sim.install()
    for policy in (VramPolicy.NORMAL, VramPolicy.NONE):
        tiny.close()
        sim.configure(0, BUDGET_BYTES)
        sim.recover(0)
        tiny.engine = Engine.open(EngineSettings("sim", budget_bytes=BUDGET_BYTES, vram_policy=policy))
        made = tiny.made(**fields)
        np.testing.assert_array_equal(made.pixels, whole.pixels)
        if policy is VramPolicy.NORMAL:
            (sample,) = [place for place, task in enumerate(made.tasks) if task.stage is Stage.SAMPLE]
            task, working_bytes = made.tasks[sample], made.costs[sample].working_bytes
            assert working_bytes <= task.activation_bytes <= (1 + MOST_OVER) * working_bytes
        else:
            assert any(cost.streamed_bytes for cost in made.costs)
    tiny.close()
