"""The spellings that LoRA names are made of: true to diffusers' converters and modules, for every family that has them.

Exactly: the names that a map gives are parameters of the module, and a change through the map is the same change after
converting. And no name means two things, in any of the published models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import diffusers
import pytest
import torch
from torch import Tensor, nn

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.detection.detect_diffusion_model import recognise_diffusion
from modelpool.pool.families.parts.hunyuan import flux_base, original_base, original_key
from modelpool.pool.families.supported import running_families
from modelpool.pool.models.components.common.diffusers_private import diffusion_converter
from modelpool.pool.models.lora_names.diffusion_lora_names import base_names_of, model_names
from modelpool.pool.models.lora_names.discovered import layout_map
from modelpool.pool.models.lora_names.naming import generate_names, naming_of
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import KeyMap, RowRange
from tests.each_case import each_case
from tests.pool.models.loading import layouts
from tests.pool.models.lora_names.test_lora_names_golden import golden

Shapes = dict[str, tuple[int, ...]]

#: the families of the published models of the golden data; those that are not here have no conventions of their own
FAMILIES = {
    "sd1": ("sd15", "sd15_inpaint"),
    "sd2": ("sd21", "sd21_inpaint", "sd21_unclip_l", "lotus_d", "sd_x4_upscaler"),
    "sdxl": ("sdxl_base", "sdxl_ip2p", "ssd_1b", "koala_700m"),
    "sdxl_refiner": ("sdxl_refiner",),
    "cascade": ("stable_cascade_c", "stable_cascade_c_lite", "stable_cascade_b"),
    "sd3": ("sd3_medium", "sd35_medium"),
    "auraflow": ("auraflow_0.3",),
    "pixart": ("pixart_sigma_1024",),
    "hunyuan_dit": ("hunyuan_dit_1.2",),
    "flux": ("flux_dev", "flux_schnell"),
    "flux2": ("flux2_dev",),
    "chroma": ("chroma", "chroma_radiance"),
    "mochi": ("mochi",),
    "ltxv": ("ltxv_2b",),
    "hunyuan_video": ("hunyuan_video", "hunyuan_video_skyreels_i2v"),
    "hunyuan_video_15": ("hunyuan_video_1.5",),
    "hunyuan_image": ("hunyuan_image_2.1",),
    "cosmos": ("cosmos_7b_t2v", "cosmos_7b_i2v", "cosmos_predict2_2b_t2i", "cosmos_predict2_2b_i2v"),
    "lumina2": ("lumina2",),
    "z_image": ("z_image",),
    "wan": (
        *("wan21_t2v_1.3b", "wan21_t2v_14b", "wan21_flf2v_14b", "wan21_fun_control_14b", "wan21_camera_14b"),
        *("wan22_camera_14b", "wan21_humo_17b", "wan22_s2v_14b", "wan22_ti2v_5b"),
    ),
    "hidream": ("hidream_i1",),
    "ace_step": ("ace_step",),
    "kandinsky5": ("kandinsky5_video_lite", "kandinsky5_video_pro"),
    "omnigen2": ("omnigen2",),
    "qwen_image": ("qwen_image",),
}
FAMILY_OF = {model: family for family, models in FAMILIES.items() for model in models}


def published(model: str) -> Shapes:
    return {key: tuple(shape) for key, shape in golden("detection_keys")[model].items()}


def map_of(model: str) -> KeyMap:
    return layout_map(FAMILY_OF.get(model, "generic"), published(model))


@each_case("model", sorted(golden("detection_keys")))
def test_no_name_means_two_things(model: str) -> None:
    """In any published model, however many rules make the name, and with dots and underscores taken for each other."""
    names: dict[str, tuple[RowRange, ...]] = {}
    spelled = base_names_of(map_of(model), "")
    for name, ranges in generate_names(naming_of(FAMILY_OF.get(model, "generic")), spelled):
        assert names.setdefault(name, ranges) == ranges, name
    assert len(names) > 4 * sum(key.endswith(".weight") for key in published(model))


@each_case("model", sorted(set(FAMILY_OF) - {"chroma_radiance"}))
def test_a_family_that_runs_has_the_namings_of_its_layout(model: str) -> None:
    """HunyuanImage had names of no layout, so that most of its LoRAs were refused."""
    found = recognise_diffusion(published(model))
    assert found is not None
    family = running_families().get(found.name)
    if family is not None:
        assert naming_of(family.relative or family.name) == naming_of(FAMILY_OF[model])


#: a small module of the architecture of each model, and parameters of ours that it has not, because of its size or kind
MODULES: Mapping[str, Callable[[], nn.Module]] = {
    "sd3_medium": lambda: diffusers.SD3Transformer2DModel(num_layers=2),
    "sd35_medium": lambda: diffusers.SD3Transformer2DModel(
        num_layers=2, qk_norm="rms_norm", dual_attention_layers=(0,)
    ),
    "auraflow_0.3": lambda: diffusers.AuraFlowTransformer2DModel(num_mmdit_layers=1, num_single_dit_layers=1),
    "pixart_sigma_1024": lambda: diffusers.PixArtTransformer2DModel(
        num_layers=1, caption_channels=64, use_additional_conditions=False
    ),
    "hunyuan_dit_1.2": lambda: diffusers.HunyuanDiT2DModel(
        num_layers=4, in_channels=4, patch_size=2, use_style_cond_and_image_meta_size=False
    ),
    "flux_dev": lambda: diffusers.FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True),
    "flux2_dev": lambda: diffusers.Flux2Transformer2DModel(num_layers=1, num_single_layers=1),
    "chroma": lambda: diffusers.ChromaTransformer2DModel(num_layers=1, num_single_layers=1),
    "mochi": lambda: diffusers.MochiTransformer3DModel(num_layers=2),
    "ltxv_2b": lambda: diffusers.LTXVideoTransformer3DModel(num_layers=1),
    "hunyuan_video": lambda: diffusers.HunyuanVideoTransformer3DModel(
        num_layers=1, num_single_layers=1, num_refiner_layers=1
    ),
    "hunyuan_video_1.5": lambda: diffusers.HunyuanVideo15Transformer3DModel(num_layers=1, num_refiner_layers=1),
    "hunyuan_image_2.1": lambda: diffusers.HunyuanImageTransformer2DModel(
        num_layers=1, num_single_layers=1, num_refiner_layers=1, text_embed_2_dim=1472, guidance_embeds=False
    ),
    "cosmos_7b_t2v": lambda: diffusers.CosmosTransformer3DModel(num_layers=1),
    "cosmos_predict2_2b_t2i": lambda: diffusers.CosmosTransformer3DModel(num_layers=1, extra_pos_embed_type=None),
    "lumina2": lambda: diffusers.Lumina2Transformer2DModel(num_layers=1, num_refiner_layers=1),
    "z_image": lambda: diffusers.ZImageTransformer2DModel(n_layers=1, n_refiner_layers=1),
    "wan21_t2v_1.3b": lambda: diffusers.WanTransformer3DModel(num_layers=1),
    "qwen_image": lambda: diffusers.QwenImageTransformer2DModel(num_layers=1),
    "kandinsky5_video_lite": lambda: diffusers.Kandinsky5Transformer3DModel(num_text_blocks=1, num_visual_blocks=1),
}
NOT_A_PARAMETER = {"pixart_sigma_1024": {"caption_projection.y_embedding"}}


@pytest.mark.filterwarnings("ignore:.*FluxPosEmbed.*:FutureWarning")
@each_case("model", MODULES)
def test_names_are_those_of_the_modules_parameters(model: str) -> None:
    """All of them and no others, whatever the number of a block."""
    with torch.device("meta"):
        expected = {_numberless(key) for key in MODULES[model]().state_dict()}
    key_map = map_of(model)
    ours = {_numberless(key) for key in key_map.origins or key_map.sources}
    assert ours - NOT_A_PARAMETER.get(model, set()) == expected


def _numberless(key: str) -> str:
    return re.sub(r"\d+", "N", key)


def thin(shapes: Shapes) -> Shapes:
    """As many rows as before, of one number each: converters move whole rows."""
    return {key: (shape[0], *(1,) * (len(shape) - 1)) if shape else () for key, shape in shapes.items()}


def numbered(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    """Whole numbers, which add up exactly."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randint(-999, 999, shape, generator=generator).float() for key, shape in shapes.items()}


#: layouts that diffusers builds and does not convert
EXTRA_CONVERTERS = {
    names.layout: names.converter
    for family in defined_families()
    if (names := family.layout_names) is not None and names.converter is not None
}
#: all that diffusers converts as it is: not the variant that misses tensors, nor the one of another width
CONVERTED = [
    model
    for family, models in FAMILIES.items()
    for model in models[:2]
    if (family in EXTRA_CONVERTERS or diffusion_converter(family, published(model)))
    and model not in ("chroma_radiance", "flux_schnell", "sd15_inpaint", "wan21_t2v_14b")
]


@each_case("model", CONVERTED)
def test_a_change_through_the_map_is_that_change_after_converting(model: str) -> None:
    """convert(W + D) == convert(W) + map(D), for a D under diffusers' names and for one under the checkpoint's."""
    family = FAMILY_OF[model]
    shapes = thin(published(model))
    convert = EXTRA_CONVERTERS.get(family) or diffusion_converter(family, shapes)
    assert convert is not None
    name_of = original_key if family == "hunyuan_video" else str

    def converted(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return convert({name_of(key): value for key, value in tensors.items()})

    key_map = layout_map(family, shapes)
    weights = numbered(shapes, 1)
    before = converted(weights)
    assert before.keys() == key_map.origins.keys()

    changed = {key: value.clone() for key, value in weights.items()}
    deltas = numbered(key_map.shapes, 2)
    for key, delta in deltas.items():
        for target in key_map.source_ranges(key):
            changed[target.key].narrow(0, target.start, target.rows).add_(target.place(delta))
    after = converted(changed)
    assert all(torch.equal(after[key], before[key] + deltas[key]) for key in before)

    deltas = numbered(shapes, 3)
    expected = {key: value.clone() for key, value in before.items()}
    for key, delta in deltas.items():
        for target in key_map.targets(key):
            expected[target.key].narrow(0, target.start, target.rows).add_(target.place(delta))
    after = converted({key: weights[key] + deltas[key] for key in weights})
    assert all(torch.equal(after[key], expected[key]) for key in expected)


@pytest.mark.parametrize("model", ["flux_dev", "chroma", "hunyuan_video", "lumina2"])
def test_converters_that_know_one_size_give_the_names_of_any(model: str) -> None:
    """A model of half the width has the map of the whole one, at half its rows."""
    shapes = published(model)
    half = {key: tuple(max(size // 2, 1) for size in shape) for key, shape in shapes.items()}
    whole_map, half_map = layout_map(FAMILY_OF[model], shapes), layout_map(FAMILY_OF[model], half)
    assert half_map.origins.keys() == whole_map.origins.keys()
    cut = 0
    for key in whole_map.origins:
        whole, halved = whole_map.source_ranges(key), half_map.source_ranges(key)
        if whole_map.shapes[key][:1] == (1,):
            continue
        assert [(r.key, r.source_start, r.start, r.rows) for r in halved] == [
            (r.key, r.source_start // 2, r.start // 2, r.rows // 2) for r in whole
        ]
        assert half_map.shapes[key] == tuple(max(size // 2, 1) for size in whole_map.shapes[key])
        cut += whole[0].start > 0
    assert cut > 50


def test_the_hidden_layer_of_a_flux_block_may_have_any_width() -> None:
    shapes = layouts.flux(1, 1, hidden=48)
    shapes["single_blocks.0.linear1.weight"] = (3 * 48 + 100, 48)
    shapes["single_blocks.0.linear1.bias"] = (3 * 48 + 100,)
    names = model_names("flux", shapes)
    (target,) = names["transformer.single_transformer_blocks.0.proj_mlp"]
    assert (target.start, target.rows, target.source_shape) == (144, 100, (100, 48))
    (target,) = names["diffusion_model.single_blocks.0.linear1_qkv"]
    assert (target.start, target.rows, target.source_shape) == (0, 144, (144, 48))


def test_a_variant_that_misses_tensors_keeps_the_names_of_the_others() -> None:
    """Chroma Radiance has another head and other input layers; its blocks are the blocks of Chroma."""
    ours, theirs = model_names("chroma", published("chroma_radiance")), model_names("chroma", published("chroma"))
    shared = published("chroma_radiance").keys() & published("chroma").keys()
    for name, ranges in theirs.items():
        if {r.key for r in ranges} <= shared:
            assert ours[name] == ranges
    assert "transformer.x_embedder" not in ours
    assert {r.key for ranges in ours.values() for r in ranges} <= published("chroma_radiance").keys()


@pytest.mark.parametrize("family", ["flux", "chroma", "sd3", "mochi"])
def test_tensors_of_another_family_are_refused(family: str) -> None:
    """By converters that cut tensors; those that only rename take any."""
    with pytest.raises(UnknownArchitecture):
        model_names(family, published("sd15"))


def test_both_spellings_of_hunyuan_video_lead_to_each_other() -> None:
    keys = published("hunyuan_video")
    for key in keys:
        base = key.rpartition(".")[0]
        assert flux_base(original_base(base)) == base
        assert original_base(original_base(base)) == original_base(base)
    original = {original_key(key): shape for key, shape in keys.items()}
    names, renamed = model_names("hunyuan_video", keys), model_names("hunyuan_video", original)
    assert len(original) == len(keys)
    for name in (
        "transformer.double_blocks.0.img_attn_qkv",
        "diffusion_model.double_blocks.0.img_attn.qkv",
        "lora_unet_double_blocks_0_img_attn_qkv",
        "lora_unet_time_in_mlp_0",
        "diffusion_model.time_in.in_layer",
        "transformer.transformer_blocks.0.attn.to_k",
        "single_transformer_blocks.39.proj_mlp",
    ):
        (here,), (there,) = names[name], renamed[name]
        assert (original_key(here.key), here.start, here.rows) == (there.key, there.start, there.rows)


@pytest.mark.parametrize("model", ["flux_dev", "z_image", "sd3_medium", "sdxl_base", "wan21_t2v_1.3b"])
def test_a_quantized_file_has_the_names_of_a_plain_one(model: str) -> None:
    """Scales and markers beside weights neither have names nor hold up the converters."""
    shapes = published(model)
    companions: Shapes = {}
    for key, shape in shapes.items():
        if key.endswith(".weight") and len(shape) == 2:
            companions[f"{key}_scale"] = ()
            companions[key.removesuffix("weight") + "comfy_quant"] = (48,)
    assert model_names(FAMILY_OF[model], shapes | companions) == model_names(FAMILY_OF[model], shapes)


def test_norms_and_the_last_layer_of_hunyuan_dit_change_places() -> None:
    """As in the published conversion: norm2 is used third, and the last layer has shift before scale."""
    names = model_names("hunyuan_dit", published("hunyuan_dit_1.2"))
    assert names["transformer.blocks.7.norm2"][0].key == "blocks.7.norm3.weight"
    assert names["transformer.blocks.7.norm3"][0].key == "blocks.7.norm2.weight"
    assert names["base_model.model.blocks.7.norm2"][0].key == "blocks.7.norm2.weight"
    assert [(r.source_start, r.start, r.rows) for r in names["transformer.norm_out.linear"]] == [
        (0, 1408, 1408),
        (1408, 0, 1408),
    ]
