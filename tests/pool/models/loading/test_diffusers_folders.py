"""A folder of diffusers is run: it makes the image of the single file of the same weights; its
configurations are believed where shapes tell nothing, and refused where they say other than the tensors."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.engine.engine import Engine
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.models.saving.diffusers_folder import save_diffusers
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture, UnsafeFile
from modelpool.pool.values.core.sampling_facts import NoiseKind, Prediction
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora
from tests.pool.models.saving.contents import Contents, contents_made, write_contents
from tests.pool.pipeline import PLENTY_BYTES, open_engine
from tests.pool.separate import Painter, write_atomically

VELOCITY = {"v_pred": torch.empty(0)}
ZERO_TERMINAL = {**VELOCITY, "ztsnr": torch.empty(0)}
LATENT_MEASURES = {
    "edm_mean": torch.tensor([-1.5, 1.8, -1.25, 2.5]).reshape(1, 4, 1, 1),
    "edm_std": torch.tensor([8.5, 5.75, 6.5, 5.25]).reshape(1, 4, 1, 1),
}
ENDS_OF_NOISE = {"edm_vpred.sigma_min": torch.tensor(0.01), "edm_vpred.sigma_max": torch.tensor(60.0)}
#: a layout, and tensors that say of the prediction and the noise
CASES: Mapping[str, tuple[str, Mapping[str, torch.Tensor]]] = {
    "sd1": ("tiny_sd1", {}),
    "sd1 of velocity": ("tiny_sd1", VELOCITY),
    "sd2": ("tiny_sd2", {}),
    "sd2 to noise alone": ("tiny_sd2", ZERO_TERMINAL),
    "sdxl": ("tiny_sdxl", {}),
    "sdxl_refiner": ("tiny_sdxl_refiner", {}),
    "playground_25": ("tiny_sdxl", LATENT_MEASURES),
    "sdxl with ends of noise": ("tiny_sdxl", ENDS_OF_NOISE),
}


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = open_engine("sim", PLENTY_BYTES)
    yield opened
    opened.close()


def both(base: Path, layout: str = "tiny_sd1", more: Mapping[str, torch.Tensor] | None = None) -> tuple[Path, Path]:
    """A single file, and the folder of the same weights beside it."""
    if more:
        _save(base, layout, more)
    else:
        write_contents(_saved(layout), base)
    return base / "file.safetensors", base / "folder"


@functools.lru_cache(maxsize=2)
def _saved(layout: str) -> Contents:
    return contents_made(lambda base: _save(base, layout, {}))


def _save(base: Path, layout: str, more: Mapping[str, torch.Tensor]) -> None:
    file = write_atomically(base / "file.safetensors", layout)
    if more:
        save_file({**load_file(file), **more}, file)
    save_diffusers(open_checkpoint(file), base / "folder")


def changed(folder: Path, part: str, **said: Any) -> Path:
    """`folder`, with other things said in the configuration of a part; None leaves a key out."""
    names = ("config.json", "scheduler_config.json")
    path = next(folder / part / name for name in names if (folder / part / name).is_file())
    config = {**json.loads(path.read_text()), **said}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_folder_makes_the_image_of_the_single_file(tmp_path: Path, engine: Engine, case: str) -> None:
    layout, more = CASES[case]
    both(tmp_path, layout, more)
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    listed = {model.name: model for model in catalog.models()}
    told = [(m.family, m.width, m.height, m.problem) for m in (listed["folder"], listed["file"])]
    assert told[0] == told[1]
    painter = Painter(engine, catalog)
    images = [painter.image(name).astype(int) for name in ("folder", "file")]
    # open_clip stores the projection of a pooled text with rows for columns, and kernels round that otherwise
    at_most = 1 if layout in ("tiny_sdxl", "tiny_sdxl_refiner") else 0
    assert np.abs(images[0] - images[1]).max() <= at_most


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"sd2", "sd2 to noise alone"}))
def test_the_file_made_of_a_folder_makes_the_image_of_the_first(tmp_path: Path, engine: Engine, case: str) -> None:
    """It has nothing but the same bits, and is read as the first."""
    layout, more = CASES[case]
    _, folder = both(tmp_path, layout, more)
    save_checkpoint(open_checkpoint(folder), tmp_path / "again.safetensors")
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    listed = {model.name: model for model in catalog.models()}
    told = [(m.family, m.width, m.height, m.problem) for m in (listed["again"], listed["file"])]
    assert told[0] == told[1]
    painter = Painter(engine, catalog)
    assert np.array_equal(painter.image("again"), painter.image("file"))


def test_the_same_lora_does_the_same_to_both(tmp_path: Path, engine: Engine) -> None:
    both(tmp_path)
    (tmp_path / "loras").mkdir()
    write_tiny_lora(tmp_path / "loras" / "light.safetensors")
    painter = Painter(engine, Catalog([tmp_path], [tmp_path / "loras"], "sim", tmp_path / "state"))
    patched = painter.image("folder", {"light": 0.9})
    assert np.array_equal(patched, painter.image("file", {"light": 0.9}))
    assert not np.array_equal(patched, painter.image("folder"))


def _as_variant(folder: Path) -> None:
    for file in list(folder.rglob("*.safetensors")):
        file.rename(file.with_name(f"{file.stem}.fp16.safetensors"))


def _in_shards(folder: Path) -> None:
    for part, stem in (("unet", "diffusion_pytorch_model"), ("text_encoder", "model")):
        whole = folder / part / f"{stem}.safetensors"
        tensors = load_file(whole)
        places = {key: f"{stem}-0000{n % 2 + 1}-of-00002.safetensors" for n, key in enumerate(tensors)}
        for place in set(places.values()):
            save_file({key: tensors[key] for key in tensors if places[key] == place}, folder / part / place)
        (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        whole.unlink()


def _in_older_names(folder: Path) -> None:
    """As folders of before 2023 have it: other names in the VAE's attention, and no level of names in the text."""
    vae, text = folder / "vae" / "diffusion_pytorch_model.safetensors", folder / "text_encoder" / "model.safetensors"
    older = (("to_q", "query"), ("to_k", "key"), ("to_v", "value"), ("to_out.0", "proj_attn"))
    tensors = load_file(vae)
    for new, old in older:
        tensors = {key.replace(f"attentions.0.{new}.", f"attentions.0.{old}."): x for key, x in tensors.items()}
    save_file(tensors, vae)
    save_file({key.removeprefix("text_model."): x for key, x in load_file(text).items()}, text)


@pytest.mark.parametrize("written", [_as_variant, _in_shards, _in_older_names])
def test_folders_may_be_written_otherwise(tmp_path: Path, engine: Engine, written: Callable[[Path], None]) -> None:
    _, folder = both(tmp_path)
    written(folder)
    painter = Painter(engine, Catalog([tmp_path], [], "sim", tmp_path / "state"))
    assert np.array_equal(painter.image("folder"), painter.image("file"))


def test_what_is_not_read_need_not_be_there(tmp_path: Path) -> None:
    """A safety checker, a tokenizer: the pool brings its own vocabulary."""
    _, folder = both(tmp_path)
    shutil.rmtree(folder / "tokenizer")
    index = json.loads((folder / "model_index.json").read_text())
    del index["tokenizer"]
    (folder / "model_index.json").write_text(json.dumps(index))
    assert open_checkpoint(folder).build(Role.TEXT_ENCODER).module is not None


def test_two_folders_with_the_same_vae_share_it(tmp_path: Path) -> None:
    _, folder = both(tmp_path)
    other = shutil.copytree(folder, tmp_path / "other")
    weights = other / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({key: (tensor * 1.5).half() for key, tensor in load_file(weights).items()}, weights)
    catalog = Catalog([tmp_path], [], "sim", tmp_path / "state")
    one, two = (dict(catalog.find_model(name).components) for name in ("folder", "other"))
    assert {role for role in one if one[role] == two[role]} == {Role.TEXT_ENCODER, Role.VAE}
    changed(other, "vae", norm_num_groups=4)
    third = dict(Catalog([tmp_path], [], "sim", tmp_path / "state").find_model("other").components)
    assert third[Role.VAE].partition("@")[2] != two[Role.VAE].partition("@")[2], "another module of the same weights"


def test_configurations_tell_what_no_shape_does(tmp_path: Path) -> None:
    _, folder = both(tmp_path)
    assert open_checkpoint(folder).family.sampling.prediction is Prediction.NOISE
    changed(folder, "scheduler", prediction_type="v_prediction")
    changed(folder, "vae", scaling_factor=0.5, shift_factor=0.25)
    changed(folder, "unet", sample_size=96, attention_head_dim=4)
    changed(folder, "text_encoder", hidden_act="gelu")
    found = open_checkpoint(folder)
    assert found.family.sampling.prediction is Prediction.VELOCITY
    assert found.family.sampling.noise.kind is NoiseKind.SCALED_LINEAR
    assert (found.latent.scaling_factor, found.latent.shift) == (0.5, 0.25)
    assert found.family.native_pixels == 96 * found.latent.downscale
    unet = found.build(Role.DIFFUSION_MODEL).module
    assert unet.config["attention_head_dim"] == 4
    assert found.build(Role.TEXT_ENCODER).module.config.hidden_act == "gelu"


@pytest.mark.parametrize(
    ("part", "said", "message"),
    [
        ("unet", {"block_out_channels": [48, 64]}, r"configuration of unet: block_out_channels: found \[48, 64\], exp"),
        ("unet", {"in_channels": 9}, "configuration of unet: in_channels: found 9, expected 4 as its tensors have"),
        ("unet", {"cross_attention_dim": 1024}, "unet: cross_attention_dim: found 1024, expected 32"),
        ("unet", {"layers_per_block": 10**9}, "unet: layers_per_block: found 1000000000, expected no more than its"),
        ("unet", {"_class_name": "UNetMotionModel"}, "unet: class_name: found 'UNetMotionModel', expected UNet2DCon"),
        ("unet", {"sample_size": "large"}, "unet: sample_size: found 'large', expected the edge of a latent"),
        ("vae", {"latent_channels": 16}, "vae: latent_channels: found 16, expected 4"),
        ("vae", {"scaling_factor": "1"}, "vae: scaling_factor: found '1', expected a number"),
        ("vae", {"scaling_factor": -1}, "vae: scaling_factor: found -1.0, expected a number above 0"),
        ("vae", {"latents_mean": [0, 0, 0, 0]}, "vae: latents_mean and latents_std: found"),
        ("vae", {"latents_mean": [0]}, "vae: latents_mean: found .0., expected a number for each of 4 channels"),
        ("text_encoder", {"hidden_size": 768}, "text_encoder: hidden_size: found 768, expected 32"),
        ("scheduler", {"prediction_type": "sample"}, "scheduler: prediction_type: found 'sample', expected epsilon or"),
        ("scheduler", {"beta_schedule": "sigmoid"}, "scheduler: beta_schedule: found 'sigmoid'"),
        ("scheduler", {"num_train_timesteps": 50}, "scheduler: num_train_timesteps: found 50, expected 1000"),
        ("scheduler", {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr: found True, expected false"),
        ("scheduler", {"beta_end": 0.0001}, "scheduler: beta_start and beta_end"),
        ("scheduler", {"trained_betas": [0.1]}, "scheduler: trained_betas"),
    ],
)
def test_configurations_that_say_other_than_the_tensors_are_refused(
    tmp_path: Path, part: str, said: Mapping[str, Any], message: str
) -> None:
    """Before any module is built, with the folder, the part and the key."""
    _, folder = both(tmp_path)
    changed(folder, part, **said)
    if "_class_name" in said:
        index = json.loads((folder / "model_index.json").read_text())
        index[part][1] = said["_class_name"]
        (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UnknownArchitecture, match=message) as raised:
        open_checkpoint(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    ("part", "said", "role"),
    [
        ("unet", {"down_block_types": ["NoSuchBlock", "DownBlock2D"]}, Role.DIFFUSION_MODEL),
        ("unet", {"layers_per_block": 2}, Role.DIFFUSION_MODEL),
        ("unet", {"norm_num_groups": 7}, Role.DIFFUSION_MODEL),
        ("vae", {"norm_num_groups": 7}, Role.VAE),
        ("vae", {"layers_per_block": 3}, Role.VAE),
        ("text_encoder", {"num_attention_heads": 5}, Role.TEXT_ENCODER),
    ],
)
def test_configurations_that_build_nothing_are_refused(
    tmp_path: Path, part: str, said: Mapping[str, Any], role: Role
) -> None:
    _, folder = both(tmp_path)
    with pytest.raises(UnknownArchitecture) as raised:
        open_checkpoint(changed(folder, part, **said)).build(role)
    assert str(folder) in str(raised.value)


def test_other_models_in_folders_are_told_by_name(tmp_path: Path) -> None:
    _, folder = both(tmp_path)
    (folder / "unet").rename(folder / "transformer")
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = index.pop("unet")
    (folder / "model_index.json").write_text(json.dumps(index))
    expected = "found Stable Diffusion 1 in the folder 'transformer', expected it in 'unet'"
    with pytest.raises(UnknownArchitecture, match=expected):
        open_checkpoint(folder)


def test_a_folder_is_not_left(tmp_path: Path) -> None:
    _, folder = both(tmp_path)
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    with pytest.raises(UnsafeFile, match="a link that leads to"):
        open_checkpoint(folder)
    weights.unlink()
    with pytest.raises(CorruptFile, match="without weights"):
        open_checkpoint(folder)


def test_a_folder_is_saved_as_a_folder(tmp_path: Path) -> None:
    """Tensor for tensor."""
    _, folder = both(tmp_path, "tiny_sdxl")
    save_diffusers(open_checkpoint(folder), tmp_path / "again")
    for file in folder.rglob("*.safetensors"):
        before, after = load_file(file), load_file(tmp_path / "again" / file.relative_to(folder))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
