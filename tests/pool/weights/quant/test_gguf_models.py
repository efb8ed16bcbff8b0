"""A diffusion model and a text encoder in GGUF files are parts of a model like any others.

Proves, with the shapes model: weights stay packed over the mapped file, the image is the image of the values that the
blocks stand for, near the original's, the same everywhere whatever the budget, and LoRAs apply. With a tiny Flux: a
transformer and a T5 from GGUF files compute what the same values in safetensors files do. And its saved part.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.shapes.checker import matches, read_image
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.catalog.registry.folder_scan import ModelLocation, scan_locations
from modelpool.pool.files.formats.gguf_names import NAMES
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.saving.checkpoint_file import save_checkpoint
from modelpool.pool.values.core.errors import UnusableField
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.ops.packed import PackedWeight
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.files.formats.gguf_files import rounded, write_gguf
from tests.pool.weights.quant.test_checkpoints import PROMPT, SHAPES, draw

UNET, VAE, TEXT = "model.diffusion_model.", "first_stage_model.", "cond_stage_model.transformer."
KINDS = ("Q8_0", "Q4_0")


def describe_model(path: Path, diffusion_model: str, vae: str, *text_encoders: str) -> None:
    said = {"format": 1, "diffusion_model": diffusion_model, "vae": vae, "text_encoders": list(text_encoders)}
    path.write_text(json.dumps(said))


def part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shapes model in parts, its UNet as GGUF of two kinds, and with the values that these stand for."""
    path = tmp_path_factory.mktemp("gguf_models")
    tensors = load_file(SHAPES / "models" / "shapes.safetensors")
    save_file(part(tensors, VAE), path / "vae.safetensors")
    save_file(part(tensors, TEXT), path / "clip.safetensors")
    for kind in KINDS:
        write_gguf(path / f"unet-{kind}.gguf", part(tensors, UNET), kind, "sd1")
        save_file(rounded(part(tensors, UNET), kind), path / f"true-{kind}.safetensors")
        describe_model(path / f"{kind}.model.json", f"unet-{kind}.gguf", "vae.safetensors", "clip.safetensors")
        describe_model(path / f"v{kind}.model.json", f"true-{kind}.safetensors", "vae.safetensors", "clip.safetensors")
    return path


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    return Catalog([folder, SHAPES / "models"], [SHAPES / "loras"], "sim")


@pytest.mark.parametrize("kind", KINDS)
def test_weights_stay_packed_over_the_file(folder: Path, kind: str) -> None:
    checkpoint = open_checkpoint(folder / f"{kind}.model.json")
    module = checkpoint.build(Role.DIFFUSION_MODEL).module
    packed = {name: p for name, p in module.named_parameters() if isinstance(p.data, PackedWeight)}
    assert checkpoint.quantization(Role.DIFFUSION_MODEL) == {kind: len(packed)}
    assert len(packed) > 50
    found = packed["mid_block.attentions.0.transformer_blocks.0.attn1.to_q.weight"].data
    stored = checkpoint.mapped.tensor(UNET + "middle_block.1.transformer_blocks.0.attn1.to_q.weight")
    assert isinstance(found, PackedWeight)
    assert isinstance(stored, PackedWeight)
    assert found.parts["weight"].data_ptr() == stored.parts["weight"].data_ptr()


@pytest.mark.parametrize("kind", KINDS)
def test_the_image_is_that_of_the_values_and_the_same_everywhere(catalog: Catalog, kind: str) -> None:
    image = draw(catalog, kind, "cpu")
    assert matches(read_image(image), PROMPT)
    assert np.abs(draw(catalog, f"v{kind}", "cpu").astype(int) - image).max() <= 1
    assert np.array_equal(draw(catalog, kind, "sim"), image)
    assert np.array_equal(draw(catalog, kind, "sim", 0), image)


def test_a_lora_applies(catalog: Catalog) -> None:
    lora = next(path.stem for path in sorted((SHAPES / "loras").glob("*.safetensors")))
    plain, with_lora = draw(catalog, "Q8_0", "sim"), draw(catalog, "Q8_0", "sim", lora=lora)
    assert np.abs(plain.astype(int) - with_lora).max() > 30
    assert np.abs(draw(catalog, "vQ8_0", "sim", lora=lora).astype(int) - with_lora).max() <= 2


def write_flux(tmp_path: Path, more_text: dict[str, Tensor]) -> None:
    """A tiny Flux in parts, with `more_text` in the file of its T5: from GGUF files, and with the values in these."""
    tensors = FAMILIES["flux_dev"].file()
    prefixes = {"unet": UNET, "vae": "vae.", "clip_l": "text_encoders.clip_l.transformer."}
    for name, prefix in prefixes.items():
        save_file(part(tensors, prefix), tmp_path / f"{name}.safetensors")
    text = part(tensors, "text_encoders.t5xxl.transformer.")
    text.pop("spiece_model", None)  # tokenizers have another form in GGUF files
    write_gguf(tmp_path / "unet.gguf", part(tensors, UNET))
    write_gguf(tmp_path / "t5.gguf", {**as_llama_cpp_has_it(text), **more_text}, architecture="t5encoder")
    save_file(rounded(part(tensors, UNET)), tmp_path / "values.safetensors")
    save_file(rounded(text), tmp_path / "text.safetensors")
    describe_model(tmp_path / "packed.model.json", "unet.gguf", "vae.safetensors", "clip_l.safetensors", "t5.gguf")
    describe_model(
        tmp_path / "plain.model.json", "values.safetensors", "vae.safetensors", "clip_l.safetensors", "text.safetensors"
    )


def test_a_transformer_and_its_t5_compute_what_the_same_values_do(tmp_path: Path) -> None:
    write_flux(tmp_path, {})
    packed, plain = (open_checkpoint(tmp_path / f"{name}.model.json") for name in ("packed", "plain"))
    assert packed.family.name == plain.family.name == "flux_dev"
    for role in (Role.DIFFUSION_MODEL, Role.TEXT_ENCODER_2):
        assert packed.quantization(role), role
        ours, theirs = packed.build(role).module.state_dict(), plain.build(role).module.state_dict()
        assert ours.keys() == theirs.keys()
        for key, weight in ours.items():
            if isinstance(weight, PackedWeight):
                assert torch.equal(weight.unpack(torch.float32), theirs[key]), f"{role}: {key}"
            else:  # plain, or unpacked for a module that has its halves the other way round
                assert torch.equal(weight, theirs[key].to(weight.dtype)), f"{role}: {key}"


def as_llama_cpp_has_it(text: dict[str, Tensor]) -> dict[str, Tensor]:
    """A T5 encoder under the names of its converter."""
    names = NAMES["t5encoder"]
    back = {there: here for here, there in {**names.top_level, **names.parts}.items()}
    found = {}
    for key, tensor in text.items():
        stem, _, end = key.rpartition(".")
        start, at = "", stem
        if stem.startswith(names.blocks[1]):
            number, at = stem.removeprefix(names.blocks[1]).split(".", 1)
            start = f"{names.blocks[0]}{number}."
        found[f"{start}{back[at]}.{end}"] = tensor
    return found


def test_a_weight_that_no_module_reads_is_saved_plain_too(tmp_path: Path) -> None:
    """Found: the last layer of a language model, which files of text encoders may have, ended the saving."""
    write_flux(tmp_path, {"output.weight": torch.randn(8, 64)})
    save_checkpoint(
        open_checkpoint(tmp_path / "packed.model.json"), tmp_path / "saved.safetensors", dtype=torch.float16
    )
    saved = load_file(tmp_path / "saved.safetensors")
    assert any(key.endswith("output.weight") for key in saved)
    weights = {tensor.dtype for key, tensor in saved.items() if key.startswith((UNET, "text_encoders.t5xxl."))}
    assert weights == {torch.float16}


def test_folders_are_searched_for_them(folder: Path) -> None:
    found = scan_locations([ModelLocation(folder)])
    assert {f"unet-{kind}.gguf" for kind in KINDS} <= {file.path.name for file in found.files}


def test_it_is_saved_in_a_plain_type_only(folder: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(folder / "Q8_0.model.json")
    with pytest.raises(UnusableField, match="dtype"):
        save_checkpoint(opened, tmp_path / "saved.safetensors")
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(opened, tmp_path / "saved.safetensors", dtype=torch.float32)
    saved, values = load_file(tmp_path / "saved.safetensors"), load_file(folder / "true-Q8_0.safetensors")
    for key, value in values.items():
        torch.testing.assert_close(saved[UNET + key], value, atol=0, rtol=0)
