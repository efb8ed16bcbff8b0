"""Lotus estimates depths and normals of an image: diffusers' UNet and VAE, called as the pipeline of its authors calls
them, on the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import UnknownArchitecture, UserError
from modelpool.pool.values.core.sampling_facts import Prediction
from modelpool.pool.values.core.stage_params import EncodeImageParams, Latent
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_from_images import image
from tests.pool.families.test_shown_folders import assert_near
from tests.pool.families.tiny_model import Made, TinyModel
from tests.pool.families.tiny_shown import SHOWN_LAYOUTS
from tests.pool.models.loading import layouts

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
#: why there is no comparison with a pipeline
NOT_COMPARED = {"lotus_d": "its pipeline is not part of diffusers: compared with calls of its UNet"}
RUN: dict[str, Any] = {"prompt": "", "seed": 11}


def _expected(tiny: TinyModel, made: Made) -> Tensor:
    """The latent that LotusDPipeline of EnVision-Research/Lotus makes of that of the image: at level 999, with the
    states of begin and end of an empty text, and the task (1, 0)."""
    (shown,) = made.of(EncodeImageParams)
    assert isinstance(shown, Latent)
    task = torch.tensor([[1.0, 0.0]])
    unet = tiny.module(Role.DIFFUSION_MODEL)
    with torch.no_grad():
        found: Tensor = unet(
            torch.from_numpy(shown.samples_CHW)[None], torch.tensor([999]),
            encoder_hidden_states=made.texts["prompt_embeds"][:, :2],
            class_labels=torch.cat((task.sin(), task.cos()), dim=-1), return_dict=False,
        )[0]  # fmt: skip
    return found


def test_an_image_is_estimated_as_its_authors_do(tmp_path: Path) -> None:
    """In one step; more steps, other samplers and seeds change nothing."""
    tiny = TinyModel(tmp_path, SHOWN_LAYOUTS["lotus_d"]())
    assert tiny.family.name == "lotus_d"
    assert isinstance(tiny.module(Role.DIFFUSION_MODEL), diffusers.UNet2DConditionModel)
    made = tiny.made(image=image(), **RUN)
    expected = _expected(tiny, made)
    assert_near(made.latents[0], expected)
    with torch.no_grad():
        decoded = tiny.module(Role.VAE).decode(expected / tiny.family.scaling_factor).sample
    pixels = (decoded[0].movedim(0, -1) / 2 + 0.5).clamp(0, 1).numpy()
    assert np.abs(made.pixels / 255 - pixels).max() <= 1 / 255
    again = tiny.made(image=image(), **RUN | {"seed": 12, "steps": 3, "sampler": "dpmpp_2m"})
    assert_near(again.latents[0], expected)
    tiny.close()


def test_a_text_and_changes_of_the_image_are_refused(tmp_path: Path) -> None:
    tiny = TinyModel(tmp_path, SHOWN_LAYOUTS["lotus_d"]())
    for fields, said in (
        ({"image": image(), "prompt": "a cat"}, "prompt: found 'a cat', expected an empty text"),
        ({"image": image(), "prompt": "", "strength": 0.5}, "strength"),
        ({"prompt": ""}, "image"),
        ({"image": image(), "prompt": "", "options": {"freeu": {}}}, "freeu"),
    ):
        with pytest.raises(UserError, match=said):
            tiny.made(**fields)
    with pytest.raises(UnknownArchitecture, match="cannot be saved as a folder of diffusers: it predicts clean latent"):
        save_diffusers(open_checkpoint(tiny.model.source), tmp_path / "folder")
    tiny.close()


def test_a_file_of_the_unet_alone_runs_with_the_parts_of_stable_diffusion_2(tmp_path: Path) -> None:
    for place in ("whole", "apart"):
        (tmp_path / place).mkdir()
    whole = TinyModel(tmp_path / "whole", SHOWN_LAYOUTS["lotus_d"]())
    file = load_file(whole.model.source)
    for name, start in (
        ("lotus", "model.diffusion_model."),
        ("clip_h", "cond_stage_model.model."),
        ("vae", "first_stage_model."),
    ):
        part = {key.removeprefix(start): value for key, value in file.items() if key.startswith(start)}
        save_file(part, tmp_path / f"apart/{name}.safetensors")
    parts = {"diffusion_model": "lotus.safetensors", "vae": "vae.safetensors", "text_encoders": ["clip_h.safetensors"]}
    (tmp_path / "apart/tiny.model.json").write_text(json.dumps({"format": 1, **parts}))
    apart = TinyModel.of_folder(tmp_path / "apart")
    assert apart.family.name == "lotus_d"
    assert_near(apart.made(image=image(), **RUN).latents[0], whole.made(image=image(), **RUN).latents[0])
    apart.close()
    whole.close()


def test_a_published_folder_is_read_whatever_its_scheduler_says(tmp_path: Path) -> None:
    """That of Stable Diffusion 2 with the UNet of Lotus: no class of diffusers loads its pipeline."""
    for place in ("file", "sd2", "again"):
        (tmp_path / place).mkdir()
    file = TinyModel(tmp_path / "file", SHOWN_LAYOUTS["lotus_d"]())
    stable = TinyModel(tmp_path / "sd2", layouts.tiny_sd2())
    folder = tmp_path / "again/tiny"
    save_diffusers(open_checkpoint(stable.model.source), folder)
    stable.close()
    unet, vae = file.module(Role.DIFFUSION_MODEL), file.module(Role.VAE)
    vae.register_to_config(scaling_factor=file.family.scaling_factor)
    for part, place in ((unet, "unet"), (vae, "vae")):
        part.save_pretrained(folder / place)
    scheduler = folder / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"prediction_type": "sample"}))
    opened = TinyModel.of_folder(tmp_path / "again")
    assert (opened.family.name, opened.family.sampling.prediction) == ("lotus_d", Prediction.CLEAN)
    made = opened.made(image=image(), **RUN)
    assert_near(made.latents[0], _expected(opened, made))
    opened.close()
    file.close()
