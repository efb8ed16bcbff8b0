"""The published relatives of SDXL are recognised by their shapes, and build the modules that these shapes are of."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.families.definitions.stable_diffusion_xl import KOALA_700M, PLAYGROUND_25, SSD_1B
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.diffusers_private import self_test
from modelpool.pool.models.components.common.infer_config import unet_config
from modelpool.pool.models.loading.build_checkpoint import open_checkpoint
from modelpool.pool.models.loading.detect_family import detect
from modelpool.pool.models.lora_names.lora_key_map import lora_key_map
from modelpool.pool.values.specs.spec import Role
from tests.pool.models.loading import layouts, unet_layouts
from tests.pool.models.loading.layouts import Layout
from tests.pool.models.loading.test_detect_family import header_of
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint

GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "detection_keys.json.gz"
UNET = "model.diffusion_model."


@cache
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return found


def published(model: str) -> Layout:
    """A whole file with the recorded UNet of `model`, and text encoders and VAE of SDXL."""
    others = {key: shape for key, shape in layouts.sdxl().items() if not key.startswith(UNET)}
    return {**{UNET + key: tuple(shape) for key, shape in recorded()[model].items()}, **others}


#: fields that set them apart. Source: unet/config.json of segmind/SSD-1B and etri-vilab/koala-700m
CONFIGS: dict[str, tuple[LocatedFamily, dict[str, object]]] = {
    "ssd_1b": (
        SSD_1B,
        {
            "layers_per_block": 2,
            "mid_block_type": "UNetMidBlock2D",
            "transformer_layers_per_block": (1, 2, 4),
            "reverse_transformer_layers_per_block": ((4, 4, 10), (2, 1, 1), 1),
        },
    ),
    "koala_700m": (
        KOALA_700M,
        {"layers_per_block": 1, "mid_block_type": None, "transformer_layers_per_block": (1, 2, 5)},
    ),
}


@pytest.mark.parametrize("model", CONFIGS)
def test_published_shapes_build_their_module(model: str) -> None:
    """Every tensor has its parameter, and every parameter its tensor, of one shape."""
    family, fields = CONFIGS[model]
    shapes: dict[str, Shape] = published(model)
    assert detect(header_of(shapes)) is family
    config = unet_config(family.bare_shapes_of(Role.DIFFUSION_MODEL, shapes))
    assert {**config, **fields} == config
    self_test(family, shapes)


NARROW = {
    "ssd_1b": unet_layouts.tiny_ssd_1b,
    "vega": unet_layouts.tiny_vega,
    "koala_700m": unet_layouts.tiny_koala_700m,
    "koala_1b": unet_layouts.tiny_koala_1b,
    "sd2": unet_layouts.small_sd2,
}


@pytest.mark.parametrize("name", NARROW)
def test_narrow_ones_are_recognised_and_built(name: str) -> None:
    shapes = NARROW[name]()
    family = detect(header_of(shapes))
    assert family.name == name
    self_test(family, shapes)


def test_sdxl_with_measured_latents_is_playground() -> None:
    measures: Layout = {"edm_mean": (1, 4, 1, 1), "edm_std": (1, 4, 1, 1)}
    assert detect(header_of({**layouts.tiny_sdxl(), **measures})) is PLAYGROUND_25


@pytest.mark.parametrize("role", [Role.DIFFUSION_MODEL, Role.TEXT_ENCODER, Role.TEXT_ENCODER_2])
def test_loras_name_their_weights_as_those_of_sdxl(role: Role, tmp_path: Path) -> None:
    """A key of each component, in the spelling that trainers write."""
    names = {
        Role.DIFFUSION_MODEL: (
            "lora_unet_output_blocks_2_1_transformer_blocks_9_attn1_to_q",
            "up_blocks.0.attentions.2.transformer_blocks.9.attn1.to_q.weight",
        ),
        Role.TEXT_ENCODER: ("lora_te1_text_model_encoder_layers_1_mlp_fc1", "encoder.layers.1.mlp.fc1.weight"),
        Role.TEXT_ENCODER_2: ("lora_te2_text_model_encoder_layers_1_mlp_fc1", "encoder.layers.1.mlp.fc1.weight"),
    }
    write_tiny_checkpoint(tmp_path / "tiny.safetensors", layout=unet_layouts.tiny_ssd_1b())
    name, parameter = names[role]
    targets = lora_key_map(open_checkpoint(tmp_path / "tiny.safetensors").build(role))[name]
    assert [target.key.removeprefix("text_model.") for target in targets] == [parameter]
