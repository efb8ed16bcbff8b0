"""Tensors that a folder of diffusers has no place for are told, and those that by design have none are not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import FilesWouldBeLost
from tests.pool.families.test_transformers_as_folders import FAMILIES, write
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

_TEXT, _UNET, _VAE = "cond_stage_model.transformer.text_model.", "model.diffusion_model.", "first_stage_model."
#: what files of SD1 have been seen with, and more that may matter to somebody
STRANGE = (
    "control_model.input_blocks.0.0.weight", "emb_params", f"{_UNET}position_net.null.weight",
    f"{_VAE}quantize.embedding.weight",
)  # fmt: skip
WITHOUT_PLACE = (
    "betas", "alphas_cumprod", "sqrt_one_minus_alphas_cumprod", "posterior_mean_coef1", "logvar", "model_ema.decay",
    "model_ema.num_updates", "model_ema.diffusion_modelinput_blocks00weight", "v_pred", "ztsnr",
    f"{_VAE}loss.discriminator.main.0.weight", f"{_VAE}model_ema.decay", "cond_stage_model.logit_scale",
    "cond_stage_model.transformer.vision_model.embeddings.position_ids",
)  # fmt: skip


def with_tensors(path: Path, names: tuple[str, ...]) -> Path:
    write_tiny_checkpoint(path)
    save_file({**load_file(path), **{name: torch.ones(2) for name in names}}, path)
    return path


def test_what_no_component_takes_is_told(tmp_path: Path) -> None:
    """Whether or not it has the prefix of a component; a file that is saved again has it."""
    source = with_tensors(tmp_path / "a.safetensors", (*STRANGE, *WITHOUT_PLACE))
    saved = save_diffusers(open_checkpoint(source), tmp_path / "folder")
    assert sorted(saved.left_out) == sorted(STRANGE)
    again = save_checkpoint(open_checkpoint(source), tmp_path / "b.safetensors")
    assert again.left_out == ()
    assert load_file(again.path).keys() == load_file(source).keys()


def test_what_has_no_place_by_design_is_not_told(tmp_path: Path) -> None:
    source = with_tensors(tmp_path / "a.safetensors", WITHOUT_PLACE)
    assert save_diffusers(open_checkpoint(source), tmp_path / "folder").left_out == ()


@pytest.mark.parametrize("layout", [layouts.tiny_sd2, layouts.tiny_sdxl])
def test_temperatures_and_projections_of_text_encoders_have_none(layout: object, tmp_path: Path) -> None:
    assert callable(layout)
    source = write_tiny_checkpoint(tmp_path / "a.safetensors", layout=layout())
    assert any(key.endswith("logit_scale") for key in load_file(source))
    assert save_diffusers(open_checkpoint(source), tmp_path / "folder").left_out == ()


def test_a_component_that_the_folder_lacks_is_told_once(tmp_path: Path) -> None:
    """As a lack, and not tensor for tensor."""
    path = write(tmp_path, FAMILIES["flux_dev"])
    kept = {key: value for key, value in load_file(path).items() if not key.startswith("vae.encoder.")}
    assert len(kept) < len(load_file(path))
    save_file(kept, path)
    saved = save_diffusers(open_checkpoint(path, whole=False), tmp_path / "folder")
    assert [lack.partition(":")[0] for lack in saved.missing] == ["vae"]
    assert saved.left_out == ()


def test_a_folder_is_not_written_over_with_itself_where_something_would_be_lost(tmp_path: Path) -> None:
    """A vision encoder that no component of the family is: its folder is named, and kept."""
    folder = tmp_path / "folder"
    save_diffusers(open_checkpoint(write_tiny_checkpoint(tmp_path / "a.safetensors")), folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["image_encoder"] = ["transformers", "CLIPVisionModelWithProjection"]
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "image_encoder").mkdir()
    (folder / "image_encoder" / "config.json").write_text("{}")
    save_file({"visual_projection.weight": torch.ones(2)}, folder / "image_encoder" / "model.safetensors")
    left_out = ("image_encoder.visual_projection.weight",)
    with pytest.raises(FilesWouldBeLost, match="is the folder of the saved model; expected another path"):
        save_diffusers(open_checkpoint(folder), folder, overwrite=True)
    assert (folder / "image_encoder" / "model.safetensors").is_file()
    assert save_diffusers(open_checkpoint(folder), tmp_path / "other").left_out == left_out
