"""Wan with a camera: diffusers has no class and no pipeline for it. Compared with the formula of its authors, which
this test computes frame by frame."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from modelpool.pool.inference.conditioning.camera_path import camera_numbers
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.models.components.diffusion.adapted_modules import WanCameraTransformer3DModel
from modelpool.pool.models.components.diffusion.camera_rays import rays_of_cells
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import CAMERA_MOTIONS, CameraCondition, SampleParams
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_seen_wan import FIELDS, FRAMES, HEIGHT, SEED, STEPS, WIDTH, _latent_of, image
from tests.pool.families.test_videos_from_images import CONCATENATED
from tests.pool.families.tiny_shown import TinyFamilyModel
from tests.pool.families.tiny_transformers import WIDTH as TEXT_WIDTH
from tests.pool.families.tiny_transformers import TinyFamily

SHIFT, TOKENS, CFG = 5.0, 512, 4.0


def _model() -> Any:
    return WanCameraTransformer3DModel(
        num_attention_heads=1, attention_head_dim=128, in_channels=36, out_channels=16, text_dim=TEXT_WIDTH,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=1024,
    )  # fmt: skip


NOT_COMPARED = {
    "wan22_camera": "diffusers has no class and no pipeline for it: compared with the formula of its authors",
    "wan21_camera": "the same as wan22_camera, with the first frame as of Wan 2.1 Fun control",
}
SEEING = TinyFamily(
    "wan22_camera", _model, CONCATENATED.publish, CONCATENATED.encoders, CONCATENATED.vae, CONCATENATED.vae_file
)


def _rays(motion: str, speed: float, focal: float, frames: int, width: int, height: int) -> Tensor:
    """The rays of all frames, [F, 6, H, W], by matrices: the space of a camera is moved against its motion."""
    moves = {
        "Pan Up": (0, 1, 0), "Pan Down": (0, -1, 0), "Pan Left": (1, 0, 0), "Pan Right": (-1, 0, 0),
        "Zoom In": (0, 0, -2), "Zoom Out": (0, 0, 2),
    }  # fmt: skip
    turns = {"Anti Clockwise (ACW)": 1, "ClockWise (CW)": -1}
    found = []
    for frame in range(frames):
        share = frame / frames * speed
        angle = share * math.pi / 3 * turns.get(motion, 0)
        to_camera = np.eye(4)
        to_camera[:2, :2] = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        to_camera[:3, 3] = np.array(moves.get(motion, (0, 0, 0))) * share * 1.5
        pose = np.linalg.inv(to_camera)
        across, along = focal * width, focal * height
        if width / height < 1280 / 720:
            across = focal * height * 1280 / 720
        else:
            along = focal * width / (1280 / 720)
        rays = np.zeros((6, height, width))
        for row in range(height):
            for column in range(width):
                seen = np.array([(column + 0.5 - width / 2) / across, (row + 0.5 - height / 2) / along, 1])
                direction = pose[:3, :3] @ (seen / np.linalg.norm(seen))
                rays[:, row, column] = [*np.cross(pose[:3, 3], direction), *direction]
        found.append(torch.from_numpy(rays).float())
    return torch.stack(found)


@pytest.mark.parametrize("motion", CAMERA_MOTIONS)
def test_the_rays_of_a_motion(motion: str) -> None:
    """The first frame is there four times, and the six numbers of each have those of four frames behind one another."""
    for width, height in ((8, 6), (20, 6)):
        camera = camera_numbers(CameraCondition(motion, 1.5, 0.4, 0.4), 5, width, height)
        first, second = rays_of_cells(camera[None], height, width)
        rays = _rays(motion, 1.5, 0.4, 5, width, height)
        expected = [torch.stack([rays[place] for place in places], dim=1) for places in ([0] * 4, range(1, 5))]
        for found, wanted in zip((first, second), expected, strict=True):
            np.testing.assert_allclose(found[0], wanted.reshape(24, height, width), atol=1e-5)


def _predicted(module: Any, x: Tensor, shown: Tensor, camera: Tensor, timestep: Tensor, text: Tensor) -> Tensor:
    """diffusers' own forward of a copy without a camera, with patches that the states of the rays are added to."""
    patches = module.patch_embedding
    hook = patches.register_forward_hook(lambda _, __, found: found + camera)
    try:
        found: Tensor = super(WanCameraTransformer3DModel, module).forward(
            torch.cat([x, shown], dim=1), timestep, text, return_dict=False
        )[0]
    finally:
        hook.remove()
    return found


def test_a_video_has_the_path_of_its_camera(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, SEEING)
    assert model.family.name == "wan22_camera"
    first = image(4)
    fields = {**FIELDS, "cfg": CFG, "model": "tiny", "prompt": "a photo of a red cube", "seed": SEED}

    def made(**more: Any) -> Any:
        nodes = {
            "first": {"kind": "image", "image": first},
            "s": {"kind": "sample", "request": fields, "inputs": {"image": "first"}, **more},
            "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
        }
        return model.made(workflow={"nodes": nodes, "output": "d"})

    found = made(camera={"motion": "Zoom In", "speed": 2.0})
    module, scheduler = model.module(Role.DIFFUSION_MODEL), FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.set_timesteps(STEPS)
    grey = np.full((FRAMES - 1, HEIGHT, WIDTH, 3), 127.5, np.float32)
    latent = _latent_of(model, np.concatenate([np.asarray(first)[None].astype(np.float32), grey]))
    mask = torch.zeros(1, 4, *latent.shape[2:])
    mask[:, :, 0] = 1
    shown = torch.cat([mask, latent], dim=1)
    rays = _rays("Zoom In", 2.0, 0.5, FRAMES, WIDTH, HEIGHT)
    cells = [torch.stack([rays[place] for place in places], dim=1) for places in ([0] * 4, range(1, 5))]
    adapter = module.control_adapter
    x = ImageNoise(SEED).draw((1, 16, 2, HEIGHT // 8, WIDTH // 8))
    texts = [
        torch.nn.functional.pad(found.texts[name], (0, 0, 0, TOKENS - found.texts[name].shape[1]))
        for name in ("prompt_embeds", "negative_prompt_embeds")
    ]
    with torch.no_grad():
        states = []
        for cell in cells:
            read = adapter.conv(torch.nn.PixelUnshuffle(8)(cell.reshape(1, 24, HEIGHT, WIDTH)))
            block = adapter.residual_blocks[0]
            states.append(read + block.conv2(torch.relu(block.conv1(read))))
        camera = torch.stack(states, dim=2)
        for timestep in scheduler.timesteps:
            with_text, without = (_predicted(module, x, shown, camera, timestep[None], text) for text in texts)
            x = scheduler.step(without + CFG * (with_text - without), timestep, x, return_dict=False)[0]
    np.testing.assert_allclose(found.latents[0], x, atol=1e-4 * max(1.0, float(x.std())))
    (work,) = (each for each in found.works.values() if isinstance(each, SampleParams))
    assert work.all_of(CameraCondition) == (CameraCondition("Zoom In", 2.0),)
    assert not np.allclose(found.latents[0], made().latents[0], atol=1e-3)
    with pytest.raises(UserError, match="motion"):
        made(camera={"motion": "Spin"})
    model.close()


def test_other_models_read_no_camera(tmp_path: Path) -> None:
    model = TinyFamilyModel(tmp_path, CONCATENATED)
    nodes = {
        "first": {"kind": "image", "image": image(4)},
        "s": {
            "kind": "sample", "request": {**FIELDS, "model": "tiny", "prompt": "a cube", "seed": SEED},
            "inputs": {"image": "first"}, "camera": {"motion": "Static"},
        },
        "d": {"kind": "decode", "model": "tiny", "inputs": {"latent": "s"}},
    }  # fmt: skip
    with pytest.raises(UserError, match=r"camera: .*reads no camera"):
        model.made(workflow={"nodes": nodes, "output": "d"})
    model.close()
