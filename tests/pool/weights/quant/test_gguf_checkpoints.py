"""A GGUF file that holds a whole checkpoint (diffusion model, VAE and text encoders), under the names and with the
dimensions that stable-diffusion.cpp writes, is the model that its values make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from examples.shapes.checker import matches, read_image
from modelpool.pool.catalog.catalog import Catalog
from modelpool.pool.models.components.common.open_clip_names import OPEN_CLIP_TEXT
from modelpool.pool.models.loading.build_checkpoint import Checkpoint, open_checkpoint
from modelpool.pool.weights.ops.packed import PackedWeight
from tests.pool.families.tiny_transformers import FAMILIES
from tests.pool.files.formats.gguf_files import rounded, write_gguf
from tests.pool.models.loading import layouts
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint
from tests.pool.weights.quant.test_checkpoints import PROMPT, SHAPES, draw

SD_CPP_FIRST, SD_CPP_SECOND = "cond_stage_model.transformer.", "cond_stage_model.1.transformer."


def without_leading_ones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ggml does not store leading dimensions of size 1 of more than two."""
    return {key: x[0] if x.dim() == 3 and x.shape[0] == 1 else x for key, x in tensors.items()}


def open_clip_as_converted(tensors: Mapping[str, Tensor], prefix: str, to: str) -> dict[str, Tensor]:
    """The encoder in the naming of transformers below `to`, its projection in the form of open_clip."""
    own = {key.removeprefix(prefix): x for key, x in tensors.items() if key.startswith(prefix)}
    text = OPEN_CLIP_TEXT.convert({key: x for key, x in own.items() if key != "text_projection"})
    named = {to + key: x.contiguous() for key, x in text.items()}
    if "text_projection" in own:
        named[f"{to}text_model.text_projection"] = own["text_projection"]
    return {**{key: x for key, x in tensors.items() if not key.startswith(prefix)}, **named}


def assert_same_modules(packed: Checkpoint, plain: Checkpoint, tolerance: float) -> None:
    assert packed.family.name == plain.family.name
    assert packed.roles == plain.roles
    for role in plain.roles:
        ours, theirs = packed.build(role).module.state_dict(), plain.build(role).module.state_dict()
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            found = ours[key].unpack(torch.float32) if isinstance(ours[key], PackedWeight) else ours[key].float()
            torch.testing.assert_close(found, value.float(), rtol=0, atol=tolerance, msg=f"{role}: {key}")


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl"])
def test_unet_models_with_names_of_stable_diffusion_cpp(family: str, tmp_path: Path) -> None:
    layout = {"sd1": layouts.tiny_sd1, "sd2": layouts.tiny_sd2, "sdxl": layouts.tiny_sdxl}[family]()
    plain = write_tiny_checkpoint(tmp_path / "plain.safetensors", layout=layout, dtype=torch.float32)
    tensors = load_file(plain)
    converted = dict(tensors)
    if family == "sd2":
        converted = open_clip_as_converted(tensors, "cond_stage_model.model.", SD_CPP_FIRST)
    if family == "sdxl":
        first = "conditioner.embedders.0.transformer."
        converted = {key.replace(first, SD_CPP_FIRST): x for key, x in tensors.items()}
        converted = open_clip_as_converted(converted, "conditioner.embedders.1.model.", SD_CPP_SECOND)
    write_gguf(tmp_path / "whole.gguf", converted, "F32", "")
    assert_same_modules(open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(plain), 0.0)


@pytest.mark.parametrize("family", ["sd3", "flux_dev"])
def test_transformer_models_with_names_of_stable_diffusion_cpp(family: str, tmp_path: Path) -> None:
    tensors = {key: x for key, x in FAMILIES[family].file().items() if x.is_floating_point()}
    save_file(FAMILIES[family].file(), tmp_path / "plain.safetensors")
    named = {key.replace("vae.", "first_stage_model."): x for key, x in tensors.items()}
    write_gguf(tmp_path / "whole.gguf", without_leading_ones(named), "F32", "")
    assert_same_modules(open_checkpoint(tmp_path / "whole.gguf"), open_checkpoint(tmp_path / "plain.safetensors"), 0.0)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    folder = tmp_path_factory.mktemp("whole")
    tensors = load_file(SHAPES / "models" / "shapes.safetensors")
    write_gguf(folder / "whole.gguf", tensors, "Q8_0", "")
    save_file(rounded(tensors), folder / "values.safetensors")
    return Catalog([folder], [SHAPES / "loras"], "sim")


def test_the_image_of_a_whole_checkpoint_is_that_of_its_values(catalog: Catalog) -> None:
    image = draw(catalog, "whole", "sim", 0)
    assert matches(read_image(image), PROMPT)
    assert np.abs(draw(catalog, "values", "sim").astype(int) - image).max() <= 1


def test_the_plan_counts_packed_bytes(catalog: Catalog) -> None:
    packed, plain = (
        sum(spec.upload_bytes for spec in catalog.components(catalog.find_model(name)).values())
        for name in ("whole", "values")
    )
    assert 0 < packed < 0.6 * plain
