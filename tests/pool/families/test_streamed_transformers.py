"""Models of videos and audio that do not fit their device whole: what is planned with, and that they make the same.

Found: the order in which modules are used was asked of a run without texts and without frames, which ended all runs of
models on transformers that had to stream.
"""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from modelpool.pool.catalog.estimates.typical_run import typical_call, typical_params
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.vram_policy import VramPolicy
from modelpool.pool.engine.engine import EngineSettings
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.tracing.module_flops import module_work
from tests.pool.families.test_videos_from_images import CONCATENATED, KEPT
from tests.pool.families.test_wan_vace import VACE
from tests.pool.families.tiny_audio import STABLE_AUDIO
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.families.whole_transformer import Whole

ALL = {**FAMILIES, CONCATENATED.name: CONCATENATED, KEPT.name: KEPT, STABLE_AUDIO.name: STABLE_AUDIO, VACE.name: VACE}


@pytest.mark.parametrize(
    "name", ["flux_dev", "wan_t2v", "ltxv", "wan22_i2v", "wan22_ti2v", "wan_vace", "stable_audio_1"]
)
def test_the_usual_run_of_every_component_can_be_looked_at(name: str, tmp_path: Path) -> None:
    whole = Whole(tmp_path, ALL[name])
    for role in (*whole.family.text_encoders, Role.DIFFUSION_MODEL, Role.VAE):
        component = whole.opened.component(role)
        found = module_work(component.built.module, component.form.compute_dtype, typical_call(whole.opened, role))
        assert sum(found.values()) > 0, role
    work = typical_params(whole.opened, Role.DIFFUSION_MODEL)
    assert isinstance(work, SampleParams)
    assert (work.shape.frames > 0) == (whole.family.sampling.video is not None)
    whole.engine.close()


def test_streamed_weights_make_the_audio_that_resident_ones_make(tmp_path: Path) -> None:
    """Those that embed seconds among them."""
    enough = Whole(tmp_path, STABLE_AUDIO, settings=EngineSettings("sim", budget_bytes=512 << 20))
    texts = enough.texts()
    latent = enough.latent(texts)
    samples = enough.pixels(latent)
    enough.engine.close()
    streaming = EngineSettings("sim", budget_bytes=512 << 20, vram_policy=VramPolicy.NONE)
    little = Whole(tmp_path, STABLE_AUDIO, write=False, settings=streaming)
    streamed = little.latent(little.texts())
    np.testing.assert_allclose(streamed.samples_CHW, latent.samples_CHW, atol=1e-4)
    np.testing.assert_allclose(little.pixels(latent), samples, atol=1e-5)
    little.engine.close()
    gc.collect()
    assert sim.memory_stats(0).used_bytes == 0, "weights that are made for each call stay nowhere"
