"""Sana Video: linear attention with positions over the cells of a video, and convolutions over its frames. Torch-free.

The model for 480 lines, with the autoencoder of Wan 2.1; the one for 720 lines has another autoencoder, and does not
run. Videos have the requested size: the pipeline of diffusers generates the nearest of a table of sizes, and resizes
that, unless `use_resolution_binning` is off. An image that a video begins with is not read.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.definitions import sana
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head of both attentions
_HEAD = 112
#: cells along the height of a video of 480 lines in patches, which distinguishes the sizes of the pipeline's table
_ROWS = 30
_TEMPORAL, _TEMPORAL_IN_DIFFUSERS = "blocks.0.mlp.t_conv.weight", "transformer_blocks.0.ff.conv_temp.weight"
#: as of Sana, for videos
_INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
        "video generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, motion, and "
        "temporal relationships to create vivid and dynamic scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat slowly settling into a curled position, "
        "peacefully falling asleep on a warm sunny windowsill, with gentle sunlight filtering through surrounding pots "
        "of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
        "lamps gradually lighting up, a diverse crowd of people in colorful clothing walking past, and a double-decker "
        "bus smoothly passing by towering glass skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: {}",
    )
)


def _sizes(embedding: str, blocks: str, text: str) -> Any:
    return fam.sizes(
        in_channels=fam.dim(embedding, 1, 5),
        hidden_size=fam.dim(embedding, 0, 5),
        patch_time=fam.dim(embedding, 2, 5),
        patch_size=fam.dim(embedding, 3, 5),
        depth=fam.count(blocks),
        context_dim=fam.dim(text, 1),
    )


#: the keys of Sana, and a convolution over frames
SANA_VIDEO = fam.Layout(
    "Sana Video",
    (
        fam.published(
            "attention_y_norm.weight",
            "blocks.0.cross_attn.q_linear.weight",
            _TEMPORAL,
            measure=_sizes("x_embedder.proj.weight", "blocks.", "y_embedder.y_proj.fc1.weight"),
        ),
        fam.diffusers(
            "patch_embedding.weight",
            "caption_norm.weight",
            _TEMPORAL_IN_DIFFUSERS,
            measure=_sizes("patch_embedding.weight", "transformer_blocks.", "caption_projection.linear_1.weight"),
        ),
    ),
)
_NAMES = replace(
    sana.NAMES,
    outer=(("x_embedder.proj.", "patch_embedding."), *sana.NAMES.outer),
    block={**sana.NAMES.block, "mlp.t_conv": ("ff.conv_temp",)},
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.SanaVideoTransformer3DModel`. A model narrower than a published head has one head."""
    sizes: dict[str, Any] = dict(found)
    width, block = sizes["hidden_size"], "transformer_blocks.0."
    heads = max(1, width // _HEAD)
    patch = (sizes["patch_time"], sizes["patch_size"], sizes["patch_size"])
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // math.prod(patch),
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "num_layers": sizes["depth"],
        "num_cross_attention_heads": heads,
        "cross_attention_head_dim": width // heads,
        "cross_attention_dim": width,
        "caption_channels": sizes["context_dim"],
        "mlp_ratio": fam.ratio(shapes[f"{block}ff.conv_point.weight"][1], width),
        "attention_bias": f"{block}attn1.to_q.bias" in shapes,
        "sample_size": _ROWS,
        "patch_size": patch,
        "qk_norm": "rms_norm_across_heads" if f"{block}attn1.norm_q.weight" in shapes else None,
    }


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean."""
    return fam.sample_of(
        module(
            hidden_states=x_BCTHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            timestep=level_B * fam.TIMESTEPS,
            return_dict=False,
        )
    )


_SANA = next(family for family in sana.FAMILIES if family.name == "sana")
FAMILIES = (
    replace(
        _SANA,
        name="sana_video",
        title="Sana Video",
        detect=fam.Detection(SANA_VIDEO, fam.having(in_channels=16, patch_time=1, patch_size=2), ""),
        build=replace(
            _SANA.build,
            module="SanaVideoTransformer3DModel",
            config=config,
            convert=fam.LayoutNames(
                "sana_video",
                without=("y_embedder.y_embedding", "pos_embed", "logvar_linear."),
                converter=_NAMES.convert,
            ),
            forward=forward,
        ),
        text=fam.TextInputs(tuple(replace(each, template=_INSTRUCTION) for each in _SANA.text.readings)),
        latent="wan21",
        sampling=replace(
            _SANA.sampling,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=8.0),
            video=fam.VideoFacts(frames=81, multiple=4, rate=16.0),
            defaults=fam.defaults_like(_SANA.sampling, steps=50, cfg=6.0),
        ),
        size=(832, 480),
        sources="diffusers' SanaVideoPipeline and convert_sana_video_to_diffusers.py; "
        "Efficient-Large-Model/SANA-Video_2B_480p",
        folder=replace(_SANA.folder, pipeline="SanaVideoPipeline"),
    ),
)
