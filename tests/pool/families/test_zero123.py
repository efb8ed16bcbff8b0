"""Zero123 shows the object of an image from another view: diffusers' UNet and VAE on the same weights, called as the
code of its authors calls them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from modelpool.actors.graph.features.vision_graph import view_condition
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.inference.sampling.noise import ImageNoise
from modelpool.pool.inference.sampling.schedules import make_sigmas, sigma_table
from modelpool.pool.models.components.vision.preprocess import DEVIATIONS, MEANS, preprocess_image
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture, UnusableField, UserError
from modelpool.pool.values.core.sampling_facts import VisionEncoderUse
from modelpool.pool.values.core.stage_params import (
    EncodeImageParams,
    ImageEmbeds,
    Latent,
    ViewCondition,
    VisionEncodeParams,
)
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_from_images import image
from tests.pool.families.test_shown_folders import assert_near
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_videos import PATCH, SEEN, SIDE, open_clip_vision
from tests.pool.models.loading import layouts
from tests.pool.models.loading.layouts import Layout, ldm_unet
from tests.pool.zoo.case import quiet_libraries

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
#: why there is no comparison with a pipeline
NOT_COMPARED = {"zero123": "its pipeline is not part of diffusers: compared with calls of its UNet"}
STEPS, SEED, CONTEXT = 3, 11, 32
RUN: dict[str, Any] = {"prompt": "", "seed": SEED, "steps": STEPS}


def zero123(context: int = CONTEXT) -> Layout:
    """A file in the published layout, with tensors of the text part of CLIP, which nothing reads."""
    config = transformers.CLIPVisionConfig(
        hidden_size=SEEN, intermediate_size=64, num_hidden_layers=3, num_attention_heads=16, image_size=SIDE,
        patch_size=PATCH, projection_dim=context, hidden_act="gelu",
    )  # fmt: skip
    with quiet_libraries():
        vision = open_clip_vision(transformers.CLIPVisionModelWithProjection(config).state_dict())
    start = "cond_stage_model.model."
    seen = {f"{start}visual.{key}": tuple(x.shape) for key, x in vision.items() if not key.endswith("position_ids")}
    rest = {f"{start}token_embedding.weight": (16, 8), f"{start}ln_final.weight": (8,)}
    projection = {"cc_projection.weight": (context, context + 4), "cc_projection.bias": (context,)}
    unet, sd1 = ldm_unet(replace(layouts.TINY_UNET, in_channels=8)), layouts.tiny_sd1()
    vae = {key: shape for key, shape in sd1.items() if key.startswith("first_stage_model.")}
    return {**unet, **vae, **seen, **rest, **projection}


def expected(tiny: TinyModel, made: Made, view: tuple[float, float, float, float]) -> Tensor:
    """The latent that `sample_model` of cvlab-columbia/zero123 makes, with Euler's steps: guided by 3 from a prediction
    that sees nothing."""
    (seen,), (shown,) = made.of(VisionEncodeParams), made.of(EncodeImageParams)
    assert isinstance(seen, ImageEmbeds)
    assert isinstance(shown, Latent)
    tensors = {key: value for key, value in load_file(tiny.model.source).items() if key.startswith("cc_")}
    states = torch.cat((torch.from_numpy(seen.states_LD), torch.tensor([view])), dim=-1)[None]
    context = functional.linear(states, tensors["cc_projection.weight"], tensors["cc_projection.bias"])
    concatenated = torch.from_numpy(shown.samples_CHW)[None] / tiny.family.scaling_factor
    unet, table = tiny.module(Role.DIFFUSION_MODEL), sigma_table(tiny.family.sampling.noise)
    sigmas = make_sigmas("normal", STEPS, table).tolist()
    x = ImageNoise(SEED).draw((1, *shown.samples_CHW.shape)) * math.sqrt(1.0 + sigmas[0] ** 2)
    with torch.no_grad():
        for sigma, after in pairwise(sigmas):
            scaled, level = x / math.sqrt(1.0 + sigma**2), torch.tensor([table.timestep(sigma)])
            without, noise = (
                unet(torch.cat((scaled, extra), dim=1), level, encoder_hidden_states=text, return_dict=False)[0]
                for extra, text in (
                    (torch.zeros_like(concatenated), torch.zeros_like(context)),
                    (concatenated, context),
                )
            )
            x = x + (without + 3.0 * (noise - without)) * (after - sigma)
    return x


@pytest.mark.parametrize(
    ("fields", "view"),
    [
        ({}, (0.0, 0.0, 1.0, 0.0)),
        (
            {"azimuth": 30.0, "elevation": 20.0, "camera_distance": -0.4},
            (-math.pi / 9, 0.5, math.cos(math.pi / 6), -0.4),
        ),
        (
            {"azimuth": -90.0, "elevation": 10.0, "image_elevation": 5.0},
            (-math.pi / 36, -1.0, 0.0, math.radians(85.0)),
        ),
    ],
    ids=["same view", "zero123", "stable zero123"],
)
def test_a_view_is_that_of_its_authors(
    fields: dict[str, float], view: tuple[float, float, float, float], tmp_path: Path
) -> None:
    tiny = TinyModel(tmp_path, zero123())
    assert tiny.family.name == "zero123"
    assert isinstance(tiny.module(Role.DIFFUSION_MODEL), diffusers.UNet2DConditionModel)
    made = tiny.made(image=image(), **RUN, **fields)
    latent = expected(tiny, made, view)
    assert_near(made.latents[0], latent)
    with torch.no_grad():
        decoded = tiny.module(Role.VAE).decode(latent / tiny.family.scaling_factor).sample
    pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
    assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255
    other = tiny.made(image=image(), **RUN, azimuth=45.0).latents[0]
    assert not torch.allclose(made.latents[0], other, atol=1e-3)
    tiny.close()


def test_models_called_stable_read_the_elevation_of_the_image() -> None:
    """No tensor tells them from the others. They read no distance."""
    for model, fields, expected in (
        ("zero123-xl", {"azimuth": 30.0, "camera_distance": 0.1}, ViewCondition(30.0, 0.0, 0.1)),
        ("stable-diffusion/zero123-xl", {"azimuth": 30.0}, ViewCondition(30.0)),
        ("Stable_Zero123", {"elevation": 10.0}, ViewCondition(0.0, 10.0, 0.0, 0.0)),
        ("Stable_Zero123", {"image_elevation": 5.0}, ViewCondition(0.0, 0.0, 0.0, 5.0)),
    ):
        assert view_condition(GenerateRequest(model=model, prompt="", **fields), model) == expected
    with pytest.raises(UnusableField, match=r"camera_distance: found 0\.1, expected no value together with"):
        view_condition(GenerateRequest(model="m", prompt="", camera_distance=0.1), "stable_zero123")


def test_what_it_cannot_be_asked_for_is_refused(tmp_path: Path) -> None:
    for place in ("view", "text"):
        (tmp_path / place).mkdir()
    tiny = TinyModel(tmp_path / "view", zero123())
    for fields, said in (
        ({}, "image: missing"),
        ({"image": image(), "strength": 0.5}, "strength"),
        ({"image": image(), "azimuth": 361}, "azimuth: found 361, expected a number from -360 to 360"),
        ({"image": image(), "camera_distance": 0.1, "image_elevation": 3.0}, "camera_distance: found 0.1, expected"),
        ({"image": image(), "motion": 3}, "motion: found 3, not supported"),
        ({"image": image(), "regions": [{"prompt": "a", "box": (0, 0, 32, 64)}]}, "regions"),
    ):
        with pytest.raises(UserError, match=said):
            tiny.made(**RUN, **fields)
    with pytest.raises(UnknownArchitecture, match="cannot be saved as a folder of diffusers"):
        save_diffusers(open_checkpoint(tiny.model.source), tmp_path / "folder")
    save_checkpoint(tiny.engine._opened(tiny.model), tmp_path / "again.safetensors")
    before, after = load_file(tiny.model.source), load_file(tmp_path / "again.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    tiny.close()
    plain = TinyModel(tmp_path / "text", layouts.tiny_sd1())
    for name in ("azimuth", "camera_distance", "image_elevation", "elevation"):
        with pytest.raises(UnusableField, match=rf"{name}: found 1\.5, not supported by model 'tiny'"):
            plain.made(**{name: 1.5})
    plain.close()


def test_a_folder_of_its_parts_is_that_model(tmp_path: Path) -> None:
    """As published for a pipeline outside of diffusers, with a folder of the projection."""
    for place in ("file", "sd1", "again"):
        (tmp_path / place).mkdir()
    file, stable = TinyModel(tmp_path / "file", zero123()), TinyModel(tmp_path / "sd1", layouts.tiny_sd1())
    folder = tmp_path / "again/tiny"
    save_diffusers(open_checkpoint(stable.model.source), folder)
    stable.close()
    unet, vae = file.module(Role.DIFFUSION_MODEL), file.module(Role.VAE)
    projection = unet.cc_projection
    del unet.cc_projection
    unet.save_pretrained(folder / "unet")
    vae.register_to_config(scaling_factor=file.family.scaling_factor)
    vae.save_pretrained(folder / "vae")
    vision = file.module(Role.VISION_ENCODER)
    for parameter in vision.parameters():
        parameter.data = parameter.data.contiguous()
    vision.save_pretrained(folder / "image_encoder")
    (folder / "cc_projection").mkdir()
    state = {f"proj.{name}": value.clone() for name, value in projection.state_dict().items()}
    save_file(state, folder / "cc_projection/diffusion_pytorch_model.safetensors")
    (folder / "cc_projection/config.json").write_text(json.dumps({"_class_name": "CLIPCameraProjection"}))
    index = json.loads((folder / "model_index.json").read_text())
    index = {name: value for name, value in index.items() if "text_encoder" not in name and "tokenizer" not in name}
    index |= {"image_encoder": ["transformers", "CLIPVisionModelWithProjection"]}
    index |= {"cc_projection": ["pipeline_zero1to3", "CLIPCameraProjection"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    unet.cc_projection = projection
    opened = TinyModel.of_folder(tmp_path / "again")
    assert opened.family.name == "zero123"
    ours, theirs = (each.made(image=image(), **RUN, azimuth=20.0).latents[0] for each in (opened, file))
    assert_near(ours, theirs)
    opened.close()
    file.close()


def test_the_vision_encoder_sees_images_of_its_size_as_its_authors_show_them() -> None:
    """Of 256 pixels a side: bicubic, corners at corners, without blur."""
    pixels = np.random.default_rng(3).integers(0, 256, (256, 256, 3), np.uint8)
    x = torch.from_numpy(pixels.copy()).permute(2, 0, 1)[None].float() / 127.5 - 1.0
    small = functional.interpolate(x, size=(224, 224), mode="bicubic", align_corners=True)
    means, deviations = (torch.tensor(values)[:, None, None] for values in (MEANS, DEVIATIONS))
    found = preprocess_image(pixels, 224, VisionEncoderUse.PROJECTED)
    torch.testing.assert_close(found, ((small + 1.0) / 2.0 - means) / deviations, rtol=0.0, atol=1e-5)


@pytest.mark.counted
def test_runs_on_a_simulated_gpu_need_what_was_estimated(tmp_path: Path) -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    sim.recover(0)
    made = {}
    for device in ("cpu", "sim"):
        (tmp_path / device).mkdir()
        tiny = TinyModel(tmp_path / device, zero123(), device=device)
        made[device] = tiny.made(image=image(), **RUN, azimuth=30.0)
        tiny.close()
    for task, cost in zip(made["sim"].tasks, made["sim"].costs, strict=True):
        assert cost.working_bytes <= task.activation_bytes <= 1.1 * cost.working_bytes
    torch.testing.assert_close(made["sim"].latents[0], made["cpu"].latents[0], rtol=1e-4, atol=1e-4)
