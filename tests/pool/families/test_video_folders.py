"""Folders of diffusers with a UNet of frames and a vision encoder make what a file of the same weights makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
from safetensors.torch import load_file, save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_seen_videos import FIELDS, image
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_transformers import seeded
from tests.pool.families.tiny_videos import (
    VIDEOS,
    TinyVideoModel,
    assert_same_video,
    clip_vision,
    temporal_vae,
    video_unet,
)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def write_folder(folder: Path) -> None:
    """The parts of the tiny SVD as their libraries save them."""
    folder.mkdir(parents=True)
    index: dict[str, Any] = {"_class_name": "StableVideoDiffusionPipeline"}
    unet, vae = seeded(lambda: video_unet(3), 1), seeded(temporal_vae, 2)
    unet.register_to_config(num_frames=14)
    scheduler = diffusers.EulerDiscreteScheduler(
        prediction_type="v_prediction", timestep_type="continuous", use_karras_sigmas=True, sigma_min=0.002,
        sigma_max=700.0, timestep_spacing="leading", steps_offset=1, beta_schedule="scaled_linear",
    )  # fmt: skip
    for place, part, library in (
        ("unet", unet, "diffusers"), ("vae", vae, "diffusers"), ("scheduler", scheduler, "diffusers"),
        ("image_encoder", seeded(clip_vision, 3), "transformers"),
    ):  # fmt: skip
        part.save_pretrained(folder / place)
        index[place] = [library, type(part).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))


def test_a_folder_makes_what_the_file_makes(tmp_path: Path) -> None:
    """And as many frames as its UNet was trained for where nobody says."""
    (tmp_path / "file").mkdir()
    write_folder(tmp_path / "folders" / "tiny")
    made = []
    for tiny in (TinyVideoModel(tmp_path / "file", VIDEOS["svd"]), TinyModel.of_folder(tmp_path / "folders")):
        assert tiny.family.name == "svd"
        video = tiny.family.sampling.video
        assert video is not None
        assert video.frames == (14 if tiny.family.configs else 25)
        made.append(tiny.made(image=image(), **FIELDS))
        tiny.close()
    assert_same_video(made[0], made[1])


def test_a_folder_tells_the_heads_and_the_activation_of_its_vision_encoder(tmp_path: Path) -> None:
    """No shape does."""
    write_folder(tmp_path / "tiny")
    path = tmp_path / "tiny" / "image_encoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 8, "hidden_act": "quick_gelu"}))
    config = open_checkpoint(tmp_path / "tiny").build(Role.VISION_ENCODER).module.config
    assert (config.num_attention_heads, config.hidden_act) == (8, "quick_gelu")


@pytest.mark.parametrize(
    ("place", "said", "refusal"),
    [
        ("image_encoder", {"num_attention_heads": 5}, "num_attention_heads: found 5, expected a divisor of its width"),
        ("image_encoder", {"num_attention_heads": "x"}, "num_attention_heads: found 'x'"),
        ("image_encoder", {"hidden_act": "none"}, "CLIPVisionModelWithProjection cannot have these sizes"),
        ("image_encoder", {"hidden_size": 64}, "hidden_size: found 64, expected 32 as its tensors have"),
        ("unet", {"num_frames": 0}, "configuration of unet: num_frames: found 0.0, expected a whole number from 1"),
        ("unet", {"num_frames": "many"}, "configuration of unet: num_frames: found 'many', expected a number"),
        ("vae", {"scaling_factor": -1.0}, "configuration of vae: scaling_factor: found -1.0"),
        ("scheduler", {"prediction_type": "epsilon"}, "prediction_type: found 'epsilon', expected v_prediction"),
        ("scheduler", {"sigma_min": 800.0}, "sigma_min and sigma_max: found .*, expected a rising range"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    place: str, said: dict[str, Any], refusal: str, tmp_path: Path
) -> None:
    write_folder(tmp_path / "tiny")
    (path,) = (tmp_path / "tiny" / place).glob("*config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **said}))
    with pytest.raises(UnknownArchitecture, match=refusal):
        open_checkpoint(tmp_path / "tiny").build(Role.VISION_ENCODER)


def test_a_folder_without_a_vision_encoder_says_so(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny")
    for part in (tmp_path / "tiny" / "image_encoder").iterdir():
        part.unlink()
    (tmp_path / "tiny" / "image_encoder").rmdir()
    index = json.loads((tmp_path / "tiny" / "model_index.json").read_text())
    (tmp_path / "tiny" / "model_index.json").write_text(json.dumps({**index, "image_encoder": [None, None]}))
    with pytest.raises(UnknownArchitecture, match="Stable Video Diffusion, but its folder has no image_encoder"):
        open_checkpoint(tmp_path / "tiny")


def test_a_vision_encoder_of_other_tensors_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "tiny")
    path = tmp_path / "tiny" / "image_encoder" / "model.safetensors"
    tensors = load_file(path)
    del tensors["vision_model.post_layernorm.bias"]
    save_file(tensors, path)
    with pytest.raises(UnknownArchitecture, match=r"its vision_encoder: .* 1 parameter has no source"):
        open_checkpoint(tmp_path / "tiny").build(Role.VISION_ENCODER)
