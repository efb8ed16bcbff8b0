"""The published layouts of diffusion models for images: a diffusers module's state under the names of its file.

Written from the key lists of the published files (tests/golden/detection_keys.json.gz), apart from the product's
converters, which go the other way; the tests hold these names against the lists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]
File = dict[str, Tensor]
#: a pattern of diffusers' names and what the file has there. "<n>" in it: the n-th of several that are one tensor in
#: the file; "<swap>": the halves change places
Rules = tuple[tuple[str, str], ...]


def published(state: State, rules: Rules) -> File:
    """`state` under the names that `rules` make of its own."""
    parts: dict[str, dict[int, Tensor]] = {}
    for key, tensor in state.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        if "<swap>" in key:
            key, tensor = key.replace("<swap>", ""), torch.cat(tensor.chunk(2)[::-1])
        number = re.search(r"<(\d)>", key)
        parts.setdefault(re.sub(r"<\d>", "", key), {})[int(number[1]) if number else 0] = tensor
    return {
        key: torch.cat([found[i] for i in sorted(found)]) if len(found) > 1 else found[0]
        for key, found in parts.items()
    }


def _qkv(pattern: str, replacement: str) -> Rules:
    """`pattern` and `replacement` with "#" where queries, keys and values differ; they are one tensor in the file."""
    return tuple((pattern.replace("#", x), f"{replacement}<{i}>") for i, x in enumerate("qkv"))


def _mlp(name: str, replacement: str) -> Rules:
    return ((rf"{name}\.linear_1\.", f"{replacement}.mlp.0."), (rf"{name}\.linear_2\.", f"{replacement}.mlp.2."))


def _layers(name: str, replacement: str) -> Rules:
    return (
        (rf"{name}\.linear_1\.", f"{replacement}.in_layer."),
        (rf"{name}\.linear_2\.", f"{replacement}.out_layer."),
    )


_FINAL: Rules = (
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1<swap>."),
    (r"^proj_out\.", "final_layer.linear."),
)


def sd3(state: State) -> File:
    """Stable Diffusion 3 and 3.5; the last block has two numbers for its texts, in the other order."""
    last = max(int(key.split(".")[1]) for key in state if key.startswith("transformer_blocks."))
    return published(
        state,
        (
            (r"^pos_embed\.pos_embed$", "pos_embed"),
            (r"^pos_embed\.proj\.", "x_embedder.proj."),
            *_mlp(r"time_text_embed\.timestep_embedder", "t_embedder"),
            *_mlp(r"time_text_embed\.text_embedder", "y_embedder"),
            (rf"^(transformer_blocks\.{last})\.norm1_context\.linear\.", r"\1.norm1_context.linear<swap>."),
            (r"^transformer_blocks\.", "joint_blocks."),
            *_qkv(r"\.(attn2?)\.to_#(?=\.)", r".x_block.\1.qkv"),
            *_qkv(r"\.attn\.add_#_proj(?=\.)", ".context_block.attn.qkv"),
            (r"\.attn\.norm_added_([qk])\.", r".context_block.attn.ln_\1."),
            (r"\.(attn2?)\.norm_([qk])\.", r".x_block.\1.ln_\2."),
            (r"\.(attn2?)\.to_out\.0\.", r".x_block.\1.proj."),
            (r"\.attn\.to_add_out\.", ".context_block.attn.proj."),
            (r"\.norm1_context\.linear", ".context_block.adaLN_modulation.1"),
            (r"\.norm1\.linear", ".x_block.adaLN_modulation.1"),
            (r"\.ff\.net\.0\.proj\.", ".x_block.mlp.fc1."),
            (r"\.ff\.net\.2\.", ".x_block.mlp.fc2."),
            (r"\.ff_context\.net\.0\.proj\.", ".context_block.mlp.fc1."),
            (r"\.ff_context\.net\.2\.", ".context_block.mlp.fc2."),
            *_FINAL,
        ),
    )


_FLUX_BLOCKS: Rules = (
    *_qkv(r"^single_transformer_blocks\.(\d+)\.attn\.to_#(?=\.)", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.proj_mlp\.", r"single_blocks.\1.linear1<3>."),
    (r"^single_transformer_blocks\.(\d+)\.proj_out\.", r"single_blocks.\1.linear2."),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_q\.weight", r"single_blocks.\1.norm.query_norm.scale"),
    (r"^single_transformer_blocks\.(\d+)\.attn\.norm_k\.weight", r"single_blocks.\1.norm.key_norm.scale"),
    (r"^single_transformer_blocks\.(\d+)\.norm\.linear\.", r"single_blocks.\1.modulation.lin."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"\.norm1\.linear\.", ".img_mod.lin."),
    (r"\.norm1_context\.linear\.", ".txt_mod.lin."),
    *_qkv(r"\.attn\.to_#(?=\.)", ".img_attn.qkv"),
    *_qkv(r"\.attn\.add_#_proj(?=\.)", ".txt_attn.qkv"),
    (r"\.attn\.norm_q\.weight", ".img_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_k\.weight", ".img_attn.norm.key_norm.scale"),
    (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
    (r"\.ff\.net\.0\.proj\.", ".img_mlp.0."),
    (r"\.ff\.net\.2\.", ".img_mlp.2."),
    (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.0."),
    (r"\.ff_context\.net\.2\.", ".txt_mlp.2."),
    (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
    (r"^context_embedder\.", "txt_in."),
    (r"^x_embedder\.", "img_in."),
)


def flux(state: State) -> File:
    """Flux of every kind."""
    return published(
        state,
        (
            *_layers(r"time_text_embed\.timestep_embedder", "time_in"),
            *_layers(r"time_text_embed\.text_embedder", "vector_in"),
            *_layers(r"time_text_embed\.guidance_embedder", "guidance_in"),
            *_FLUX_BLOCKS,
            *_FINAL,
        ),
    )


def chroma(state: State) -> File:
    """Chroma: Flux with a modulation from one small network."""
    return published(
        state,
        (
            (r"^(distilled_guidance_layer\.layers\.\d+)\.linear_1\.", r"\1.in_layer."),
            (r"^(distilled_guidance_layer\.layers\.\d+)\.linear_2\.", r"\1.out_layer."),
            (r"^(distilled_guidance_layer\.norms\.\d+)\.weight", r"\1.scale"),
            *_FLUX_BLOCKS,
            *_FINAL,
        ),
    )


def flux2(state: State) -> File:
    """Flux 2."""
    return published(
        state,
        (
            *_layers(r"time_guidance_embed\.timestep_embedder", "time_in"),
            *_layers(r"time_guidance_embed\.guidance_embedder", "guidance_in"),
            (r"^((?:double|single)_stream_modulation(?:_img|_txt)?)\.linear\.", r"\1.lin."),
            (r"^single_transformer_blocks\.(\d+)\.attn\.to_qkv_mlp_proj\.", r"single_blocks.\1.linear1."),
            (r"^single_transformer_blocks\.(\d+)\.attn\.to_out\.", r"single_blocks.\1.linear2."),
            (r"\.ff\.linear_in\.", ".img_mlp.0."),
            (r"\.ff\.linear_out\.", ".img_mlp.2."),
            (r"\.ff_context\.linear_in\.", ".txt_mlp.0."),
            (r"\.ff_context\.linear_out\.", ".txt_mlp.2."),
            *_FLUX_BLOCKS,
            *_FINAL,
        ),
    )


def flux_with_scales_named_weight(state: State) -> File:
    """Flux as some programs write it."""
    return {re.sub(r"(query|key)_norm\.scale$", r"\1_norm.weight", key): tensor for key, tensor in flux(state).items()}


def as_diffusers(state: State) -> File:
    """Models that are published under diffusers' own names."""
    return dict(state)


def z_image(state: State) -> File:
    """Z-Image, with a norm that nothing reads."""
    file = published(
        state,
        (
            (r"^all_x_embedder\.2-1\.", "x_embedder."),
            (r"^all_final_layer\.2-1\.", "final_layer."),
            *_qkv(r"\.attention\.to_#(?=\.)", ".attention.qkv"),
            (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
            (r"\.attention\.to_out\.0\.", ".attention.out."),
        ),
    )
    return file | {"norm_final.weight": torch.ones_like(file["cap_pad_token"][0])}


def lumina2(state: State) -> File:
    """Lumina 2, with a norm that nothing reads."""
    file = published(
        state,
        (
            (r"^time_caption_embed\.caption_embedder\.", "cap_embedder."),
            *_mlp(r"time_caption_embed\.timestep_embedder", "t_embedder"),
            (r"^norm_out\.linear_1\.", "final_layer.adaLN_modulation.1."),
            (r"^norm_out\.linear_2\.", "final_layer.linear."),
            *_qkv(r"\.attn\.to_#(?=\.)", ".attention.qkv"),
            (r"\.attn\.norm_([qk])\.", r".attention.\1_norm."),
            (r"\.attn\.to_out\.0\.", ".attention.out."),
            (r"\.feed_forward\.linear_(\d)\.", r".feed_forward.w\1."),
            (r"\.norm1\.linear\.", ".adaLN_modulation.1."),
            (r"\.norm1\.norm\.", ".attention_norm1."),
            (r"^(context_refiner\.\d+)\.norm1\.", r"\1.attention_norm1."),
            (r"\.norm2\.", ".attention_norm2."),
        ),
    )
    return file | {"norm_final.weight": torch.ones_like(file["x_embedder.bias"])}


def auraflow(state: State) -> File:
    """AuraFlow."""
    return published(
        state,
        (
            (r"^pos_embed\.pos_embed$", "positional_encoding"),
            (r"^pos_embed\.proj\.", "init_x_linear."),
            (r"^time_step_proj\.linear_1\.", "t_embedder.mlp.0."),
            (r"^time_step_proj\.linear_2\.", "t_embedder.mlp.2."),
            (r"^context_embedder\.", "cond_seq_linear."),
            (r"^norm_out\.linear\.", "modF.1<swap>."),
            (r"^proj_out\.", "final_linear."),
            (r"^(single_transformer_blocks\.\d+)\.attn\.to_([qkv])\.", r"\1.attn.w1\2."),
            (r"^(single_transformer_blocks\.\d+)\.attn\.to_out\.0\.", r"\1.attn.w1o."),
            (r"^(single_transformer_blocks\.\d+)\.norm1\.linear\.", r"\1.modCX.1."),
            (r"^(single_transformer_blocks\.\d+)\.ff\.", r"\1.mlp."),
            (r"\.attn\.to_([qkv])\.", r".attn.w2\1."),
            (r"\.attn\.to_out\.0\.", ".attn.w2o."),
            (r"\.attn\.add_([qkv])_proj\.", r".attn.w1\1."),
            (r"\.attn\.to_add_out\.", ".attn.w1o."),
            (r"\.norm1\.linear\.", ".modX.1."),
            (r"\.norm1_context\.linear\.", ".modC.1."),
            (r"\.ff\.", ".mlpX."),
            (r"\.ff_context\.", ".mlpC."),
            (r"\.linear_(\d)\.weight$", r".c_fc\1.weight"),
            (r"\.out_projection\.", ".c_proj."),
            (r"^joint_transformer_blocks\.", "double_layers."),
            (r"^single_transformer_blocks\.", "single_layers."),
        ),
    )


def pixart(state: State) -> File:
    """PixArt, with its table of positions and what it was trained to read for no text."""
    file = published(
        state,
        (
            (r"^pos_embed\.proj\.", "x_embedder.proj."),
            *_mlp(r"adaln_single\.emb\.timestep_embedder", "t_embedder"),
            *_mlp(r"adaln_single\.emb\.resolution_embedder", "csize_embedder"),
            *_mlp(r"adaln_single\.emb\.aspect_ratio_embedder", "ar_embedder"),
            (r"^adaln_single\.linear\.", "t_block.1."),
            (r"^caption_projection\.linear_(\d)\.", r"y_embedder.y_proj.fc\1."),
            (r"^proj_out\.", "final_layer.linear."),
            (r"^scale_shift_table$", "final_layer.scale_shift_table"),
            (r"^transformer_blocks\.", "blocks."),
            *_qkv(r"\.attn1\.to_#(?=\.)", ".attn.qkv"),
            (r"\.attn1\.to_out\.0\.", ".attn.proj."),
            (r"\.attn2\.to_q\.", ".cross_attn.q_linear."),
            (r"\.attn2\.to_k(?=\.)", ".cross_attn.kv_linear<0>"),
            (r"\.attn2\.to_v(?=\.)", ".cross_attn.kv_linear<1>"),
            (r"\.attn2\.to_out\.0\.", ".cross_attn.proj."),
            (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
            (r"\.ff\.net\.2\.", ".mlp.fc2."),
        ),
    )
    return file | {"y_embedder.y_embedding": torch.ones(300, file["y_embedder.y_proj.fc1.weight"].shape[1])}


def hunyuan_image(state: State) -> File:
    """Hunyuan Image 2.1: Flux's blocks behind a text refiner."""
    refiner = "txt_in.individual_token_refiner.blocks"
    return published(
        state,
        (
            (r"^x_embedder\.proj\.", "img_in.proj."),
            *_layers(r"^time_guidance_embed\.timestep_embedder_r", "time_r_in"),
            *_layers(r"^time_guidance_embed\.timestep_embedder", "time_in"),
            *_layers(r"^time_guidance_embed\.guidance_embedder", "guidance_in"),
            (r"^context_embedder\.proj_in\.", "txt_in.input_embedder."),
            *_layers(r"^context_embedder\.time_text_embed\.timestep_embedder", "txt_in.t_embedder"),
            *_layers(r"^context_embedder\.time_text_embed\.text_embedder", "txt_in.c_embedder"),
            (r"^context_embedder_2\.norm\.", "byt5_in.layernorm."),
            (r"^context_embedder_2\.linear_(\d)\.", r"byt5_in.fc\1."),
            *_qkv(
                r"^context_embedder\.token_refiner\.refiner_blocks\.(\d+)\.attn\.to_#(?=\.)",
                rf"{refiner}.\1.self_attn.qkv",
            ),
            (r"^context_embedder\.token_refiner\.refiner_blocks\.", f"{refiner}."),
            (rf"^({refiner}\.\d+)\.attn\.to_out\.0\.", r"\1.self_attn.proj."),
            (rf"^({refiner}\.\d+)\.ff\.net\.0\.proj\.", r"\1.mlp.0."),
            (rf"^({refiner}\.\d+)\.ff\.net\.2\.", r"\1.mlp.2."),
            (rf"^({refiner}\.\d+)\.norm_out\.linear\.", r"\1.adaLN_modulation.1."),
            *_FLUX_BLOCKS,
            *_FINAL,
        ),
    )


def hunyuan_dit(state: State) -> File:
    """HunyuanDiT: its second norm of a block is diffusers' third."""
    return published(
        state,
        (
            (r"^text_embedder\.linear_1\.", "mlp_t5.0."),
            (r"^text_embedder\.linear_2\.", "mlp_t5.2."),
            (r"^pos_embed\.proj\.", "x_embedder.proj."),
            *_mlp(r"time_extra_emb\.timestep_embedder", "t_embedder"),
            (r"^time_extra_emb\.extra_embedder\.linear_1\.", "extra_embedder.0."),
            (r"^time_extra_emb\.extra_embedder\.linear_2\.", "extra_embedder.2."),
            (r"^time_extra_emb\.", ""),
            (r"^(blocks\.\d+)\.norm1\.linear\.", r"\1.default_modulation.1."),
            (r"^(blocks\.\d+)\.norm1\.norm\.", r"\1.norm1."),
            (r"^(blocks\.\d+)\.norm2\.", r"\1.norm_third."),
            (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),
            (r"^(blocks\.\d+)\.norm_third\.", r"\1.norm3."),
            *_qkv(r"\.attn1\.to_#(?=\.)", ".attn1.Wqkv"),
            (r"\.attn2\.to_q\.", ".attn2.q_proj."),
            (r"\.attn2\.to_k(?=\.)", ".attn2.kv_proj<0>"),
            (r"\.attn2\.to_v(?=\.)", ".attn2.kv_proj<1>"),
            (r"\.(attn\d)\.norm_([qk])\.", r".\1.\2_norm."),
            (r"\.(attn\d)\.to_out\.0\.", r".\1.out_proj."),
            (r"\.ff\.net\.0\.proj\.", ".mlp.fc1."),
            (r"\.ff\.net\.2\.", ".mlp.fc2."),
            *_FINAL,
        ),
    )
