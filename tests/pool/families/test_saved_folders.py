"""Stable Video Diffusion and the stages of Stable Cascade as folders of diffusers: pipelines load what is saved, and it
makes what the file makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from safetensors.torch import load_file, save_file
from torch import nn

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.models.saving.replaced_folder import lost_files
from modelpool.pool.values.core.stage_params import ImagePixels
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.test_seen_videos import FIELDS, image
from tests.pool.families.test_stable_cascade import REQUEST, SECOND_STEPS
from tests.pool.families.test_video_folders import write_folder
from tests.pool.families.tiny_cascade import STAGE_B, STAGE_C, Pair, stage_b_file, write_files
from tests.pool.families.tiny_cascade import write_folders as write_stages
from tests.pool.families.tiny_model import TinyModel
from tests.pool.families.tiny_videos import VIDEOS, TinyVideoModel, assert_same_video

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
#: what stages are called as folders
PRIOR, DECODER = "stable-cascade-prior", "stable-cascade"


def assert_same_weights(ours: Any, theirs: nn.Module) -> None:
    """Both have the same state, whatever level of names text models have."""
    ours, found = ours.state_dict(), theirs.state_dict()
    assert {name.removeprefix("text_model.") for name in found} == {name.removeprefix("text_model.") for name in ours}
    plain = {name.removeprefix("text_model."): value for name, value in ours.items()}
    for name, value in found.items():
        assert torch.equal(value, plain[name.removeprefix("text_model.")]), name


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_svd_is_saved_as_its_pipeline_loads_it(tmp_path: Path) -> None:
    for name in ("file", "again"):
        (tmp_path / name).mkdir()
    file = TinyVideoModel(tmp_path / "file", VIDEOS["svd"])
    save_diffusers(open_checkpoint(file.model.source), tmp_path / "again" / "tiny")
    pipeline = diffusers.StableVideoDiffusionPipeline.from_pretrained(tmp_path / "again" / "tiny")
    places = {Role.DIFFUSION_MODEL: "unet", Role.VAE: "vae", Role.VISION_ENCODER: "image_encoder"}
    for role, place in places.items():
        assert_same_weights(file.module(role), getattr(pipeline, place))
    config = pipeline.scheduler.config
    assert (config.prediction_type, config.timestep_type, config.sigma_min, config.sigma_max) == (
        "v_prediction", "continuous", 0.002, 700.0,
    )  # fmt: skip
    assert pipeline.unet.config.num_frames == 25
    assert pipeline.feature_extractor.crop_size["height"] == pipeline.image_encoder.config.image_size
    folder, made = TinyModel.of_folder(tmp_path / "again"), []
    for tiny in (file, folder):
        made.append(tiny.made(image=image(), **FIELDS))
        tiny.close()
    assert_same_video(made[0], made[1])


def test_a_folder_of_svd_is_saved_with_what_it_says(tmp_path: Path) -> None:
    """Its frames, and the heads of its vision encoder, which no shape tells; and once more the same."""
    write_folder(tmp_path / "tiny")
    path = tmp_path / "tiny" / "image_encoder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 8}))
    save_diffusers(open_checkpoint(tmp_path / "tiny"), tmp_path / "first")
    save_diffusers(open_checkpoint(tmp_path / "first"), tmp_path / "second")
    assert json.loads((tmp_path / "first" / "unet" / "config.json").read_text())["num_frames"] == 14
    assert json.loads((tmp_path / "first" / "image_encoder" / "config.json").read_text())["num_attention_heads"] == 8
    for place in ("unet", "vae", "image_encoder"):
        (own,) = (tmp_path / "tiny" / place).glob("*.safetensors")
        before, after = load_file(own), load_file(tmp_path / "first" / place / own.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    first, second = files_of(tmp_path / "first"), files_of(tmp_path / "second")
    assert {name for name in first if first[name] != second[name]} <= {name for name in first if "safetensors" in name}
    assert first.keys() == second.keys()


def _stage(folder: Path, **given: Any) -> Any:
    """The pipeline of a stage. diffusers has the class of stage A where an index can no longer name it."""
    if (folder / "vqgan").is_dir():
        given["vqgan"] = PaellaVQModel.from_pretrained(folder / "vqgan")
    return diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True, **given)


def test_the_stages_of_stable_cascade_are_saved_as_their_pipelines_load_them(tmp_path: Path) -> None:
    """And the folders draw what the files draw."""
    files, folders = tmp_path / "files", tmp_path / "folders"
    files.mkdir()
    folders.mkdir()
    write_files(files)
    seeing = ("clip_l_vision.vision_model.embeddings.class_embedding", "vae.previewer.blocks.0.weight")
    for stage, name, left_out in ((STAGE_C, PRIOR, seeing), (STAGE_B, DECODER, ())):
        saved = save_diffusers(open_checkpoint(files / f"{stage}.safetensors"), folders / name)
        assert (saved.left_out, list(lost_files(folders / name))) == (left_out, [])
    prior, decoder = _stage(folders / PRIOR), _stage(folders / DECODER)
    assert type(prior).__name__ == "StableCascadePriorPipeline"
    assert type(decoder).__name__ == "StableCascadeDecoderPipeline"
    pair = Pair(files)
    for part, stage, role in (
        (prior.prior, STAGE_C, Role.DIFFUSION_MODEL), (prior.text_encoder, STAGE_C, Role.TEXT_ENCODER),
        (decoder.decoder, STAGE_B, Role.DIFFUSION_MODEL), (decoder.vqgan, STAGE_B, Role.VAE),
        (decoder.text_encoder, STAGE_C, Role.TEXT_ENCODER),
    ):  # fmt: skip
        assert_same_weights(pair.module(stage, role), part)
    assert prior.tokenizer("a cat").input_ids == decoder.tokenizer("a cat").input_ids
    assert decoder.vqgan.config.scale_factor == pytest.approx(0.43)
    again, ran = Pair(folders), []
    for each, model in ((pair, STAGE_C), (again, PRIOR)):
        ran.append(each.run(**{**REQUEST, "model": model}, decoder={"steps": SECOND_STEPS}))
        each.engine.close()
    for (_, ours), (_, other) in zip(ran[0].sampled(), ran[1].sampled(), strict=True):
        largest = max(1.0, float(np.abs(other.samples_CHW).max()))
        np.testing.assert_allclose(ours.samples_CHW, other.samples_CHW, atol=1e-5 * largest)
    images = [one.made.pixels_HWC.astype(int) for one in ran if isinstance(one.made, ImagePixels)]
    assert np.abs(images[0] - images[1]).max() <= 1


@pytest.mark.parametrize(("name", "places"), [(PRIOR, ("prior", "text_encoder")), (DECODER, ("decoder", "vqgan"))])
def test_a_folder_of_a_stage_is_saved_as_a_folder(name: str, places: tuple[str, ...], tmp_path: Path) -> None:
    """Tensor for tensor, and with the scale of its latents."""
    write_stages(tmp_path / "given")
    given, first, second = tmp_path / "given" / name, tmp_path / "first", tmp_path / "second"
    save_diffusers(open_checkpoint(given), first)
    save_diffusers(open_checkpoint(first), second)
    for place in (*places, "text_encoder"):
        (own,) = (given / place).glob("*.safetensors")
        before, after = load_file(own), load_file(first / place / own.name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
    if name == DECODER:
        assert json.loads((first / "vqgan" / "config.json").read_text())["scale_factor"] == pytest.approx(0.43)
    assert files_of(first).keys() == files_of(second).keys()


def test_a_stage_b_without_a_text_encoder_is_saved_without(tmp_path: Path) -> None:
    """Its pipeline takes the text as stage C read it."""
    bare = {key: value for key, value in stage_b_file().items() if not key.startswith("text_encoder.")}
    save_file(bare, tmp_path / "b.safetensors")
    save_diffusers(open_checkpoint(tmp_path / "b.safetensors"), tmp_path / "folder")
    assert not (tmp_path / "folder" / "text_encoder").exists()
    pipeline = _stage(tmp_path / "folder", text_encoder=None, tokenizer=None)
    assert type(pipeline.decoder).__name__ == "StableCascadeUNet"
