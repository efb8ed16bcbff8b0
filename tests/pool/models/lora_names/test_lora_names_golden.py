"""Every name that published key maps have for a LoRA's weight is known, for every family, and means the same rows.

`lora_keymap` is a record of another implementation's maps; its targets that the model does not have are dropped there
when they are applied, and need not be known here.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from modelpool.pool.models.lora_names.diffusion_lora_names import model_names
from modelpool.pool.models.lora_names.discovered import layout_map
from modelpool.pool.models.lora_names.text import text_encoder_names
from modelpool.pool.weights.keymaps.key_map import RowRange

GOLDEN = Path(__file__).resolve().parents[3] / "golden"
PREFIX = "diffusion_model."

#: family of each model of the golden data that has a published map of LoRA names
MODELS = {
    "ace_step": "ace_step",
    "auraflow_0.3": "auraflow",
    "chroma": "chroma",
    "flux_dev": "flux",
    "hidream_i1": "hidream",
    "hunyuan_dit_1.2": "hunyuan_dit",
    "hunyuan_video": "hunyuan_video",
    "kandinsky5_video_lite": "kandinsky5",
    "ltxv_2b": "ltxv",
    "mochi": "mochi",
    "omnigen2": "omnigen2",
    "pixart_sigma_1024": "pixart",
    "qwen_image": "qwen_image",
    "sd15": "sd1",
    "sd21": "sd2",
    "sd3_medium": "sd3",
    "sdxl_base": "sdxl",
    "stable_cascade_b_lite": "cascade",
}
ENCODERS = ("cascade", "hydit", "sd1", "sd2", "sd3_lgt5", "sdxl")

Target = tuple[str, tuple[int, int] | None, bool]


@cache
def golden(name: str) -> dict[str, Any]:
    with gzip.open(GOLDEN / f"{name}.json.gz") as file:
        loaded: dict[str, Any] = json.load(file)
    return loaded


def shapes_of(model: str) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a model; those of the one that has no record of its own follow from its map of names."""
    recorded = golden("detection_keys")
    if model in recorded:
        return {PREFIX + key: tuple(shape) for key, shape in recorded[model].items()}
    return {target_of(value)[0]: (6, 1) for value in golden("lora_keymap")[model].values()}


@cache
def names_of(model: str) -> dict[str, tuple[RowRange, ...]]:
    return model_names(MODELS[model], shapes_of(model), PREFIX)


@cache
def names_of_encoders(model: str) -> dict[str, tuple[RowRange, ...]]:
    return text_encoder_names(dict.fromkeys(golden("text_encoder_keys")[model], (6, 1)))


def target_of(value: Any) -> Target:
    """A target as the record writes it: key, (first row, rows) of a part, whether its halves change places."""
    if isinstance(value, str):
        return value, None, False
    key, offset, function = (
        (value["key"], value.get("offset"), value.get("function"))
        if isinstance(value, Mapping)
        else (*value, *(None,) * (3 - len(value)))
    )
    assert function in (None, "swap_scale_shift")
    assert offset is None or offset[0] == 0
    return key, tuple(offset[1:]) if offset else None, function is not None


def found(ranges: tuple[RowRange, ...], shapes: Mapping[str, tuple[int, ...]]) -> Target:
    """The same of our own ranges."""
    first, last = ranges[0], ranges[-1]
    rows = shapes[first.key][0] if shapes[first.key] else 1
    assert {r.key for r in ranges} == {first.key}
    assert not any(r.operations for r in ranges)
    if len(ranges) == 1:
        assert first.source_start == 0
        assert first.rows == (first.source_shape[0] if first.source_shape else 1)
        return first.key, None if (first.start, first.rows) == (0, rows) else (first.start, first.rows), False
    half = rows // 2
    assert [(r.source_start, r.start, r.rows) for r in (first, last)] == [(0, half, half), (half, 0, half)]
    return first.key, None, True


def differences(
    recorded: Mapping[str, Any], names: Mapping[str, tuple[RowRange, ...]], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[list[str], list[str]]:
    """Names that are missing, and names that mean something else."""
    missing, other = [], []
    for name, value in recorded.items():
        target = target_of(value)
        if target[0] not in shapes:
            continue
        if name not in names:
            missing.append(name)
        elif found(names[name], shapes) != target:
            other.append(f"{name}: {found(names[name], shapes)}, expected {target}")
    return missing, other


@pytest.mark.parametrize("model", MODELS)
def test_every_name_of_a_diffusion_model_is_known(model: str) -> None:
    assert differences(golden("lora_keymap")[model], names_of(model), shapes_of(model)) == ([], [])


@pytest.mark.parametrize("model", MODELS)
def test_only_targets_that_the_model_lacks_are_passed_over(model: str) -> None:
    """As many as the record says of itself, so that the test above compares all the others."""
    notes = json.loads((GOLDEN / "lora_keymap_notes.json").read_text())["unet"][model]
    recorded, shapes = golden("lora_keymap")[model], shapes_of(model)
    assert len(recorded) == notes["entries"]
    lacking = {target_of(value)[0] for value in recorded.values()} - shapes.keys()
    assert len(lacking) == notes["targets_not_in_model"]


@pytest.mark.parametrize("model", ENCODERS)
def test_every_name_of_a_set_of_text_encoders_is_known(model: str) -> None:
    shapes = dict.fromkeys(golden("text_encoder_keys")[model], (6, 1))
    assert differences(golden("lora_keymap")[f"clip:{model}"], names_of_encoders(model), shapes) == ([], [])


def test_a_larger_sibling_has_the_names_that_the_smaller_one_lacks() -> None:
    """The record for SD3 medium names the second attention and the norms that only SD3.5 has."""
    shapes = shapes_of("sd35_medium")
    recorded = golden("lora_keymap")["sd3_medium"]
    assert differences(recorded, model_names("sd3", shapes, PREFIX), shapes) == ([], [])
    here = sum(target_of(value)[0] in shapes for value in recorded.values())
    assert here > sum(target_of(value)[0] in shapes_of("sd3_medium") for value in recorded.values())


#: models of which the record has the number of names only; families as above
COUNTED = {"sdxl_refiner": "sdxl_refiner", "sd35_medium": "sd3", "z_image": "z_image", "wan21_t2v_1.3b": "wan"}


@pytest.mark.parametrize("model", COUNTED)
def test_there_are_at_least_as_many_names_as_were_counted(model: str) -> None:
    """The counts include names of targets that the model lacks, so many that only the generic ones can be told here:
    two for each weight and one for everything else."""
    shapes = shapes_of(model)
    names = model_names(COUNTED[model], shapes, PREFIX)
    for key in shapes:
        base = key.removesuffix(".weight")
        expected = {base, f"lora_unet_{base.removeprefix(PREFIX).replace('.', '_')}"} if base != key else {key}
        for name in expected:
            assert found(names[name], shapes) == (key, None, False)
    notes = json.loads((GOLDEN / "lora_keymap_notes.json").read_text())["unet"][model]
    assert len(names) >= notes["entries"] - 6 * notes["targets_not_in_model"]


#: models with a record of diffusers' names; families as above
DIFFUSERS_MAPS = {
    "sd15": "sd1",
    "sdxl_base": "sdxl",
    "flux_dev": "flux",
    "sd3_medium": "sd3",
    "auraflow_0.3": "auraflow",
    "pixart_sigma_1024": "pixart",
    "z_image": "z_image",
}
#: names in the record that stand for no parameter of the diffusers module, and why they are not in our maps
NOT_DIFFUSERS = {
    "class_embedding.": "the other name of add_embedding, which LoRA names have; the module has one of the two",
}


@pytest.mark.parametrize("model", DIFFUSERS_MAPS)
def test_diffusers_names_are_the_recorded_ones(model: str) -> None:
    """Biases and tables too, which LoRA names leave out."""
    shapes = {key: tuple(shape) for key, shape in golden("detection_keys")[model].items()}
    key_map = layout_map(DIFFUSERS_MAPS[model], shapes)
    names = {key: key_map.source_ranges(key) for key in key_map.origins}
    recorded = {
        name: value
        for name, value in golden("diffusers_maps")[model].items()
        if not name.startswith(tuple(NOT_DIFFUSERS))
    }
    assert differences(recorded, names, shapes) == ([], [])


@pytest.mark.parametrize("family", ["flux", "chroma"])
def test_names_of_norms_are_known_in_files_of_both_spellings(family: str) -> None:
    """Newer files call the scales of query and key norms weights. Every name of one file is a name of the other."""
    older = shapes_of("flux_dev" if family == "flux" else "chroma")
    newer = {key.replace("_norm.scale", "_norm.weight"): shape for key, shape in older.items()}
    assert older != newer
    names = model_names(family, older, PREFIX)
    renamed = {
        name: tuple(replace(r, key=r.key.replace("_norm.scale", "_norm.weight")) for r in ranges)
        for name, ranges in names.items()
    }
    assert model_names(family, newer, PREFIX) == renamed
    norm = "double_blocks.0.img_attn.norm.query_norm"
    for name in (f"{PREFIX}{norm}.scale", f"{PREFIX}{norm}", f"lora_unet_{norm.replace('.', '_')}"):
        assert found(names[name], older) == (f"{PREFIX}{norm}.scale", None, False)


#: names that a version of 2026 added, by model
NEWER = {
    "flux_dev": {
        "transformer_blocks.0.attn.to_q": ("double_blocks.0.img_attn.qkv.weight", (0, 3072)),
        "single_transformer_blocks.37.attn.to_out": ("single_blocks.37.linear2.weight", None),
        "transformer.single_transformer_blocks.3.attn.to_qkv_mlp_proj": ("single_blocks.3.linear1.weight", None),
        "lycoris_single_transformer_blocks_3_attn_to_qkv_mlp_proj": ("single_blocks.3.linear1.weight", None),
        "transformer.transformer_blocks.0.ff_context.linear_in": ("double_blocks.0.txt_mlp.0.weight", None),
        "double_blocks.0.img_mlp.0": ("double_blocks.0.img_mlp.0.weight", None),
    },
    "z_image": {
        "transformer.layers.3.attention.to_k": ("layers.3.attention.qkv.weight", (3840, 3840)),
        "layers.3.attention.to_out.0": ("layers.3.attention.out.weight", None),
        "diffusion_model.layers.3.attention.to_out.0": ("layers.3.attention.out.weight", None),
        "lycoris_layers_3_attention_to_v": ("layers.3.attention.qkv.weight", (7680, 3840)),
    },
    "ltxv_2b": {
        "transformer.transformer_blocks.0.attn1.to_q": ("transformer_blocks.0.attn1.to_q.weight", None),
        "transformer_blocks.0.attn1.to_q": ("transformer_blocks.0.attn1.to_q.weight", None),
        "transformer.time_embed.linear": ("adaln_single.linear.weight", None),
    },
    "wan21_t2v_1.3b": {
        "transformer.blocks.0.attn2.to_out.0": ("blocks.0.cross_attn.o.weight", None),
        "blocks.0.norm2": ("blocks.0.norm3.weight", None),
        "lora_unet_blocks_0_norm3": ("blocks.0.norm3.weight", None),
    },
}


@pytest.mark.parametrize("model", NEWER)
def test_newer_names_are_known(model: str) -> None:
    shapes = {key: tuple(shape) for key, shape in golden("detection_keys")[model].items()}
    names = model_names({**MODELS, **COUNTED}[model], shapes)
    for name, (key, rows) in NEWER[model].items():
        assert found(names[name], shapes) == (key, rows, False), name


def test_the_second_encoder_of_flux_is_t5_under_two_numbers() -> None:
    """There is no record for these sets; the rules are the rules of the sets that have one."""
    names = names_of_encoders("flux")
    key = "t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.k"
    for name in ("lora_te2", "lora_te3"):
        assert names[f"{name}_encoder_block_0_layer_0_SelfAttention_k"][0].key == f"{key}.weight"
    assert names["text_encoder_2.encoder.block.0.layer.0.SelfAttention.k"][0].key == f"{key}.weight"
    assert names["lora_te1_text_model_encoder_layers_0_mlp_fc1"][0].key.startswith("clip_l.")


def test_an_encoder_alone_is_the_first_one() -> None:
    names = names_of_encoders("sdxl_refiner")
    for name in ("lora_te_text_model", "lora_prior_te_text_model", "lora_te2_text_model"):
        assert names[f"{name}_encoder_layers_0_mlp_fc1"][0].key.startswith("clip_g.")
    alone = text_encoder_names({"t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.k.weight": (4, 4)})
    assert "lora_te1_encoder_block_0_layer_0_SelfAttention_k" in alone
    assert "lora_te2_encoder_block_0_layer_0_SelfAttention_k" not in alone


def test_an_unknown_family_has_the_names_that_its_keys_make() -> None:
    names = model_names(
        "no such family", {"unet.a.b.weight": (6, 4), "unet.a.b.bias": (6,), "vae.c.weight": (1,)}, "unet."
    )
    for name in ("lora_unet_a_b", "diffusion_model.a.b", "a.b", "transformer.a.b", "lycoris_a_b"):
        assert names[name] == (RowRange("unet.a.b.weight", (6, 4), 0, 6, 0),)
    assert names["diffusion_model.a.b.bias"] == (RowRange("unet.a.b.bias", (6,), 0, 6, 0),)
    assert {ranges[0].key for ranges in names.values()} == {"unet.a.b.weight", "unet.a.b.bias"}
