"""The single-file layouts of published models for video and audio, of Stable Cascade and of UNets, the other way: a
diffusers module's state under the names of its file.

Written from the key lists of the published files (tests/golden/detection_keys.json.gz), apart from the product's
converters, which go the other way; `test_video_build.py` holds these names against the lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
File = dict[str, Tensor]
Rules = tuple[tuple[str, str], ...]


def renamed(state: State, rules: Rules) -> File:
    """Every key after all `rules`, in their order."""
    file = {}
    for key, tensor in state.items():
        name = key
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        file[name] = tensor
    return file


def joined(file: File, parts: tuple[str, ...], whole: str) -> File:
    """`file` with the rows of `parts`, pieces of keys, in one tensor `whole` wherever all are."""
    result: File = {}
    for key, tensor in file.items():
        part = next((part for part in parts if part in key), None)
        if part is None:
            result[key] = tensor
        elif part == parts[0]:
            result[key.replace(part, whole)] = torch.cat([file[key.replace(part, other)] for other in parts])
    return result


def swapped(file: File, *beginnings: str) -> File:
    """`file` with the halves of some tensors in the other order."""
    return {key: torch.cat(x.chunk(2)[::-1]) if re.match("|".join(beginnings), key) else x for key, x in file.items()}


_WAN: Rules = (
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^condition_embedder\.image_embedder\.norm1", "img_emb.proj.0"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.0\.proj", "img_emb.proj.1"),
    (r"^condition_embedder\.image_embedder\.ff\.net\.2", "img_emb.proj.3"),
    (r"^condition_embedder\.image_embedder\.norm2", "img_emb.proj.4"),
    (r"^condition_embedder\.image_embedder\.pos_embed", "img_emb.emb_pos"),
    (r"^scale_shift_table", "head.modulation"),
    (r"^proj_out", "head.head"),
    (r"scale_shift_table", "modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.add_([kv])_proj\.", r".\1_img."),
    (r"\.norm_added_k\.", ".norm_k_img."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
    (r"\.norm2\.", ".norm3."),
    (r"^(vace_blocks\.\d+)\.proj_in\.", r"\1.before_proj."),
    (r"^(vace_blocks\.\d+)\.proj_out\.", r"\1.after_proj."),
)


def wan(state: State) -> File:
    """Wan."""
    return renamed(state, _WAN)


#: in the original's own words
_HUNYUAN: Rules = (
    (r"^x_embedder\.", "img_in."),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_1", "txt_in.t_embedder.mlp.0"),
    (r"^context_embedder\.time_text_embed\.timestep_embedder\.linear_2", "txt_in.t_embedder.mlp.2"),
    (r"^context_embedder\.time_text_embed\.text_embedder\.", "txt_in.c_embedder."),
    (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
    (r"^context_embedder\.token_refiner\.refiner_blocks\.", "txt_in.individual_token_refiner.blocks."),
    (r"^(txt_in.*)\.norm_out\.linear\.", r"\1.adaLN_modulation.1."),
    (r"^(txt_in.*)\.attn\.to_out\.0\.", r"\1.self_attn_proj."),
    (r"^(txt_in.*)\.attn\.", r"\1.self_attn."),
    (r"^(txt_in.*)\.ff\.net\.0\.proj\.", r"\1.mlp.fc1."),
    (r"^(txt_in.*)\.ff\.net\.2\.", r"\1.mlp.fc2."),
    (r"^(?:time_text_embed|time_embed)\.timestep_embedder\.linear_1\.", "time_in.mlp.0."),
    (r"^(?:time_text_embed|time_embed)\.timestep_embedder\.linear_2\.", "time_in.mlp.2."),
    (r"^time_text_embed\.guidance_embedder\.linear_1\.", "guidance_in.mlp.0."),
    (r"^time_text_embed\.guidance_embedder\.linear_2\.", "guidance_in.mlp.2."),
    (r"^time_text_embed\.text_embedder\.linear_1\.", "vector_in.in_layer."),
    (r"^time_text_embed\.text_embedder\.linear_2\.", "vector_in.out_layer."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^single_transformer_blocks\.", "single_blocks."),
    (r"^(double.*)\.norm1\.linear\.", r"\1.img_mod.linear."),
    (r"^(double.*)\.norm1_context\.linear\.", r"\1.txt_mod.linear."),
    (r"^(double.*)\.attn\.to_out\.0\.", r"\1.img_attn_proj."),
    (r"^(double.*)\.attn\.to_add_out\.", r"\1.txt_attn_proj."),
    (r"^(double.*)\.attn\.norm_added_([qk])\.", r"\1.txt_attn_\2_norm."),
    (r"^(double.*)\.attn\.norm_([qk])\.", r"\1.img_attn_\2_norm."),
    (r"^(double.*)\.ff\.net\.0\.proj\.", r"\1.img_mlp.fc1."),
    (r"^(double.*)\.ff\.net\.2\.", r"\1.img_mlp.fc2."),
    (r"^(double.*)\.ff_context\.net\.0\.proj\.", r"\1.txt_mlp.fc1."),
    (r"^(double.*)\.ff_context\.net\.2\.", r"\1.txt_mlp.fc2."),
    (r"^(single.*)\.norm\.linear\.", r"\1.modulation.linear."),
    (r"^(single.*)\.attn\.norm_([qk])\.", r"\1.\2_norm."),
    (r"^(single.*)\.proj_out\.", r"\1.linear2."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^context_embedder_2\.norm\.", "byt5_in.layernorm."),
    (r"^context_embedder_2\.linear_(\d)\.", r"byt5_in.fc\1."),
    (r"^image_embedder\.norm_in\.", "vision_in.proj.0."),
    (r"^image_embedder\.linear_1\.", "vision_in.proj.1."),
    (r"^image_embedder\.linear_2\.", "vision_in.proj.3."),
    (r"^image_embedder\.norm_out\.", "vision_in.proj.4."),
    (r"^cond_type_embed\.", "cond_type_embedding."),
)
#: what files in the words of Flux call otherwise
_LIKE_FLUX: Rules = (
    (r"(img|txt)_mod\.linear\.", r"\1_mod.lin."),
    (r"modulation\.linear\.", "modulation.lin."),
    (r"(img|txt)_attn_qkv\.", r"\1_attn.qkv."),
    (r"(img|txt)_attn_proj\.", r"\1_attn.proj."),
    (r"(img|txt)_attn_q_norm\.weight", r"\1_attn.norm.query_norm.scale"),
    (r"(img|txt)_attn_k_norm\.weight", r"\1_attn.norm.key_norm.scale"),
    (r"^(single_blocks\.\d+)\.q_norm\.weight", r"\1.norm.query_norm.scale"),
    (r"^(single_blocks\.\d+)\.k_norm\.weight", r"\1.norm.key_norm.scale"),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"(time_in|guidance_in|t_embedder)\.mlp\.0\.", r"\1.in_layer."),
    (r"(time_in|guidance_in|t_embedder)\.mlp\.2\.", r"\1.out_layer."),
    (r"c_embedder\.linear_1\.", "c_embedder.in_layer."),
    (r"c_embedder\.linear_2\.", "c_embedder.out_layer."),
    (r"self_attn_qkv\.", "self_attn.qkv."),
    (r"self_attn_proj\.", "self_attn.proj."),
)


def hunyuan(state: State) -> File:
    """HunyuanVideo, as its own code spells it."""
    file = dict(state)
    single = tuple(f".{part}." for part in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))
    ends = {key: x for key, x in file.items() if key.startswith("single_transformer_blocks.")}
    file = {**{key: x for key, x in file.items() if key not in ends}, **joined(ends, single, ".linear1.")}
    file = joined(file, (".attn.add_q_proj.", ".attn.add_k_proj.", ".attn.add_v_proj."), ".txt_attn_qkv.")
    doubles = {key: x for key, x in file.items() if key.startswith("transformer_blocks.")}
    file = {
        **{key: x for key, x in file.items() if key not in doubles},
        **joined(doubles, (".attn.to_q.", ".attn.to_k.", ".attn.to_v."), ".img_attn_qkv."),
    }
    refiner = (".attn.to_q.", ".attn.to_k.", ".attn.to_v.")
    return swapped(renamed(joined(file, refiner, ".self_attn_qkv."), _HUNYUAN), r"final_layer\.adaLN_modulation\.1\.")


def hunyuan_like_flux(state: State) -> File:
    """HunyuanVideo in the words of Flux."""
    return renamed(hunyuan(state), _LIKE_FLUX)


def ltx(state: State) -> File:
    """LTX-Video."""
    return renamed(
        state,
        (
            (r"^proj_in\.", "patchify_proj."),
            (r"^time_embed\.", "adaln_single."),
            (r"norm_q\.", "q_norm."),
            (r"norm_k\.", "k_norm."),
        ),
    )


_MOCHI: Rules = (
    (r"^patch_embed\.", "x_embedder."),
    (r"^time_embed\.timestep_embedder\.linear_1\.", "t_embedder.mlp.0."),
    (r"^time_embed\.timestep_embedder\.linear_2\.", "t_embedder.mlp.2."),
    (r"^time_embed\.pooler\.", "t5_y_embedder."),
    (r"^time_embed\.caption_proj\.", "t5_yproj."),
    (r"^transformer_blocks\.", "blocks."),
    (r"\.norm1\.linear\.", ".mod_x."),
    (r"\.norm1_context\.linear(_1)?\.", ".mod_y."),
    (r"\.attn1\.norm_added_([qk])\.", r".attn.\1_norm_y."),
    (r"\.attn1\.norm_([qk])\.", r".attn.\1_norm_x."),
    (r"\.attn1\.to_out\.0\.", ".attn.proj_x."),
    (r"\.attn1\.to_add_out\.", ".attn.proj_y."),
    (r"\.ff\.net\.0\.proj\.", ".mlp_x.w1."),
    (r"\.ff\.net\.2\.", ".mlp_x.w2."),
    (r"\.ff_context\.net\.0\.proj\.", ".mlp_y.w1."),
    (r"\.ff_context\.net\.2\.", ".mlp_y.w2."),
    (r"^norm_out\.linear\.", "final_layer.mod."),
    (r"^proj_out\.", "final_layer.linear."),
)


def mochi(state: State) -> File:
    """Mochi."""
    file = joined(dict(state), (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), ".attn.qkv_x.")
    file = joined(file, (".attn1.add_q_proj.", ".attn1.add_k_proj.", ".attn1.add_v_proj."), ".attn.qkv_y.")
    return swapped(renamed(file, _MOCHI), r"blocks\.\d+\.mlp_[xy]\.w1\.", r"final_layer\.mod\.")


def cosmos(state: State) -> File:
    """The first Cosmos."""
    return renamed(
        state,
        (
            (r"^patch_embed\.proj\.", "x_embedder.proj.1."),
            (r"^learnable_pos_embed\.", "extra_pos_embedder."),
            (r"^time_embed\.t_embedder\.", "t_embedder.1."),
            (r"^time_embed\.norm\.", "affline_norm."),
            (r"^transformer_blocks\.(\d+)\.", r"blocks.block\1."),
            (r"\.attn1\.", ".blocks.0.block.attn."),
            (r"\.attn2\.", ".blocks.1.block.attn."),
            (r"\.to_([qkv])\.", r".to_\1.0."),
            (r"\.norm_([qk])\.", r".to_\1.1."),
            (r"\.ff\.net\.0\.proj\.", ".blocks.2.block.layer1."),
            (r"\.ff\.net\.2\.", ".blocks.2.block.layer2."),
            (r"\.norm1\.linear_(\d)\.", r".blocks.0.adaLN_modulation.\1."),
            (r"\.norm2\.linear_(\d)\.", r".blocks.1.adaLN_modulation.\1."),
            (r"\.norm3\.linear_(\d)\.", r".blocks.2.adaLN_modulation.\1."),
            (r"^norm_out\.linear_(\d)\.", r"final_layer.adaLN_modulation.\1."),
            (r"^proj_out\.", "final_layer.linear."),
        ),
    )


def cosmos_predict_2(state: State) -> File:
    """Cosmos Predict 2."""
    return renamed(
        state,
        (
            (r"^patch_embed\.proj\.", "x_embedder.proj.1."),
            (r"^time_embed\.t_embedder\.", "t_embedder.1."),
            (r"^time_embed\.norm\.", "t_embedding_norm."),
            (r"^transformer_blocks\.", "blocks."),
            (r"\.attn1\.", ".self_attn."),
            (r"\.attn2\.", ".cross_attn."),
            (r"\.to_([qkv])\.", r".\1_proj."),
            (r"\.to_out\.0\.", ".output_proj."),
            (r"\.norm_([qk])\.", r".\1_norm."),
            (r"\.ff\.net\.0\.proj\.", ".mlp.layer1."),
            (r"\.ff\.net\.2\.", ".mlp.layer2."),
            (r"\.norm1\.linear_(\d)\.", r".adaln_modulation_self_attn.\1."),
            (r"\.norm2\.linear_(\d)\.", r".adaln_modulation_cross_attn.\1."),
            (r"\.norm3\.linear_(\d)\.", r".adaln_modulation_mlp.\1."),
            (r"^norm_out\.linear_(\d)\.", r"final_layer.adaln_modulation.\1."),
            (r"^proj_out\.", "final_layer.linear."),
        ),
    )


_AUDIO: Rules = (
    (r"^timestep_proj\.", "to_timestep_embed."),
    (r"^global_proj\.", "to_global_embed."),
    (r"^cross_attention_proj\.", "to_cond_embed."),
    (r"^proj_in\.", "transformer.project_in."),
    (r"^proj_out\.", "transformer.project_out."),
    (r"^transformer_blocks\.", "transformer.layers."),
    (r"\.norm1\.weight", ".pre_norm.gamma"),
    (r"\.norm1\.bias", ".pre_norm.beta"),
    (r"\.norm2\.weight", ".cross_attend_norm.gamma"),
    (r"\.norm2\.bias", ".cross_attend_norm.beta"),
    (r"\.norm3\.weight", ".ff_norm.gamma"),
    (r"\.norm3\.bias", ".ff_norm.beta"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_out\.0\.", ".to_out."),
    (r"\.ff\.net\.", ".ff.ff."),
)


def stable_audio(state: State) -> File:
    """Stable Audio 1, with the offsets of norms, which are zero in the published file, and its table of positions."""
    file = joined(dict(state), (".attn1.to_q.", ".attn1.to_k.", ".attn1.to_v."), ".attn1.to_qkv.")
    file = renamed(joined(file, (".attn2.to_k.", ".attn2.to_v."), ".attn2.to_kv."), _AUDIO)
    file["timestep_features.weight"] = file.pop("time_proj.weight").unsqueeze(1)
    return file | {"transformer.rotary_pos_emb.inv_freq": torch.ones(16)}


def stable_audio_without_offsets(state: State) -> File:
    """The same without the offsets."""
    return {key: tensor for key, tensor in stable_audio(state).items() if not key.endswith(".beta")}


def seconds(state: State) -> File:
    """What embeds seconds, beside Stable Audio."""
    return renamed(
        state,
        (
            (r"^start_number_conditioner\.", "conditioner.conditioners.seconds_start."),
            (r"^end_number_conditioner\.", "conditioner.conditioners.seconds_total."),
            (r"time_positional_embedding\.", "embedder.embedding."),
        ),
    )


def cascade_apart(state: State) -> File:
    """Stable Cascade with queries, keys and values apart, as other programs write it."""
    rules: Rules = (
        (r"\.attention\.to_out\.0\.", ".attention.attn.out_proj."),
        (r"\.attention\.to_", ".attention.attn.to_"),
    )
    stage_b: Rules = () if "clip_txt_mapper.weight" in state else ((r"^clip_txt_pooled_mapper\.", "clip_mapper."),)
    return renamed(state, (*rules, *stage_b))


def cascade(state: State) -> File:
    """Stable Cascade as published."""
    parts = (".attn.to_q.", ".attn.to_k.", ".attn.to_v.")
    return joined(cascade_apart(state), parts, ".attn.in_proj_")


_UNET: Rules = (
    (r"^time_embedding\.linear_1\.", "time_embed.0."),
    (r"^time_embedding\.linear_2\.", "time_embed.2."),
    (r"^add_embedding\.linear_1\.", "label_emb.0.0."),
    (r"^add_embedding\.linear_2\.", "label_emb.0.2."),
    (r"^class_embedding\.", "label_emb."),
    (r"^conv_in\.", "input_blocks.0.0."),
    (r"^conv_norm_out\.", "out.0."),
    (r"^conv_out\.", "out.2."),
)
_RESIDUAL: Rules = (
    (r"spatial_res_block\.", ""),
    (r"temporal_res_block\.", "time_stack."),
    (r"norm1\.", "in_layers.0."),
    (r"conv1\.", "in_layers.2."),
    (r"time_emb_proj\.", "emb_layers.1."),
    (r"norm2\.", "out_layers.0."),
    (r"conv2\.", "out_layers.3."),
    (r"conv_shortcut\.", "skip_connection."),
)
_ATTENTION: Rules = (
    (r"^temporal_transformer_blocks\.", "time_stack."),
    (r"^time_pos_embed\.linear_1\.", "time_pos_embed.0."),
    (r"^time_pos_embed\.linear_2\.", "time_pos_embed.2."),
)


def unet(state: State) -> File:
    """UNets of latent diffusion: levels have as many residual blocks as the first, one more on the way up."""
    layers = len({key.split(".")[3] for key in state if key.startswith("down_blocks.0.resnets.")})
    file: File = {}
    for key, tensor in state.items():
        found = re.match(r"(down|up|mid)_block(?:s\.(\d+))?\.(resnets|attentions|\w+samplers)\.(\d+)\.(.+)", key)
        if found is None:
            file |= renamed({key: tensor}, _UNET)
            continue
        way, level, kind, number, rest = found[1], int(found[2] or 0), found[3], int(found[4]), found[5]
        rules = _RESIDUAL if kind == "resnets" else _ATTENTION
        name = next(iter(renamed({rest: tensor}, rules)))
        if way == "mid":
            place = f"middle_block.{2 * number if kind == 'resnets' else 1}"
        elif kind.endswith("samplers"):
            last = level * (layers + 1) + layers
            attends = any(k.startswith(f"up_blocks.{level}.attentions.") for k in state)
            place = f"input_blocks.{last + 1}.0" if way == "down" else f"output_blocks.{last}.{2 if attends else 1}"
            name = rest.replace("conv.", "op.") if way == "down" else rest
        else:
            block = level * (layers + 1) + number + (1 if way == "down" else 0)
            place = f"{'input' if way == 'down' else 'output'}_blocks.{block}.{0 if kind == 'resnets' else 1}"
        file[f"{place}.{name}"] = tensor
    return file
