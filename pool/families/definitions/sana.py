"""Sana: linear attention over cells of 32 x 32 pixels, with the texts of Gemma 2 behind an instruction. Torch-free.

Sana 1.5 has the same layout with norms of queries and keys, and the model for 4096 pixels another shift of its noise
levels; in a file, its table of positions determines it, in a folder the scheduler has the shift. Sana Sprint is
distilled from it to one to four steps, and reads the guidance scale: its levels are angles, their tangents the
noise relative to the image. Images have the requested size: the pipeline of diffusers generates the nearest of a table
of sizes, and resizes that, unless `use_resolution_binning` is off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import SANA
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head of the linear attention, in every published size
_HEAD = 32
#: heads of the attention to texts by the width of the model; 20 for other widths
_TEXT_HEADS = {1152: 16}
_MOST_TEXT_HEADS = 20
#: cells along a side of 1024-pixel images, and of 4096-pixel ones
_CELLS, _CELLS_4K = 32, 128
#: scale of the positions by the side of their table, in files; smaller models add none. Source: diffusers'
#: convert_sana_to_diffusers.py
_POSITION_SCALES = {64: 1.0, 128: 2.0}
#: states of a prompt
_TOKENS = 300
#: instruction of the pipeline, which negative prompts do not have
_INSTRUCTION = "\n".join(
    (
        "Given a user prompt, generate an 'Enhanced prompt' that provides detailed visual descriptions suitable for "
        "image generation. Evaluate the level of detail in the user prompt:",
        "- If the prompt is simple, focus on adding specifics about colors, shapes, sizes, textures, and spatial "
        "relationships to create vivid and concrete scenes.",
        "- If the prompt is already detailed, refine and enhance the existing details slightly without "
        "overcomplicating.",
        "Here are examples of how to transform or refine prompts:",
        "- User Prompt: A cat sleeping -> Enhanced: A small, fluffy white cat curled up in a round shape, sleeping "
        "peacefully on a warm sunny windowsill, surrounded by pots of blooming red flowers.",
        "- User Prompt: A busy city street -> Enhanced: A bustling city street scene at dusk, featuring glowing street "
        "lamps, a diverse crowd of people in colorful clothing, and a double-decker bus passing by towering glass "
        "skyscrapers.",
        "Please generate only the enhanced description for the prompt below and avoid including any additional "
        "commentary or evaluations:",
        "User Prompt: {}",
    )
)
#: its names in the original and in diffusers; diffusers' own converter lacks the norms of Sana 1.5
NAMES = fam.LayoutTable(
    outer=(
        ("x_embedder.proj.", "patch_embed.proj."),
        ("t_embedder.mlp.0.", "time_embed.emb.timestep_embedder.linear_1."),
        ("t_embedder.mlp.2.", "time_embed.emb.timestep_embedder.linear_2."),
        ("t_block.1.", "time_embed.linear."),
        ("cfg_embedder.mlp.0.", "time_embed.guidance_embedder.linear_1."),
        ("cfg_embedder.mlp.2.", "time_embed.guidance_embedder.linear_2."),
        ("y_embedder.y_proj.fc1.", "caption_projection.linear_1."),
        ("y_embedder.y_proj.fc2.", "caption_projection.linear_2."),
        ("attention_y_norm.", "caption_norm."),
        ("final_layer.linear.", "proj_out."),
        ("final_layer.scale_shift_table", "scale_shift_table"),
    ),
    swapped=(),
    blocks="transformer_blocks",
    block={
        "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "attn.q_norm": ("attn1.norm_q",),
        "attn.k_norm": ("attn1.norm_k",),
        "attn.proj": ("attn1.to_out.0",),
        "cross_attn.q_linear": ("attn2.to_q",),
        "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
        "cross_attn.q_norm": ("attn2.norm_q",),
        "cross_attn.k_norm": ("attn2.norm_k",),
        "cross_attn.proj": ("attn2.to_out.0",),
        "mlp.inverted_conv.conv": ("ff.conv_inverted",),
        "mlp.depth_conv.conv": ("ff.conv_depth",),
        "mlp.point_conv.conv": ("ff.conv_point",),
    },
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.SanaTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, cells = sizes["hidden_size"], sizes["input_size"] or _CELLS
    text_heads = _TEXT_HEADS.get(hidden, _MOST_TEXT_HEADS)
    block = "transformer_blocks.0."
    return {
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // sizes["patch_size"] ** 2,
        "num_attention_heads": hidden // _HEAD,
        "attention_head_dim": _HEAD,
        "num_layers": sizes["depth"],
        "num_cross_attention_heads": text_heads,
        "cross_attention_head_dim": hidden // text_heads,
        "cross_attention_dim": hidden,
        "caption_channels": sizes["context_dim"],
        "mlp_ratio": fam.ratio(shapes[f"{block}ff.conv_point.weight"][1], hidden),
        "attention_bias": f"{block}attn1.to_q.bias" in shapes,
        "sample_size": cells * sizes["patch_size"],
        "patch_size": sizes["patch_size"],
        "interpolation_scale": _POSITION_SCALES.get(cells),
        "qk_norm": "rms_norm_across_heads" if f"{block}attn1.norm_q.weight" in shapes else None,
        "guidance_embeds": sizes["guidance_embed"],
    }


def convert_sprint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of Sana Sprint: names of its embedding of the noise level are one level shorter."""
    return {key.replace("time_embed.emb.", "time_embed."): value for key, value in NAMES.convert(tensors).items()}


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean; a predicted variance is dropped."""
    out = fam.sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            timestep=level_B * fam.TIMESTEPS * fam.config_of(module).timestep_scale,
            return_dict=False,
        )
    )
    return out[:, : x_BCHW.shape[1]]


def forward_sprint(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The pipeline has the same in terms of angles: its latents are longer by the root of the
    squares of both shares, and its prediction is this flow's, rotated."""
    return fam.sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            guidance=kwargs["guidance"] * fam.config_of(module).guidance_embeds_scale,
            timestep=level_B,
            return_dict=False,
        )
    )


_SANA = (
    fam.Family(
        name="sana",
        title="Sana",
        detect=fam.Detection(SANA, fam.having(guidance_embed=False), ""),
        build=fam.ModelBuild(
            "SanaTransformer2DModel",
            config,
            # the pipeline reads an empty text instead of the embedding of none; positions are computed
            fam.LayoutNames("sana", without=("y_embedder.y_embedding", "pos_embed"), converter=NAMES.convert),
            forward,
            dtypes=fam.BFLOAT16_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "gemma2_2b",
                    2304,
                    _INSTRUCTION,
                    "{}",
                    cleaning=fam.Cleaning.LOWERED,
                    least_tokens=_TOKENS,
                    most_tokens=_TOKENS,
                    keeps_ends=True,
                    is_masked=True,
                    mask=fam.MaskMode.REAL,
                ),
            )
        ),
        latent="sana",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=32,
            defaults=fam.SamplingDefaults(
                steps=20, cfg=4.5, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            not_divided="it convolves over neighbouring tokens",
        ),
        sources="diffusers' SanaPipeline; Efficient-Large-Model/Sana_1600M_1024px_diffusers",
        folder=fam.DiffusersFolder("SanaPipeline", is_multistep=True),
        lora=fam.TRANSFORMER,
    ),
)
(_BASE,) = _SANA
FAMILIES = (
    replace(
        _BASE,
        name="sana_4k",
        title="Sana 4K",
        detect=replace(_BASE.detect, when=fam.having(guidance_embed=False, input_size=_CELLS_4K)),
        text=replace(_BASE.text, set_name="sana"),
        sampling=replace(_BASE.sampling, noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=6.0)),
        size=(32 * _CELLS_4K, 32 * _CELLS_4K),
        sources="NVlabs/Sana, Sana_1600M_img4096_bf16.yaml; diffusers' convert_sana_to_diffusers.py",
    ),
    *_SANA,
    replace(
        _BASE,
        name="sana_sprint",
        title="Sana Sprint",
        detect=replace(_BASE.detect, when=fam.having(guidance_embed=True)),
        build=replace(
            _BASE.build,
            convert=fam.LayoutNames(
                "sana_sprint",
                without=("y_embedder.y_embedding", "pos_embed", "logvar_linear."),
                converter=convert_sprint,
            ),
            forward=forward_sprint,
        ),
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW),
            reads=frozenset({"context", "guidance", "context_mask"}),
            side_multiple=32,
            defaults=fam.SamplingDefaults(
                steps=2, cfg=4.5, sampler="lcm", schedule="scm", guidance=fam.Guidance.DISTILLED
            ),
            not_divided="it convolves over neighbouring tokens",
        ),
        sources="diffusers' SanaSprintPipeline; Efficient-Large-Model/Sana_Sprint_1.6B_1024px_diffusers",
        folder=replace(
            _BASE.folder,
            pipeline="SanaSprintPipeline",
            is_multistep=False,
            scheduler=fam.SchedulerFacts("SCMScheduler", {"prediction_type": "trigflow", "sigma_data": 0.5}),
        ),
    ),
)
