"""Every published diffusion model is recognised by keys and shapes: its family and its sizes, under every prefix."""

from __future__ import annotations

import json
import math
import random

import pytest

from modelpool.pool.families.detection.detect_diffusion_model import (
    PREFIXES,
    find_layout,
    prefixes_of,
    recognise_diffusion,
)
from modelpool.pool.families.detection.layouts.signature import Naming, anything
from modelpool.pool.families.detection.signatures import LAYOUTS, SIGNATURES
from modelpool.pool.families.parts.latent_formats import LATENT_FORMATS
from modelpool.pool.values.core.errors import UnknownArchitecture
from tests.each_case import each_case
from tests.pool.families.detection.published import FOUND, Shapes, changed, shapes_of

MODELS = pytest.mark.parametrize("model", FOUND)

#: fields of published configurations that no shape tells, with the reason; everything else has to be found
NOT_IN_SHAPES = {
    # a word for the architecture, which is the family's name here
    **dict.fromkeys(("image_model", "audio_model"), "names the architecture"),
    # settings of positions: the tables are computed, not stored
    **dict.fromkeys(
        (
            *("axes_dim", "axes_dims", "axes_dims_rope", "axes_dim_rope", "axes_lens", "theta", "rope_theta"),
            *("max_img_h", "max_img_w", "max_frames", "pos_emb_cls", "pos_emb_learnable", "pos_emb_interpolation"),
            *("rope_h_extrapolation_ratio", "rope_w_extrapolation_ratio", "rope_t_extrapolation_ratio"),
            *("extra_h_extrapolation_ratio", "extra_w_extrapolation_ratio", "extra_t_extrapolation_ratio"),
            *("extra_per_block_abs_pos_emb_type", "rope_enable_fps_modulation", "min_fps", "max_fps"),
            *("max_height", "max_width", "max_position", "max_resolution", "pos_embed_scaling_factor", "input_size"),
            *("posenc_preserve_area", "txt_ids_dims", "ref_index_scale", "default_ref_method", "image_size"),
        ),
        "positions",
    ),
    # how a forward pass computes with the same weights
    **dict.fromkeys(
        (
            *("timestep_scale", "time_scale", "eps", "norm_eps", "window_size", "attn_drop", "attend_to_padding"),
            *("mlp_silu_act", "block_config", "block_x_format", "concat_padding_mask", "use_t5", "t5_token_length"),
            *("merge_strategy", "merge_factor", "video_kernel_size", "use_checkpoint", "legacy", "num_classes"),
            *("use_spatial_transformer", "use_spatial_context", "extra_ff_mix_layer", "learn_sigma", "txt_norm"),
            *("disable_temporal_crossattention", "pad_tokens_multiple", "num_activated_experts", "llama_layers"),
            *("nerf_max_freqs", "nerf_tile_size", "nerf_embedder_dtype", "nerf_mlp_ratio", "ssl_names"),
        ),
        "computed",
    ),
    # said by another field, which is found, or the same for every published size
    **dict.fromkeys(
        (
            *("context_embedder_config", "ffn_dim_multiplier", "multiple_of", "mlp_ratio_x", "mlp_ratio_y"),
            *("patch_spatial", "patch_temporal", "affline_emb_norm", "use_adaln_lora", "adaln_lora_dim"),
            *("patch_embed_bias", "timestep_mlp_bias", "ops_bias", "caption_channels", "ssl_encoder_depths"),
            *("guidance_cond_proj_dim", "attention_head_dim", "num_attention_heads", "num_heads", "mlp_ratio"),
        ),
        "said otherwise, or fixed",
    ),
}
#: where a field has another value than listed, with the reason
DIFFERENCES: dict[tuple[str, str], str] = {
    (
        "omnigen2",
        "out_channels",
    ): "listed as null, which stands for as many as come in; the last layer tells the number",
}

#: golden names of latents and those of this project
LATENTS = {
    "SD15": "sd1",
    "SDXL": "sdxl",
    "SD_X4": "sd_x4",
    "SC_Prior": "cascade_c",
    "SC_B": "cascade_b",
    "SD3": "sd3",
    "StableAudio1": "stable_audio",
    "Flux": "flux",
    "Flux2": "flux2",
    "ChromaRadiance": "pixels",
    "Mochi": "mochi",
    "LTXV": "ltxv",
    "HunyuanVideo": "hunyuan_video",
    "HunyuanVideo15": "hunyuan_video_15",
    "HunyuanImage21": "hunyuan_image",
    "Cosmos1CV8x8x8": "cosmos",
    "Wan21": "wan21",
    "Wan22": "wan22",
    "Hunyuan3Dv2": "hunyuan3d_2",
    "Hunyuan3Dv2mini": "hunyuan3d_2_mini",
    "Hunyuan3Dv2_1": "hunyuan3d_21",
    "ACEAudio": "ace_step",
}


@MODELS
def test_every_published_model_is_recognised_under_every_prefix(model: str) -> None:
    golden = FOUND[model]
    names = set()
    for prefix in (*PREFIXES, ""):
        found = recognise_diffusion(shapes_of(model, prefix))
        assert found is not None
        assert (found.comfyui, found.naming) == (golden["expected"], Naming.PUBLISHED)
        # "model." is what is left of a longer prefix, never more
        assert found.prefix == prefix
        assert found.latent == LATENTS[golden["latent_format"]]
        names.add(found.name)
    assert len(names) == 1
    assert names != {""}


@MODELS
def test_sizes_are_those_of_the_published_configuration_field_by_field(model: str) -> None:
    found = recognise_diffusion(shapes_of(model))
    assert found is not None
    # JSON has lists where configurations have tuples
    config = json.loads(json.dumps(dict(found.config)))
    for field, value in FOUND[model]["unet_config"].items():
        if (model, field) in DIFFERENCES:
            assert config[field] != value, "the difference is gone: strike it out"
        elif field in config:
            assert config[field] == value, field
        else:
            assert field in NOT_IN_SHAPES, field


@MODELS
def test_parameters_are_those_that_are_listed(model: str) -> None:
    shapes = shapes_of(model)
    assert sum(math.prod(shape) for shape in shapes.values()) == FOUND[model]["params"]
    assert len(shapes) == FOUND[model]["n_keys"]


@MODELS
def test_a_damaged_model_is_recognised_or_refused_and_never_a_crash(model: str) -> None:
    """Each key that gives it away is taken out, and each of these and some more have shapes of every wrong kind."""
    whole = shapes_of(model)
    found = find_layout(whole)
    assert found is not None
    telling = found[2].keys
    for key in telling:
        damaged = {k: s for k, s in whole.items() if k != key}
        fits = find_layout(damaged)
        assert fits is None or fits[2] is not found[2]
    sample = random.Random(model).sample(sorted(whole), 6)
    for key in (*telling, *sample):
        for shape in ((), (3,), (0, 0), (7,) * len(whole[key]), (2,) * 7):
            refusal = _refusal({**whole, key: shape})
            assert refusal is None or "found" in refusal


def _refusal(shapes: Shapes) -> str | None:
    try:
        recognise_diffusion(shapes)
    except UnknownArchitecture as error:
        return str(error)
    return None


@pytest.mark.parametrize("prefix", [*PREFIXES, ""])
def test_every_spelling_finds_its_own_layout_under_every_prefix(prefix: str) -> None:
    """No layout hides one that comes after it."""
    for layout in LAYOUTS:
        for spelling in layout.namings:
            found = find_layout({prefix + key: (1, 1) for key in spelling.keys})
            assert found is not None
            assert (found[0], found[1].title, found[2].naming) == (prefix, layout.title, spelling.naming)


def test_the_prefix_with_the_most_keys_is_tried_first() -> None:
    keys = {f"net.{i}": (1,) for i in range(9)} | {f"model.diffusion_model.{i}": (1,) for i in range(12)}
    assert prefixes_of(keys) == ("model.diffusion_model.", "model.", "net.", "")
    assert prefixes_of({"a": (1,)}) == ("",)


#: families that the list of published models has no keys of: what has to change of one that it has
RELATIVES: dict[str, Shapes] = {
    "sd1_ip2p": changed("sd15", input_blocks__0__0__weight=(320, 8, 3, 3)),
    "zero123": changed("sd15", input_blocks__0__0__weight=(320, 8, 3, 3), cc_projection__weight=(768, 772)),
    "sd2_depth": changed("sd21", input_blocks__0__0__weight=(320, 5, 3, 3)),
    "sd21_unclip_h": changed("sd21_unclip_l", label_emb__0__0__weight=(1280, 2048)),
    "sdxl_inpaint": changed("sdxl_base", input_blocks__0__0__weight=(320, 9, 3, 3)),
    "playground_25": changed("sdxl_base", edm_mean=(1, 4, 1, 1), edm_std=(1, 4, 1, 1)),
    "cosxl_edit": changed("sdxl_ip2p", edm_vpred__sigma_max=()),
    "cascade_b_lite": changed(
        "stable_cascade_b",
        down_blocks__1__0__depthwise__weight=(576, 1, 3, 3),
        down_blocks__2__0__depthwise__weight=(1152, 1, 3, 3),
        down_blocks__3__0__depthwise__weight=(1152, 1, 3, 3),
    ),
    "sd35_large": {key: shape for key, shape in shapes_of("sd35_medium").items() if ".attn2." not in key},
    "hunyuan_dit_1": changed("hunyuan_dit_1.2", extra_embedder__0__weight=(5632, 3968)),
    "pixart_alpha": changed("pixart_sigma_1024", ar_embedder__mlp__0__weight=(384, 256)),
    "pixart_alpha_512": changed("pixart_sigma_1024", y_embedder__y_embedding=(120, 4096)),
    "flux_fill": changed("flux_dev", img_in__weight=(3072, 384)),
    "flux_control": changed("flux_dev", img_in__weight=(3072, 128)),
    "ovis_image": changed("flux_schnell", "vector_in.", double_blocks__0__img_mlp__gate_proj__weight=(8192, 3072)),
    "longcat_image": changed("flux_schnell", "vector_in.", txt_in__weight=(3072, 3584)),
    "flux2_klein": changed("flux2_dev", "guidance_in.", img_in__weight=(3072, 128)),
    "hunyuan_video_i2v": changed("hunyuan_video", img_in__proj__weight=(3072, 33, 1, 2, 2)),
    "hunyuan_image_21_refiner": changed(
        "hunyuan_video", "vector_in.", img_in__proj__weight=(3072, 128, 1, 1, 1), final_layer__linear__weight=(64, 3072)
    ),
    "hunyuan_video_15_sr": changed("hunyuan_video_1.5", img_in__proj__weight=(2048, 98, 1, 1, 1)),
    "ltx2": changed("ltxv_2b", audio_adaln_single__linear__weight=(12288, 2048)),
    "anima": changed("cosmos_predict2_2b_t2i", llm_adapter__blocks__0__cross_attn__q_proj__weight=(1024, 1024)),
    "newbie": changed("lumina2", clip_text_pooled_proj__0__weight=(1024,)),
    "z_image_pixels": changed("z_image", dec_net__cond_embed__weight=(64, 3840)),
    "wan_vace": changed("wan21_t2v_14b", vace_patch_embedding__weight=(5120, 96, 1, 2, 2)),
    "wan22_animate": changed("wan21_flf2v_14b", face_adapter__fuser_blocks__0__k_norm__weight=(128,)),
    "wan21_i2v": changed("wan21_flf2v_14b", "img_emb.emb_pos"),
    "wan22_i2v": changed("wan21_t2v_14b", patch_embedding__weight=(5120, 36, 1, 2, 2)),
    "qwen_image_layered": changed("qwen_image", time_text_embed__addition_t_embedding__weight=(2, 3072)),
    "mage_flow": changed("qwen_image", txt_norm__weight=(2560,), proj_out__weight=(128, 3072)),
    "kandinsky5_image": changed("kandinsky5_video_lite", visual_embeddings__in_layer__weight=(2560, 64)),
    "stable_audio_3": changed("stable_audio_1", transformer__memory_tokens=(64, 1536)),
}


@each_case("name", RELATIVES)
def test_relatives_of_published_models_are_told_apart(name: str) -> None:
    found = recognise_diffusion(RELATIVES[name])
    assert found is not None
    assert found.name == name


_SANA: Shapes = {
    "attention_y_norm.weight": (2240,),
    "blocks.0.cross_attn.q_linear.weight": (2240, 2240),
    "x_embedder.proj.weight": (2240, 32, 1, 1),
    "y_embedder.y_proj.fc1.weight": (2240, 2304),
}
#: families by one tensor, of which no list of keys is known
BY_NAME: dict[str, Shapes] = {
    "pid": {"lq_proj.latent_proj.0.weight": (64, 16, 3, 3)},
    "pixeldit": {"core.pixel_embedder.proj.weight": (16, 3)},
    "seedvr2": {"blocks.31.mlp.all.proj_in_gate.weight": (6912, 2560)},
    "triposplat": {"cam_out_layer.weight": (9, 1024), "repo_layers.0.final_map.weight": (8, 8)},
    "hidream_o1": {"t_embedder1.mlp.0.weight": (4096, 256), "x_embedder.proj1.weight": (1024, 3072)},
    "boogu": {"double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight": (3360, 3360)},
    "lens": {
        "transformer_blocks.0.attn.norm_added_q.weight": (128,),
        "transformer_blocks.0.img_mlp.w1.weight": (8192, 3072),
    },
    "ideogram4": {
        "embed_image_indicator.weight": (2, 4608),
        "layers.0.attention.qkv.weight": (13824, 4608),
        "input_proj.weight": (4608, 128),
    },
    "joyimage": {
        "double_blocks.0.attn.img_attn_qkv.weight": (9216, 3072),
        "condition_embedder.time_embedder.linear_1.weight": (3072, 256),
        "img_in.weight": (3072, 16, 1, 2, 2),
        "condition_embedder.text_embedder.linear_1.weight": (3072, 4096),
    },
    "ace_step_15": {
        "encoder.lyric_encoder.layers.0.input_layernorm.weight": (2048,),
        "decoder.proj_in.1.weight": (2560, 192, 2),
    },
    "qwen_image_21": {
        "txt_in.text_norm.weight": (4096,),
        "txt_in.in_layer.weight": (4096, 4096),
        "img_in.weight": (4096, 64),
        "transformer_blocks.0.img_mlp.gate_up.weight": (24576, 4096),
    },
    "flux3": {"early_stream_modulations.image.lin.weight": (9216, 3072)},
    "minimax_h3": {"video_patch_proj.weight": (5376, 96), "audio_patch_proj.weight": (5376, 32)},
    "sana": _SANA,
    "sana_4k": {**_SANA, "pos_embed": (1, 128**2, 2240)},
    "sana_sprint": {**_SANA, "cfg_embedder.mlp.0.weight": (2240, 256)},
}


@pytest.mark.parametrize("name", BY_NAME)
def test_newer_families_are_recognised_by_name(name: str) -> None:
    found = recognise_diffusion({f"model.diffusion_model.{key}": shape for key, shape in BY_NAME[name].items()})
    assert found is not None
    assert found.name == name


def test_a_known_architecture_of_unknown_sizes_says_so() -> None:
    """A UNet that reads no texts is none of the families."""
    shapes = {key: shape for key, shape in shapes_of("sd15").items() if "transformer_blocks" not in key}
    found = recognise_diffusion(shapes)
    assert found is not None
    assert (found.name, found.title) == ("", "a UNet of latent diffusion, of unknown sizes")


def test_a_wan_of_other_channels_is_none_of_the_families() -> None:
    """Found in a review: what no other row took was text-to-video of Wan 2.1, whatever latents it reads and makes."""
    for channels in (32, 100):
        found = recognise_diffusion(changed("wan21_t2v_14b", patch_embedding__weight=(5120, channels, 1, 2, 2)))
        assert found is not None
        assert found.name == "", (channels, found.name)


def test_a_tensor_that_cannot_be_is_named_with_the_model() -> None:
    with pytest.raises(
        UnknownArchitecture, match=r"those of Flux, but: tensor 'img_in.weight': found shape \(3072,\), expected 2 dim"
    ):
        recognise_diffusion(changed("flux_dev", img_in__weight=(3072,)))


def test_the_table_is_of_one_mind() -> None:
    """Rows with one name say the same, every latent has its numbers, and nothing can follow a row that takes all."""
    by_name: dict[str, tuple[str, ...]] = {}
    for row in SIGNATURES:
        said = (row.title, row.latent, row.comfyui, row.runs)
        assert by_name.setdefault(row.name, said) == said
        assert row.latent == "" or row.latent in LATENT_FORMATS, row.name
    assert len(set(by_name)) >= 110
    titles = [said[0] for said in by_name.values()]
    assert len(set(titles)) == len(titles)
    for layout in LAYOUTS:
        rows = [row for row in SIGNATURES if row.layout is layout]
        assert not [row.name for row in rows[:-1] if row.when is anything and not row.extra_keys]


def test_numbers_in_keys_that_no_model_has_cost_nothing() -> None:
    """A key may name block 999999999, or have a number of five thousand digits."""
    keys = ("input_blocks.999999999.0.op.weight", f"input_blocks.{'9' * 5000}.0.weight", "output_blocks.999998.1.x")
    found = recognise_diffusion({**shapes_of("sd15"), **dict.fromkeys(keys, (1,))})
    assert found is not None
    assert found.name == "sd1"
