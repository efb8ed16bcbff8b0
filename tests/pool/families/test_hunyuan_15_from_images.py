"""HunyuanVideo 1.5 makes of first frames what diffusers makes of their latents: same weights, texts and noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.guiders import ClassifierFreeGuidance
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import Encoded, EncodeParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_seen_wan import image
from tests.pool.families.test_transformer_relatives import _both_read
from tests.pool.families.tiny_relatives import RELATIVES
from tests.pool.families.tiny_shown import TinyFamilyModel

WIDTH, HEIGHT, FRAMES, STEPS, SEED, CFG = 96, 64, 13, 3, 11, 4.0
FIELDS: dict[str, Any] = {
    "frames": FRAMES, "steps": STEPS, "negative": "a dog", "width": WIDTH, "height": HEIGHT, "seed": SEED, "cfg": CFG,
}  # fmt: skip


def _frames(count: int) -> np.ndarray[Any, Any]:
    return np.stack([np.asarray(image(seed, WIDTH, HEIGHT)) for seed in range(30, 30 + count)])


def _expected(model: TinyFamilyModel, texts: tuple[Encoded, ...], frames: np.ndarray[Any, Any]) -> Tensor:
    """The latents of the frames, followed by zeros, and a mask of their cells, as `prepare_cond_latents_and_mask` of
    HunyuanVideo15ImageToVideoPipeline has them of one image; without states of a vision encoder."""
    vae = model.module(Role.VAE)
    pixels = torch.from_numpy(frames.copy()).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        first = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    cells, known = 1 + (FRAMES - 1) // 4, first.shape[2]
    shown = torch.nn.functional.pad(first, (0, 0, 0, 0, 0, cells - known))
    mask = torch.zeros_like(shown[:, :1])
    mask[:, :, :known] = 1
    pipeline = diffusers.HunyuanVideo15Pipeline(
        None, None, model.module(Role.DIFFUSION_MODEL), vae, FlowMatchEulerDiscreteScheduler(shift=7.0), None, None,
        ClassifierFreeGuidance(CFG),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    pipeline.prepare_cond_latents_and_mask = lambda *_, **__: (shown, mask)
    noise = ImageNoise(SEED).draw((1, 32, cells, HEIGHT // 16, WIDTH // 16))
    found: Tensor = pipeline(
        **_both_read(texts), height=HEIGHT, width=WIDTH, num_frames=FRAMES, num_inference_steps=STEPS, latents=noise,
        output_type="latent",
    ).frames  # fmt: skip
    return found


def test_a_video_from_an_image_is_that_of_diffusers(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, RELATIVES["hunyuan_video_15"])
    first = _frames(1)
    made, without = model.made(image=image(30, WIDTH, HEIGHT), **FIELDS), model.made(**FIELDS)
    texts = made.of(EncodeParams)
    expected = _expected(model, texts, first)
    np.testing.assert_allclose(made.latents[0], expected, atol=1e-4 * max(1.0, float(expected.std())))
    assert not np.allclose(made.latents[0], without.latents[0], atol=1e-2)
    model.close()


@pytest.mark.parametrize("count", [5, 6])
def test_a_video_from_several_frames_has_their_latents_in_its_first_cells(count: int, tmp_path: Path) -> None:
    """Frames that fill no cell are left out."""
    model, frames = TinyFamilyModel(tmp_path, RELATIVES["hunyuan_video_15"]), _frames(count)
    fields = {**FIELDS, "model": "tiny", "prompt": "a photo of a red cube"}
    nodes = {
        "frames": {"kind": "video", "video": frames},
        "first": {"kind": "operation", "name": "image_from_batch", "settings": {"start": 0, "length": 1},
                  "inputs": {"image": "frames"}},
        "s": {"kind": "sample", "request": fields, "inputs": {"image": "first", "first_frames": "frames"}},
        "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
    }  # fmt: skip
    made = model.made(workflow={"nodes": nodes, "output": "d"})
    expected = _expected(model, made.of(EncodeParams), frames[:5])
    np.testing.assert_allclose(made.latents[0], expected, atol=1e-4 * max(1.0, float(expected.std())))
    del nodes["s"]["inputs"]["image"]
    with pytest.raises(UserError, match="first_frames: expected image, too"):
        model.made(workflow={"nodes": nodes, "output": "d"})
    model.close()
