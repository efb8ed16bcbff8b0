"""Wan 2.2 Fun control follows a video and shows a reference image: diffusers has no class and no pipeline for it.
Compared with the formula of its authors, which this test computes with the parts of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.adapted_modules import WanReferenceTransformer3DModel
from modelpool.pool.models.components.diffusion.build_diffusion_model import plan_diffusion_model
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_seen_wan import FIELDS, FRAMES, HEIGHT, SEED, STEPS, WIDTH, _latent_of, image
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.tiny_transformers import TinyFamily

SHIFT, TOKENS, CFG = 5.0, 512, 4.0


def _model(channels: int = 16) -> Any:
    return WanReferenceTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=3 * channels + 4, out_channels=channels,
        text_dim=TEXT_WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=1024, reference_channels=channels,
    )  # fmt: skip


NOT_COMPARED = {
    "wan22_fun_control": "diffusers has no class and no pipeline for it: compared with the formula of its authors",
    "wan22_fun_control_5b": "the same as wan22_fun_control, with the autoencoder of Wan 2.2",
}
FUN = TinyFamily(
    "wan22_fun_control", _model, CONCATENATED.publish, CONCATENATED.encoders, CONCATENATED.vae, CONCATENATED.vae_file
)


def _predicted(module: Any, x: Tensor, followed: Tensor, reference: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
    """The tokens of the reference image are those of a frame before the video, and are left out at the end."""
    batch, channels, frames, high, wide = x.shape
    empty = torch.zeros(batch, 4 + channels, frames, high, wide)
    patches = module.patch_embedding(torch.cat([x, followed, empty], dim=1)).flatten(2).transpose(1, 2)
    first = module.ref_conv(reference).flatten(2).transpose(1, 2)
    tokens = torch.cat([first, patches], dim=1)
    places = module.rope(torch.zeros(batch, channels, frames + 1, high, wide))
    level, levels, context, _ = module.condition_embedder(timestep, text, None)
    for block in module.blocks:
        tokens = block(tokens, context, levels.unflatten(1, (6, -1)), places)
    shift, scale = (module.scale_shift_table + level.unsqueeze(1)).chunk(2, dim=1)
    out = module.proj_out(module.norm_out(tokens) * (1 + scale) + shift)[:, first.shape[1] :]
    out = out.reshape(batch, frames, high // 2, wide // 2, 1, 2, 2, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return out.reshape(batch, -1, frames, high, wide)


def _expected(model: TinyFamilyModel, texts: dict[str, Tensor], followed: Tensor, reference: Tensor) -> Tensor:
    module, scheduler = model.module(Role.DIFFUSION_MODEL), FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    x = ImageNoise(SEED).draw((1, 16, 2, HEIGHT // 8, WIDTH // 8))
    positive, negative = (
        torch.nn.functional.pad(texts[name], (0, 0, 0, TOKENS - texts[name].shape[1]))
        for name in ("prompt_embeds", "negative_prompt_embeds")
    )
    with torch.no_grad():
        for timestep in scheduler.timesteps:
            with_text, without = (
                _predicted(module, x, followed, reference, timestep[None], text) for text in (positive, negative)
            )
            x = scheduler.step(without + CFG * (with_text - without), timestep, x, return_dict=False)[0]
    return x


def test_a_video_follows_another_and_shows_a_reference_image(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, FUN)
    assert model.family.name == "wan22_fun_control"
    video, shown = np.stack([np.asarray(image(seed)) for seed in range(20, 20 + FRAMES)]), image(4)
    fields = {**FIELDS, "cfg": CFG, "video": video}
    made, without = model.made(image=shown, **fields), model.made(**fields)
    followed, reference = _latent_of(model, video), _latent_of(model, np.asarray(shown)[None])[:, :, 0]
    for found, told in ((made, reference), (without, torch.zeros_like(reference))):
        expected = _expected(model, found.texts, followed, told)
        np.testing.assert_allclose(found.latents[0], expected, atol=1e-4 * max(1.0, float(expected.std())))
    assert not np.allclose(made.latents[0], without.latents[0], atol=1e-2)
    with pytest.raises(UnusableField, match="video: missing"):
        model.made(image=shown, **FIELDS)
    model.close()


@pytest.mark.counted
def test_what_a_run_holds_is_estimated(tmp_path: Path) -> None:
    from modelpool.pool.devices.sim import device as sim
    from modelpool.pool.values.core.stage_params import SampleParams

    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    model = TinyFamilyModel(tmp_path, FUN, "sim")
    video = np.stack([np.asarray(image(seed)) for seed in range(20, 20 + FRAMES)])
    made = model.made(image=image(4), video=video, **FIELDS)
    for task, cost in zip(made.tasks, made.costs, strict=True):
        if isinstance(made.works[task.task_id], SampleParams):
            assert cost.working_bytes <= task.activation_bytes <= 1.2 * cost.working_bytes
    model.close()


@pytest.mark.parametrize(("channels", "name"), [(16, "wan22_fun_control"), (48, "wan22_fun_control_5b")])
def test_files_are_recognised_by_their_channels_and_the_convolution(channels: int, name: str) -> None:
    with torch.device("meta"):
        state = CONCATENATED.publish(_model(channels).state_dict())
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    plan = plan_diffusion_model(shapes)
    assert plan.recognised.name == name
    assert plan.config["reference_channels"] == channels
    without = {key: shape for key, shape in shapes.items() if not key.startswith("ref_conv.")}
    with pytest.raises(UnknownArchitecture, match="recognised as Wan, of unknown sizes"):
        plan_diffusion_model(without)
