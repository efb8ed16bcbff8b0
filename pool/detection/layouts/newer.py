"""Layouts of newer or rarer models that are recognised with few sizes. Torch-free.

Sources: diffusers 0.42.1 for its naming and for the keys of its single-file converters; the keys by which other
programs recognise the published files.
"""

from __future__ import annotations

from modelpool.pool.detection.layouts.shape_sizes import ShapeReader, count, dim, maybe, sizes
from modelpool.pool.detection.layouts.signature import Layout, diffusers, published

_PATCHES = "patch_embed.proj.weight"


def _patch_channels(reader: ShapeReader) -> int | None:
    """Return the input channels of the patch convolution; None if a linear layer reads complete patches, as in version
    1.5."""
    return reader.size(_PATCHES, 1, 4) if reader.rank(_PATCHES) == 4 else None


COG_VIDEO_X = Layout(
    "CogVideoX",
    (
        published(
            "blocks.0.norm1.linear.weight",
            without=("time_extra_emb.pooler.positional_embedding", "caption_projection.0.linear.weight"),
            measure=sizes(
                hidden_size=dim("blocks.0.norm1.linear.weight", 0, divide=6),
                num_layers=count("blocks."),
                in_channels=_patch_channels,
            ),
        ),
        diffusers(
            "patch_embed.text_proj.weight",
            "transformer_blocks.0.norm1.linear.weight",
            "time_embedding.linear_1.weight",
            measure=sizes(
                hidden_size=dim("patch_embed.text_proj.weight", 0),
                num_layers=count("transformer_blocks."),
                in_channels=_patch_channels,
            ),
        ),
    ),
)

#: reads only text; otherwise like CogVideoX
COG_VIEW_4 = Layout(
    "CogView 3+ or 4",
    (
        diffusers(
            "patch_embed.text_proj.weight",
            "time_condition_embed.condition_embedder.linear_1.weight",
            measure=sizes(
                hidden_size=dim("patch_embed.text_proj.weight", 0),
                context_dim=dim("patch_embed.text_proj.weight", 1),
                num_layers=count("transformer_blocks."),
            ),
        ),
    ),
)

GLM_IMAGE = Layout(
    "GLM-Image",
    (
        diffusers(
            "glyph_projector.net.0.proj.weight",
            "prior_token_embedding.weight",
            measure=sizes(hidden_size=dim("prior_token_embedding.weight", 1), num_layers=count("transformer_blocks.")),
        ),
    ),
)

SEED_VR_2 = Layout(
    "SeedVR2",
    (
        published(
            "blocks.35.mlp.vid.proj_out.weight", measure=sizes(hidden_size=dim("blocks.35.mlp.vid.proj_out.weight", 0))
        ),
        published(
            "blocks.35.mlp.all.proj_in_gate.weight",
            measure=sizes(hidden_size=dim("blocks.35.mlp.all.proj_in_gate.weight", 1)),
        ),
        published(
            "blocks.31.mlp.all.proj_in_gate.weight",
            measure=sizes(hidden_size=dim("blocks.31.mlp.all.proj_in_gate.weight", 1)),
        ),
    ),
)

PID = Layout("PiD", (published("lq_proj.latent_proj.0.weight", measure=sizes()),))
PIXEL_DIT = Layout("PixelDiT", (published("core.pixel_embedder.proj.weight", measure=sizes()),))
TRIPO_SPLAT = Layout(
    "TripoSplat",
    (
        published(
            "cam_out_layer.weight",
            "repo_layers.0.final_map.weight",
            measure=sizes(hidden_size=dim("cam_out_layer.weight", 1)),
        ),
    ),
)
HIDREAM_O1 = Layout(
    "HiDream O1",
    (
        published(
            "t_embedder1.mlp.0.weight",
            "x_embedder.proj1.weight",
            measure=sizes(hidden_size=dim("t_embedder1.mlp.0.weight", 0)),
        ),
    ),
)
BOOGU = Layout(
    "Boogu",
    (
        published(
            "double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight",
            measure=sizes(
                hidden_size=dim("double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight", 1),
                depth=count("double_stream_layers."),
            ),
        ),
    ),
)
LENS = Layout(
    "Lens",
    (
        published(
            "transformer_blocks.0.attn.norm_added_q.weight",
            "transformer_blocks.0.img_mlp.w1.weight",
            measure=sizes(
                hidden_size=dim("transformer_blocks.0.img_mlp.w1.weight", 1), num_layers=count("transformer_blocks.")
            ),
        ),
    ),
)
IDEOGRAM_4 = Layout(
    "Ideogram 4",
    (
        published(
            "embed_image_indicator.weight",
            measure=sizes(
                hidden_size=dim("embed_image_indicator.weight", 1),
                in_channels=maybe("input_proj.weight", 1),
                num_layers=count("layers."),
            ),
        ),
    ),
)
KREA_2 = Layout(
    "Krea 2",
    (
        published(
            "txtfusion.projector.weight",
            measure=sizes(
                hidden_size=maybe("first.weight", 0), in_channels=maybe("first.weight", 1), num_layers=count("blocks.")
            ),
        ),
        diffusers(
            "text_fusion.projector.weight",
            measure=sizes(
                hidden_size=dim("img_in.weight", 0),
                in_channels=dim("img_in.weight", 1),
                num_layers=count("transformer_blocks."),
            ),
        ),
    ),
)
ERNIE_IMAGE = Layout(
    "Ernie Image",
    (
        published(
            "layers.0.mlp.linear_fc2.weight",
            measure=sizes(hidden_size=dim("layers.0.mlp.linear_fc2.weight", 0), num_layers=count("layers.")),
        ),
    ),
)
JOY_IMAGE = Layout(
    "JoyImage",
    (
        published(
            "double_blocks.0.attn.img_attn_qkv.weight",
            "condition_embedder.time_embedder.linear_1.weight",
            "img_in.weight",
            measure=sizes(
                hidden_size=dim("img_in.weight", 0, 5),
                in_channels=dim("img_in.weight", 1, 5),
                num_layers=count("double_blocks."),
            ),
        ),
    ),
)
QWEN_IMAGE_21 = Layout(
    "Qwen-Image 2.1",
    (
        published(
            "txt_in.text_norm.weight",
            measure=sizes(
                context_dim=dim("txt_in.text_norm.weight", 0, 1),
                hidden_size=maybe("img_in.weight", 0),
                in_channels=maybe("img_in.weight", 1),
                num_layers=count("transformer_blocks."),
            ),
        ),
    ),
)
MINIMAX_H3 = Layout(
    "MiniMax H3",
    (
        published(
            "video_patch_proj.weight",
            "audio_patch_proj.weight",
            measure=sizes(
                hidden_size=dim("video_patch_proj.weight", 0),
                in_channels=dim("video_patch_proj.weight", 1),
                audio_channels=dim("audio_patch_proj.weight", 1),
            ),
        ),
        diffusers(
            "audio_proj_in.weight",
            "token_refiner.final_norm.weight",
            measure=sizes(
                hidden_size=dim("proj_in.weight", 0),
                in_channels=dim("proj_in.weight", 1),
                audio_channels=dim("audio_proj_in.weight", 1),
            ),
        ),
    ),
)
KANDINSKY_6 = Layout(
    "Kandinsky 6",
    (
        diffusers(
            "visual_embeddings.in_layer.weight",
            "audio_embeddings.in_layer.weight",
            measure=sizes(
                model_dim=dim("visual_embeddings.in_layer.weight", 0),
                visual_embed_dim=dim("visual_embeddings.in_layer.weight", 1),
            ),
        ),
    ),
)
WAN_ANIMATE_2 = Layout(
    "Wan animate 2",
    (
        diffusers(
            "head.modulation",
            "blocks.0.self_attn.to_q.weight",
            "patch_embedding.weight",
            measure=sizes(
                dim=dim("patch_embedding.weight", 0, 5),
                in_dim=dim("patch_embedding.weight", 1, 5),
                num_layers=count("blocks."),
            ),
        ),
    ),
)
#: the first OmniGen: a language model that generates images
OMNIGEN = Layout(
    "OmniGen",
    (
        diffusers(
            "patch_embedding.output_image_proj.weight",
            "time_token.linear_1.weight",
            measure=sizes(
                hidden_size=dim("patch_embedding.output_image_proj.weight", 0, 4),
                in_channels=dim("patch_embedding.output_image_proj.weight", 1, 4),
                num_layers=count("layers."),
            ),
        ),
    ),
)
