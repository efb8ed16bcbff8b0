"""Files, folders and lists of keys: what is read of them to recognise them, and what is said of damaged ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.families.detection.file_facts import FileFacts, Kind
from modelpool.pool.models.loading.recognition_input import recognise_file, recognise_folder, recognise_key_list
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture, UserError
from tests.pool.families.detection.published import shapes_of
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora

#: the tensors that make a UNet of diffusers recognisable, as small as they may be
TINY_UNET = {
    "conv_in.weight": (8, 4, 3, 3),
    "conv_out.weight": (4, 8, 3, 3),
    "time_embedding.linear_1.weight": (32, 8),
    "down_blocks.0.resnets.0.norm1.weight": (8,),
    "down_blocks.0.resnets.0.conv1.weight": (8, 8, 3, 3),
    "down_blocks.0.attentions.0.proj_in.weight": (8, 8, 1, 1),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight": (8, 16),
}


def write(path: Path, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float16) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: torch.zeros(shape, dtype=dtype) for key, shape in shapes.items()}, path)
    return path


def write_json(path: Path, value: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def test_a_file_is_read_with_types_and_bytes(tmp_path: Path) -> None:
    facts = recognise_file(write(tmp_path / "tiny.safetensors", layouts.tiny_sd1()))
    assert (facts.kind, facts.title) == (Kind.CHECKPOINT, "Stable Diffusion 1")
    for each in facts.components:
        assert each.dtypes == {"F16": 2 * each.parameters}


def test_quantized_layers_are_counted_by_their_format_with_the_shapes_that_they_stand_for(tmp_path: Path) -> None:
    shapes = layouts.tiny_sd1()
    key = "model.diffusion_model.input_blocks.1.1.transformer_blocks.0.ff.net.2.weight"
    tensors = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    tensors[key] = tensors[key].to(torch.float8_e4m3fn)
    tensors[key + "_scale"] = torch.ones((), dtype=torch.float32)
    marker = json.dumps({"format": "float8_e4m3fn"}).encode()
    tensors[key.removesuffix("weight") + "comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    save_file(tensors, tmp_path / "quantized.safetensors")
    facts = recognise_file(tmp_path / "quantized.safetensors")
    model = facts.diffusion
    assert model is not None
    assert model.dtypes["float8_e4m3fn"] == tensors[key].numel() + 4 + len(marker)
    plain = recognise_file(write(tmp_path / "plain.safetensors", shapes)).diffusion
    assert plain is not None
    assert (model.parameters, model.tensors, model.config) == (plain.parameters, plain.tensors, plain.config)
    assert facts.other_tensors == 0


@pytest.mark.parametrize("form", ["shapes", "with types", "header"])
def test_a_list_of_keys_is_as_good_as_the_file(form: str, tmp_path: Path) -> None:
    def entry(shape: tuple[int, ...]) -> Any:
        return {
            "shapes": list(shape),
            "with types": [list(shape), "torch.bfloat16"],
            "header": {"dtype": "BF16", "shape": list(shape), "data_offsets": [0, 0]},
        }[form]

    listed = {key: entry(shape) for key, shape in shapes_of("ace_step").items()}
    path = write_json(tmp_path / "keys.json", {**listed, "__metadata__": {"modelspec.prediction_type": "flow"}})
    facts = recognise_key_list(path)
    model = facts.diffusion
    assert model is not None
    assert (model.name, model.parameters, model.runs) == ("ace_step_1", 3_305_659_264, "")
    assert model.dtypes == ({} if form == "shapes" else {"BF16": 2 * model.parameters})
    assert [hint.kind for hint in facts.prediction] == ["flow"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1]", "keys.json: "),
        ("{", "keys.json: "),
        ('{"a": "b"}', "'a': found 'b', expected a list of sizes"),
        ('{"a": [-1]}', "expected a list of sizes"),
        ('{"a": [1.5]}', "expected a list of sizes"),
        ('{"a": [1,1,1,1,1,1,1,1,1]}', "expected a list of sizes"),
        ('{"a": {"dtype": "F16"}}', "expected a list of sizes"),
        ('{"a": [[4, 4], "F16"], "a": [4]}', "twice"),
    ],
)
def test_a_list_that_is_none_says_what_is_wrong(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(CorruptFile) as caught:
        recognise_key_list(tmp_path / "keys.json")
    assert complaint in str(caught.value)
    assert "keys.json" in str(caught.value)


def test_a_list_of_a_model_that_cannot_be_names_file_and_tensor(tmp_path: Path) -> None:
    listed = {key: list(shape) for key, shape in shapes_of("flux_dev").items()} | {"img_in.weight": [3072]}
    path = write_json(tmp_path / "keys.json", listed)
    with pytest.raises(
        UnknownArchitecture, match=r"keys\.json: its keys are those of Flux, but: tensor 'img_in\.weight'"
    ):
        recognise_key_list(path)


def model_folder(root: Path) -> Path:
    """A folder as diffusers writes it: the UNet in two shards beside another variant, the VAE in one file."""
    write_json(
        root / "model_index.json",
        {
            "_class_name": "StableDiffusionPipeline",
            "_diffusers_version": "0.42.1",
            "feature_extractor": [None, None],
            "scheduler": ["diffusers", "DDIMScheduler"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
            "safety_checker": [None, None],
        },
    )
    keys = list(TINY_UNET)
    shards = {f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors": keys[i::2] for i in range(2)}
    for name, own in shards.items():
        write(root / "unet" / name, {key: TINY_UNET[key] for key in own})
    weight_map = {key: name for name, own in shards.items() for key in own}
    write_json(root / "unet" / "diffusion_pytorch_model.safetensors.index.json", {"weight_map": weight_map})
    write(root / "unet" / "diffusion_pytorch_model.fp16.safetensors", TINY_UNET)
    write_json(root / "unet" / "config.json", {"_class_name": "UNet2DConditionModel"})
    vae = {"decoder.up_blocks.0.resnets.0.norm1.weight": (8,), "unheard.of": (3, 3)}
    write(root / "vae" / "diffusion_pytorch_model.safetensors", vae, torch.float32)
    write_json(root / "vae" / "config.json", {"_class_name": "AutoencoderKL"})
    write_json(root / "scheduler" / "scheduler_config.json", {"prediction_type": "v_prediction"})
    return root


def test_a_folder_of_diffusers_is_told_component_by_component(tmp_path: Path) -> None:
    facts = recognise_folder(model_folder(tmp_path / "model"))
    assert (facts.pipeline, facts.title) == ("StableDiffusionPipeline", "Stable Diffusion 1")
    unet = facts.components["unet"]
    assert (unet.name, unet.naming, unet.tensors, unet.prefix) == ("sd1", "diffusers", len(TINY_UNET), "unet")
    assert unet.dtypes == {"F16": 2 * unet.parameters}
    assert unet.config["class_name"] == "UNet2DConditionModel"
    assert list(facts.components) == ["unet", "vae"]
    assert facts.components["vae"].kind is Kind.VAE
    assert facts.other == {"scheduler": "DDIMScheduler"}
    assert [(hint.kind, hint.source) for hint in facts.prediction] == [("v", "configuration of scheduler")]


def test_one_component_of_a_folder_is_told_alone(tmp_path: Path) -> None:
    facts = recognise_folder(model_folder(tmp_path / "model") / "unet")
    assert (facts.pipeline, facts.title) == ("", "Stable Diffusion 1")
    assert facts.components["unet"].name == "sd1"


def test_a_component_of_a_damaged_folder_names_its_place(tmp_path: Path) -> None:
    root = model_folder(tmp_path / "model")
    write(root / "unet" / "diffusion_pytorch_model.safetensors", {**TINY_UNET, "conv_in.weight": (8, 4)})
    (root / "unet" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    with pytest.raises(UnknownArchitecture, match=r"model/unet: its keys are those of a UNet of latent diffusion, but"):
        recognise_folder(root)


def test_loose_files_are_told_one_by_one_with_what_is_wrong(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", layouts.tiny_sd1())
    write_tiny_lora(tmp_path / "light.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"")
    facts = recognise_folder(tmp_path)
    told = {name: found.kind for name, found in facts.files.items() if isinstance(found, FileFacts)}
    assert told == {"model.safetensors": Kind.CHECKPOINT, "light.safetensors": Kind.LORA}
    assert "the file is empty" in str(facts.files["broken.safetensors"])


def test_a_folder_without_weights_says_what_it_should_have(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder without model_index\.json or \.safetensors or"):
        recognise_folder(tmp_path)
