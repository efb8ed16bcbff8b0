"""Upscalers of the latents of LTX, compared with diffusers' pipelines on tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2LatentUpsamplePipeline, LTXLatentUpsamplePipeline
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from safetensors.torch import save_file

from modelpool.pool.inference.upscalers.build_upscaler import plan_upscaler
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.stage_params import Latent, UpscaleParams, stage_of, task_id
from modelpool.pool.values.core.task_inputs import LATENT
from modelpool.pool.values.specs.spec import Role, TaskSpec
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.tiny_transformers import FAMILIES, TinyFamily, seeded
from tests.pool.families.whole_transformer import Whole
from tests.pool.pipeline import QUIET


def tiny_upsampler(channels: int, **sizes: Any) -> Any:
    """The network of LTX-2, or of LTX-Video with `use_rational_resampler` False, with random weights."""
    common = {"in_channels": channels, "mid_channels": 32, "num_blocks_per_stage": 1}
    if sizes.pop("use_rational_resampler", True):
        return seeded(lambda: LTX2LatentUpsamplerModel(**common, **sizes), 7)
    return seeded(lambda: LTXLatentUpsamplerModel(**common, **sizes), 7)


CASES: dict[str, tuple[TinyFamily, type, dict[str, Any], int]] = {
    "ltx2": (SOUNDING, LTX2LatentUpsamplePipeline, {}, 2),
    "ltx2, flat": (SOUNDING, LTX2LatentUpsamplePipeline, {"dims": 2}, 2),
    "ltx2, fourfold": (SOUNDING, LTX2LatentUpsamplePipeline, {"rational_spatial_scale": 4.0}, 4),
    "ltxv": (FAMILIES["ltxv"], LTXLatentUpsamplePipeline, {"use_rational_resampler": False}, 2),
}


@pytest.mark.parametrize("name", CASES)
def test_enlarged_latents_are_those_of_the_pipeline(tmp_path: Path, name: str) -> None:
    """The audio of a latent stays; the estimate is at least what a dry run counts."""
    tiny, pipeline, sizes, scale = CASES[name]
    folder = tmp_path / "models"
    folder.mkdir()
    whole = Whole(folder, tiny)
    channels = whole.opened.latent.channels
    network = tiny_upsampler(channels, **sizes)
    save_file({key: x.contiguous() for key, x in network.state_dict().items()}, folder / "up.safetensors")
    upscaler = whole.catalog.upscalers.find("up")
    assert (upscaler.scale, upscaler.latent_channels) == (scale, channels)
    drawn = np.random.default_rng(3).standard_normal((channels, 2, 2, 3)).astype(np.float32)
    sound = np.ones((5, 128), np.float32)
    work = UpscaleParams(upscaler, 3, 2, 3 * scale, 2 * scale, 2, vae=whole.model)
    _, use = whole.catalog.upscalers.needs(work)
    uses = (use, whole.catalog.use(whole.model, Role.VAE, ()))
    (mode,) = whole.catalog.upscalers.execution_modes(work)
    task = TaskSpec(task_id(work, {}), stage_of(work), uses, mode.activation_bytes, 0.1)
    made, _ = whole.engine.run(task, work, {LATENT: Latent(drawn, sound)}, QUIET)
    assert isinstance(made, Latent)
    vae = whole.module(Role.VAE)
    with torch.no_grad():
        theirs = pipeline(vae=vae, latent_upsampler=network)(
            latents=torch.from_numpy(drawn)[None], height=64, width=96, output_type="latent", return_dict=False,
            **({"latents_normalized": True, "num_frames": 9} if tiny is SOUNDING else {}),
        )[0]  # fmt: skip
    if tiny is SOUNDING:  # the other pipeline returns them in the scale of the model
        mean, std = (getattr(vae, f"latents_{one}").view(1, -1, 1, 1, 1) for one in ("mean", "std"))
        theirs = (theirs - mean) / std
    np.testing.assert_allclose(made.samples_CHW, theirs[0].numpy(), rtol=1e-4, atol=1e-5)
    assert made.sound_LA is not None
    np.testing.assert_array_equal(made.sound_LA, sound)
    whole.engine.close()


def test_upscalers_of_latents_that_are_not_run_are_refused_with_a_reason() -> None:
    for sizes, reason in (
        ({"rational_spatial_scale": 1.5}, "a factor with a fraction"),
        ({"spatial_upsample": False, "temporal_upsample": True}, "makes frames"),
        ({"temporal_upsample": True}, "makes frames"),
    ):
        with torch.device("meta"):
            state = LTX2LatentUpsamplerModel(8, 32, 1, **sizes).state_dict()
        with pytest.raises(UnknownArchitecture, match=reason):
            plan_upscaler({key: tuple(value.shape) for key, value in state.items()})
