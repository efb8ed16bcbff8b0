"""The families that run on transformers, on the simulated device: streamed weights make what resident ones make.

Found: tables of positions that Qwen-Image's class keeps for good stayed on the device.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from tests.pool.families.tiny_relatives import SMALL_FAMILIES as FAMILIES
from tests.pool.families.whole_transformer import Whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In sim autocast:UserWarning"),
]
BUDGET_BYTES = 512 << 20
#: the second brings weights again that the first let go
STEPS = 2


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_weights_make_what_resident_ones_make(name: str, tmp_path: Path) -> None:
    resident = Whole(tmp_path, FAMILIES[name], settings=EngineSettings("sim", budget_bytes=BUDGET_BYTES))
    texts = resident.texts()
    latent = resident.latent(texts, steps=STEPS)
    pixels = resident.pixels(latent)
    resident.engine.close()
    streaming = EngineSettings("sim", budget_bytes=BUDGET_BYTES, vram_policy=VramPolicy.NONE)
    streamed = Whole(tmp_path, FAMILIES[name], write=False, settings=streaming)
    for own, other in zip(streamed.texts(), texts, strict=True):
        np.testing.assert_allclose(own.context_LD, other.context_LD, atol=1e-6)
    largest = max(1.0, float(np.abs(latent.samples_CHW).max()))
    np.testing.assert_allclose(streamed.latent(texts, steps=STEPS).samples_CHW, latent.samples_CHW, atol=1e-5 * largest)
    assert np.abs(streamed.pixels(latent).astype(int) - pixels).max() <= 1
    streamed.engine.close()
    del resident, streamed  # Z-Image's module has its table of positions where it ran last, as long as it lives
    gc.collect()
    assert sim.memory_stats(0).used_bytes == 0, "nothing outlives the engine: no table of positions, no made weight"
