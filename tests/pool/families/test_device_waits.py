"""A step of sampling does not wait for the device, except where a model decides by values of the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelpool.pool.engine.engine import EngineSettings
from tests.pool.device_waits import WaitRecorder
from tests.pool.families.tiny_relatives import SMALL_FAMILIES as FAMILIES
from tests.pool.families.whole_transformer import Whole

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:In sim autocast:UserWarning"),
]
#: copies from pinned memory on CUDA; the simulated device has none
SENT = "modelpool.pool.devices.pinned_memory:sent"
_CLASSES = "diffusers.models.transformers.transformer_"
#: by family, the places in diffusers' classes that wait in each call, and why they may
KNOWN = {
    # the number of tokens of each text is read from its mask
    "lumina2": {f"{_CLASSES}lumina2:Lumina2RotaryPosEmbed.{name}" for name in ("forward", "_get_freqs_cis")},
    "mochi": {"diffusers.models.attention_processor:MochiAttnProcessor2_0.__call__"},
    "hunyuan_image_21": {f"{_CLASSES}hunyuanimage:HunyuanImageTransformer2DModel.forward"},
    "hunyuan_video_15": {f"{_CLASSES}hunyuan_video15:HunyuanVideo15Transformer3DModel.forward"},
    # tokens go to the experts that their values choose; sizes are read from a tensor
    "hidream_i1": {
        f"{_CLASSES}hidream_image:{name}"
        for name in ("MOEFeedForwardSwiGLU.moe_infer", "HiDreamImageTransformer2DModel.unpatchify")
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_wait_for_the_device_nowhere_else(name: str, tmp_path: Path) -> None:
    """With noise in the step. The second step of three is watched: what is computed once is not."""
    settings = EngineSettings("sim", budget_bytes=512 << 20)
    whole = Whole(tmp_path, FAMILIES[name], sampler="euler_ancestral", settings=settings)
    texts = whole.texts()
    recorder = WaitRecorder(is_recording=False)
    with recorder:
        whole.latent(texts, steps=3, hooks=recorder.hooks_of_step(1))
    whole.engine.close()
    assert set(recorder.places) - {SENT} == KNOWN.get(name, set()), recorder.places
