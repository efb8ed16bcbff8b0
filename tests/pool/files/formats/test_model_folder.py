"""Model folders are described as the libraries that write them mean it; a folder with something missing, or that leads
elsewhere, is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from safetensors.torch import save_file

from modelpool.pool.files.formats.containment import leads_out
from modelpool.pool.files.formats.model_folder import is_model_folder, read_component, read_model_folder
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile
from modelpool.pool.weights.quant.mapped_file import MappedFile

INDEX: dict[str, Any] = {
    "_class_name": "StableDiffusionPipeline",
    "_diffusers_version": "0.42.1",
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
}


def component(folder: Path, config: object, *files: str, config_file: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / config_file).write_text(json.dumps(config))
    for name in files:
        if name.endswith(".safetensors"):
            save_file({"w": torch.ones(2)}, folder / name)
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
        else:
            torch.save({"w": torch.ones(2)}, folder / name)
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    component(folder / "unet", {"sample_size": 64}, "diffusion_pytorch_model.safetensors")
    component(folder / "text_encoder", {"hidden_size": 8}, "model.safetensors")
    component(folder / "scheduler", {"beta_start": 0.1}, config_file="scheduler_config.json")
    component(folder / "tokenizer", {"model_max_length": 77}, config_file="tokenizer_config.json")
    (folder / "model_index.json").write_text(json.dumps(INDEX))
    return folder


def test_components_and_their_files_are_described(model: Path) -> None:
    found = read_model_folder(model)
    assert is_model_folder(model)
    assert not is_model_folder(model / "unet")
    assert (found.pipeline, found.path) == ("StableDiffusionPipeline", str(model))
    assert list(found.components) == ["scheduler", "text_encoder", "tokenizer", "unet"]
    assert found.settings == {"_diffusers_version": "0.42.1", "requires_safety_checker": False}
    unet = found.components["unet"]
    assert (unet.library, unet.class_name) == ("diffusers", "UNet2DConditionModel")
    assert unet.config == {"sample_size": 64}
    assert unet.weights == str(model / "unet" / "diffusion_pytorch_model.safetensors")
    assert {name for name, c in found.components.items() if not c.weights} == {"scheduler", "tokenizer"}
    assert found.components["scheduler"].config == {"beta_start": 0.1}


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["whole", "shards"])
def test_what_diffusers_saves_is_read(tmp_path: Path, shard_size: str) -> None:
    """A real UNet and VAE of two channels, saved by the library itself: equal tensors come back."""
    sizes: dict[str, Any] = {"block_out_channels": (8,), "norm_num_groups": 2, "layers_per_block": 1}
    unet = UNet2DConditionModel(
        down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",), cross_attention_dim=8, **sizes
    )
    vae = AutoencoderKL(**sizes)
    unet.save_pretrained(tmp_path / "unet", max_shard_size=shard_size)
    vae.save_pretrained(tmp_path / "vae", variant="fp16")
    DDIMScheduler().save_pretrained(tmp_path / "scheduler")
    for name, module in (("unet", unet), ("vae", vae)):
        found = read_component(tmp_path / name)
        assert found.class_name == type(module).__name__
        assert found.config["block_out_channels"] == [8]
        assert found.weights.endswith(".index.json") == (name == "unet" and shard_size == "20KB")
        tensors = MappedFile.open(found.weights).tensors()
        expected = module.state_dict()
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    assert read_component(tmp_path / "scheduler").weights == ""
    assert read_component(tmp_path / "vae").variant == "fp16"


VARIANTS = {
    "plain before a variant": (("model.safetensors", "model.fp16.safetensors"), "", "model.safetensors"),
    "the wanted variant": (("model.safetensors", "model.fp16.safetensors"), "fp16", "model.fp16.safetensors"),
    "the only variant": (("model.fp16.safetensors",), "", "model.fp16.safetensors"),
    "plain where the variant is not": (("model.safetensors",), "fp16", "model.safetensors"),
    "safetensors before pickles": (("model.safetensors", "pytorch_model.bin"), "", "model.safetensors"),
    "a safetensors variant before a plain pickle": (
        ("model.fp16.safetensors", "pytorch_model.bin"),
        "",
        "model.fp16.safetensors",
    ),
    "a pickle where there is nothing else": (("pytorch_model.bin",), "", "pytorch_model.bin"),
    "an index before a file": (
        ("model.safetensors", "model.safetensors.index.json"),
        "",
        "model.safetensors.index.json",
    ),
    "an index of a variant": (
        ("model.safetensors.index.fp16.json", "model.safetensors"),
        "fp16",
        "model.safetensors.index.fp16.json",
    ),
    "no shard by itself": (
        ("model.safetensors.index.json", "model-00001-of-00001.safetensors", "model.fp16-00001-of-00002.safetensors"),
        "",
        "model.safetensors.index.json",
    ),
    "nothing of other programs": (
        ("model.safetensors", "openvino_model.bin", "lora.safetensors"),
        "",
        "model.safetensors",
    ),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_which_of_several_files_is_taken(tmp_path: Path, case: str) -> None:
    files, variant, expected = VARIANTS[case]
    found = read_component(component(tmp_path / "part", {}, *files), variant=variant)
    assert found.weights == str(tmp_path / "part" / expected)


def test_a_pickle_of_a_folder_is_opened_only_where_it_is_allowed(tmp_path: Path) -> None:
    found = read_component(component(tmp_path / "part", {}, "diffusion_pytorch_model.bin"))
    with pytest.raises(UnsafeFile, match=r"diffusion_pytorch_model\.bin: a PyTorch pickle"):
        MappedFile.open(found.weights)


def test_a_missing_component_is_named(model: Path) -> None:
    (model / "unet").rename(model / "elsewhere")
    with pytest.raises(CorruptFile, match=r"model_index\.json: names a component 'unet', but there is no folder"):
        read_model_folder(model)


def test_a_component_without_its_weights_is_named(model: Path) -> None:
    (model / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"unet: a component \(UNet2DConditionModel\) without weights"):
        read_model_folder(model)


def test_lists_of_numbers_are_settings(model: Path) -> None:
    """The published folders of Krea 2 name the layers that they read, those of Qwen-Image 2.1 Turbo their levels."""
    numbers = {"text_encoder_select_layers": [2, 5, 8], "sample_sigmas": [1.0, 0.5]}
    (model / "model_index.json").write_text(json.dumps(INDEX | numbers))
    settings = read_model_folder(model).settings
    assert {name: settings[name] for name in numbers} == numbers


FAULTS = {
    "no JSON": ("{", "model_index.json: the file is damaged"),
    "no object": ("[]", "a JSON list, expected an object"),
    "no components": ('{"_class_name": "X"}', "names no pipeline or no components"),
    "a class alone": ('{"unet": ["diffusers"]}', r"unet is \['diffusers'\], expected a library and a class"),
    "a number as a class": ('{"unet": ["diffusers", 7]}', "expected a library and a class"),
    "a component twice": ('{"unet": ["a", "b"], "unet": ["a", "b"]}', "names 'unet' twice"),
    "a component above": ('{"../unet": ["diffusers", "X"]}', "names '../unet', expected the name of a file"),
    "a component anywhere": ('{"/etc": ["diffusers", "X"]}', "names '/etc'"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_index_is_refused(model: Path, fault: str) -> None:
    text, message = FAULTS[fault]
    (model / "model_index.json").write_text(text)
    with pytest.raises(CorruptFile, match=message):
        read_model_folder(model)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"model_index\.json: no such file"):
        read_model_folder(tmp_path)
    with pytest.raises(CorruptFile, match=r"holds none of config\.json"):
        read_component(tmp_path)


@pytest.mark.parametrize("what", ["unet", "unet/config.json", "unet/diffusion_pytorch_model.safetensors"])
def test_a_link_out_of_the_folder_is_refused(model: Path, tmp_path: Path, what: str) -> None:
    (model / what).rename(tmp_path / "outside")
    (model / what).symlink_to(tmp_path / "outside")
    assert leads_out(model / what, model)
    with pytest.raises(UnsafeFile, match="outside, expected a file in"):
        read_model_folder(model)


def test_links_within_the_folder_and_a_linked_folder_are_read(model: Path, tmp_path: Path) -> None:
    """Two names for one file; and a folder that a person names by a link is read wherever that leads."""
    weights = model / "text_encoder" / "model.safetensors"
    weights.rename(model / "shared.safetensors")
    weights.symlink_to("../shared.safetensors")
    (tmp_path / "link").symlink_to(model)
    assert read_model_folder(tmp_path / "link").components["text_encoder"].weights
    assert not leads_out(weights, model)


def test_a_circle_of_links_leads_out(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert leads_out(tmp_path / "a", tmp_path)


def test_the_index_of_a_model_may_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    """Its text is shown in messages: it must be no way to read other files."""
    secret = tmp_path / "secret.json"
    secret.write_text('{"_class_name": "Secret"}')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").symlink_to(secret)
    with pytest.raises(UnsafeFile, match=r"model_index\.json: a link that leads to .*secret\.json"):
        read_model_folder(tmp_path / "model")
