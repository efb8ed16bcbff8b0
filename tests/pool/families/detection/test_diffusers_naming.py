"""Diffusion models in the naming of diffusers are the same families as in their own, and a class of theirs runs each.

Compared with diffusers itself: its classes are built without weights, and what they call their tensors is recognised.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ModelMixin, UNet2DConditionModel

from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.detection.layouts.signature import Naming
from modelpool.pool.families.detection.signatures import SIGNATURES
from tests.architecture.source_tree import ROOT
from tests.each_case import each_case
from tests.pool.families.detection.published import (
    GOLDEN,
    Shapes,
    models_in_diffusers_naming,
    shapes_in_diffusers_naming,
    shapes_of,
)

#: sizes that the names and shapes of diffusers do not tell, and the published ones do
ONLY_PUBLISHED = {
    "flux_dev": {"mlp_ratio", "qkv_bias"},
    "pixart_sigma_1024": {"input_size", "pe_interpolation", "model_max_length"},
}


@pytest.mark.parametrize("model", models_in_diffusers_naming())
def test_both_namings_of_a_model_are_one_family_with_the_same_sizes(model: str) -> None:
    ours = recognise_diffusion(shapes_in_diffusers_naming(model))
    published = recognise_diffusion(shapes_of(model))
    assert ours is not None
    assert published is not None
    assert (ours.name, ours.naming) == (published.name, Naming.DIFFUSERS)
    expected = {f: v for f, v in published.config.items() if f not in ONLY_PUBLISHED.get(model, ())}
    assert {field: ours.config[field] for field in expected} == expected


#: what classes are built with where their defaults do not make a model, or make one that is too large
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AuraFlowTransformer2DModel": {"num_mmdit_layers": 2, "num_single_dit_layers": 2},
    "HunyuanDiT2DModel": {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "hidden_size": 32}
    | {"patch_size": 2, "num_layers": 4},
    "HiDreamImageTransformer2DModel": {
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 8,
        "num_attention_heads": 4,
        "caption_channels": [32, 32],
        "text_emb_dim": 32,
        "num_routed_experts": 4,
        "num_activated_experts": 2,
        "llama_layers": [0, 1],
        "max_resolution": (8, 8),
        "axes_dims_rope": (4, 2, 2),
    },
    "WanVACETransformer3DModel": {"num_layers": 1, "vace_layers": [0]},
    "OmniGenTransformer2DModel": {
        "num_layers": 1,
        "rope_scaling": {"long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
    },
    # half of stage C, whose text the defaults leave out
    "StableCascadeUNet": {
        "in_channels": 16,
        "out_channels": 16,
        "conditioning_dim": 64,
        "clip_text_in_channels": 32,
        "block_out_channels": (64, 64),
        "num_attention_heads": (1, 1),
        "down_num_layers_per_block": (1, 1),
        "up_num_layers_per_block": (1, 1),
        "clip_text_pooled_in_channels": 32,
        "clip_image_in_channels": 32,
    },
    # the defaults of its class are the width of CogView 3+
    "CogView4Transformer2DModel": {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 128},
    # without a face it is CogVideoX
    "ConsisIDTransformer3DModel": {"num_layers": 1, "in_channels": 32, "is_train_face": True},
    "AceStepTransformer1DModel": {"num_hidden_layers": 1},
    "UNet2DConditionModel": {"cross_attention_dim": 768},
}
_DEPTHS = ("num_layers", "num_single_layers", "num_blocks", "num_visual_blocks", "num_refiner_layers")
#: classes that diffusers does not have: their own tests build them
_OWN = {"WanReferenceTransformer3DModel", "WanCameraTransformer3DModel", "OmniGen2Transformer2DModel"}
RUNS = sorted({row.runs for row in SIGNATURES if row.runs} - _OWN)


# diffusers' own Chroma imports a name that diffusers means to drop
@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed:FutureWarning")
@each_case("name", RUNS)
def test_every_class_that_the_table_names_makes_models_that_are_recognised_as_its_own(name: str) -> None:
    found = recognise_diffusion(built(name))
    assert found is not None
    assert found.runs == name


def built(name: str) -> Shapes:
    """The tensors of a model of diffusers' class `name`, without weights."""
    own = getattr(diffusers, name)
    taken = inspect.signature(own.__init__).parameters
    arguments = {depth: 1 for depth in _DEPTHS if depth in taken and isinstance(taken[depth].default, int)}
    with torch.device("meta"):
        model = own(**{**arguments, **ARGUMENTS.get(name, {})})
    assert isinstance(model, ModelMixin)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}


SD2 = {"cross_attention_dim": 1024, "use_linear_projection": True}
SDXL = {
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}

#: the published configurations of UNets in diffusers, by golden name
UNETS: dict[str, dict[str, Any]] = {
    "sd15": {"cross_attention_dim": 768},
    "sd15_inpaint": {"cross_attention_dim": 768, "in_channels": 9},
    "sd21": SD2,
    "sdxl_base": SDXL,
    "sdxl_inpaint": {**SDXL, "in_channels": 9},
    "sdxl_ip2p": {**SDXL, "in_channels": 8},
    "sdxl_refiner": {
        **SDXL,
        "cross_attention_dim": 1280,
        "block_out_channels": (384, 768, 1536, 1536),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": 4,
        "projection_class_embeddings_input_dim": 2560,
    },
    "ssd_1b": {
        **SDXL,
        "transformer_layers_per_block": (1, 2, 4),
        "reverse_transformer_layers_per_block": ((4, 4, 10), (2, 1, 1), 1),
        "mid_block_type": "UNetMidBlock2D",
    },
    "segmind_vega": {**SDXL, "transformer_layers_per_block": (1, 1, 2), "mid_block_type": "UNetMidBlock2D"},
    "koala_700m": {**SDXL, "layers_per_block": 1, "mid_block_type": None, "transformer_layers_per_block": (1, 2, 5)},
    "koala_1b": {**SDXL, "layers_per_block": 1, "transformer_layers_per_block": (1, 2, 6)},
    "sd21_unclip_l": {**SD2, "class_embed_type": "projection", "projection_class_embeddings_input_dim": 1536},
    "sd21_unclip_h": {**SD2, "class_embed_type": "projection", "projection_class_embeddings_input_dim": 2048},
    "lotus_d": {**SD2, "class_embed_type": "projection", "projection_class_embeddings_input_dim": 4},
}


@pytest.mark.parametrize("model", UNETS)
def test_every_unet_that_diffusers_has_is_the_family_that_is_listed(model: str) -> None:
    """The golden list has their families and the number of their tensors; it counts the four tensors that embed a
    vector twice, under both names that diffusers has for them."""
    golden = json.loads((GOLDEN / "misc.json").read_text())["diffusers_detect"][model]
    with torch.device("meta"):
        unet = UNet2DConditionModel(**UNETS[model])
    shapes = {key: tuple(tensor.shape) for key, tensor in unet.state_dict().items()}
    found = recognise_diffusion(shapes)
    assert found is not None
    twice = 4 if found.config["adm_in_channels"] is not None else 0
    assert (len(shapes) + twice, found.comfyui, found.naming) == (golden["n"], golden["family"], Naming.DIFFUSERS)


def test_every_unet_of_the_list_is_tested() -> None:
    listed = json.loads((GOLDEN / "misc.json").read_text())["diffusers_detect"]
    assert {name for name, golden in listed.items() if "out" not in golden} == set(UNETS)


def test_what_no_class_of_diffusers_runs_is_listed() -> None:
    """When diffusers learns one of these, its row is to name the class."""
    assert sorted({row.name for row in SIGNATURES if not row.runs}) == [
        "ace_step_1",
        "allegro_ti2v",
        "anima",
        "boogu",
        "chroma_radiance",
        "hidream_o1",
        "hunyuan3d_2",
        "hunyuan3d_21",
        "hunyuan3d_2_mini",
        "lens",
        "mage_flow",
        "newbie",
        "pid",
        "pixeldit",
        "seedvr2",
        "triposplat",
        "wan21_humo",
        "wan22_s2v",
        "z_image_pixels",
    ]


def test_the_page_on_families_lists_them_by_title() -> None:
    page = (ROOT / "docs" / "reference" / "families.md").read_text()
    listed = page.partition("No dependency of this version implements the architecture:\n\n- ")[2].partition("\n\n")[0]
    missing = dict.fromkeys(f"{row.title} (`{row.name}`)" for row in SIGNATURES if not row.runs)
    assert listed.strip().split("\n- ") == list(missing)
