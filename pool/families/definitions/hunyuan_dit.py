"""HunyuanDiT: diffusion over timesteps, with the texts of a BERT and of T5-XL. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.hunyuan_dit_inputs import TOKENS, module_kwargs

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the two sources have the same names for different norms, so each has separate prefixes
_LORA = fam.LoraNaming(
    (
        *fam.CHECKPOINT_KEYS,
        *fam.dotted(fam.NameSource.CHECKPOINT, "base_model.model.", ""),
        *fam.joined_names(fam.NameSource.CHECKPOINT, "lycoris_"),
        *fam.dotted(fam.NameSource.DIFFUSERS, "transformer."),
        *fam.joined_names(fam.NameSource.DIFFUSERS, "lora_transformer_"),
    )
)

_LAYOUT = fam.Layout(
    "HunyuanDiT",
    (
        fam.published(
            "mlp_t5.0.weight",
            measure=fam.sizes(
                in_channels=fam.dim("x_embedder.proj.weight", 1, 4),
                hidden_size=fam.dim("x_embedder.proj.weight", 0, 4),
                depth=fam.count("blocks."),
                num_heads=fam.heads(("x_embedder.proj.weight", 0, 4), "blocks.0.attn1.q_norm.weight"),
                extra_in=fam.dim("extra_embedder.0.weight", 1),
            ),
        ),
        fam.diffusers(
            "time_extra_emb.pooler.positional_embedding",
            "pos_embed.proj.weight",
            measure=fam.sizes(
                in_channels=fam.dim("pos_embed.proj.weight", 1, 4),
                hidden_size=fam.dim("pos_embed.proj.weight", 0, 4),
                depth=fam.count("blocks."),
                num_heads=fam.heads(("pos_embed.proj.weight", 0, 4), "blocks.0.attn1.norm_q.weight"),
                extra_in=fam.dim("time_extra_emb.extra_embedder.linear_1.weight", 1),
            ),
        ),
    ),
)
#: its names in the original and in diffusers
_NAMES = fam.LayoutTable(
    outer=(
        ("text_embedding_padding", "text_embedding_padding"),
        ("mlp_t5.0.", "text_embedder.linear_1."),
        ("mlp_t5.2.", "text_embedder.linear_2."),
        ("x_embedder.proj.", "pos_embed.proj."),
        ("t_embedder.mlp.0.", "time_extra_emb.timestep_embedder.linear_1."),
        ("t_embedder.mlp.2.", "time_extra_emb.timestep_embedder.linear_2."),
        ("pooler.", "time_extra_emb.pooler."),
        ("style_embedder.", "time_extra_emb.style_embedder."),
        ("extra_embedder.0.", "time_extra_emb.extra_embedder.linear_1."),
        ("extra_embedder.2.", "time_extra_emb.extra_embedder.linear_2."),
        ("final_layer.adaLN_modulation.1.", "norm_out.linear."),
        ("final_layer.linear.", "proj_out."),
    ),
    swapped=("final_layer.adaLN_modulation.1.",),
    blocks="blocks",
    block={
        "norm1": ("norm1.norm",),
        "default_modulation.1": ("norm1.linear",),
        # the original numbers the norms in the order of their creation, diffusers in the order of their use
        "norm2": ("norm3",),
        "norm3": ("norm2",),
        "attn1.Wqkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "attn1.q_norm": ("attn1.norm_q",),
        "attn1.k_norm": ("attn1.norm_k",),
        "attn1.out_proj": ("attn1.to_out.0",),
        "attn2.q_proj": ("attn2.to_q",),
        "attn2.kv_proj": ("attn2.to_k", "attn2.to_v"),
        "attn2.q_norm": ("attn2.norm_q",),
        "attn2.k_norm": ("attn2.norm_k",),
        "attn2.out_proj": ("attn2.to_out.0",),
        "mlp.fc1": ("ff.net.0.proj",),
        "mlp.fc2": ("ff.net.2",),
    },
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.HunyuanDiT2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden = measured["hidden_size"]
    return {
        "num_attention_heads": measured["num_heads"],
        "attention_head_dim": hidden // measured["num_heads"],
        "in_channels": measured["in_channels"],
        "patch_size": shapes["pos_embed.proj.weight"][2],
        "hidden_size": hidden,
        "num_layers": measured["depth"],
        "mlp_ratio": fam.ratio(shapes["blocks.0.ff.net.2.weight"][1], hidden),
        "learn_sigma": True,
        "cross_attention_dim": shapes["text_embedding_padding"][1],
        "cross_attention_dim_t5": shapes["text_embedder.linear_1.weight"][1],
        "pooled_projection_dim": shapes["time_extra_emb.pooler.c_proj.weight"][0],
        "text_len": TOKENS,
        "text_len_t5": shapes["text_embedding_padding"][0] - TOKENS,
        "use_style_cond_and_image_meta_size": "time_extra_emb.style_embedder.weight" in shapes,
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the velocity; the predicted variance is dropped."""
    extra = module_kwargs(module, x_BCHW, kwargs)
    # it computes in the dtype of the timestep
    out = fam.sample_of(module(x_BCHW, level_B.to(x_BCHW.dtype), **extra, return_dict=False))
    return out[:, : x_BCHW.shape[1]]


_V1_2 = fam.Family(
    name="hunyuan_dit",
    title="HunyuanDiT 1.2",
    detect=fam.Detection(_LAYOUT, fam.anything, "HunyuanDiT"),
    build=fam.ModelBuild(
        "HunyuanDiT2DModel",
        config,
        fam.LayoutNames("hunyuan_dit", converter=_NAMES.convert),
        forward,
        dtypes=fam.HALF_FIRST,
    ),
    text=fam.TextInputs(
        (
            fam.fixed_length("hydit_bert", TOKENS, 1024, is_masked=True, mask=fam.MaskMode.REAL),
            fam.fixed_length("t5xl", 256, 2048, is_masked=True, mask=fam.MaskMode.REAL),
        ),
        set_name="hunyuan_dit",
        # its T5 is a multilingual one
        lora_names={"t5xl": "mt5xl"},
    ),
    latent="sdxl",
    sampling=fam.SamplingFacts(
        fam.Prediction.VELOCITY,
        noise=fam.NoiseFacts(fam.NoiseKind.SCALED_LINEAR, beta_start=0.00085, beta_end=0.018),
        reads=frozenset({"context", "context_mask", "context_2", "context_2_mask"}),
        side_multiple=16,
        defaults=fam.SamplingDefaults(
            steps=50, cfg=5.0, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.HUNYUAN_DIT,
    ),
    sources="diffusers' HunyuanDiTPipeline; Tencent-Hunyuan/HunyuanDiT-v1.2; 77 and 256 tokens, filled up",
    folder=fam.DiffusersFolder(
        "HunyuanDiTPipeline",
        # the default image size of its pipeline, which that uses without a model
        config_entries={"sample_size": 128},
        entries={"safety_checker": fam.NOTHING, "feature_extractor": fam.NOTHING, "requires_safety_checker": False},
    ),
    lora=_LORA,
    options=fam.OptionFacts(controlnets="hunyuan_dit"),
)

FAMILIES = (
    replace(
        _V1_2,
        name="hunyuan_dit_1",
        title="HunyuanDiT 1.0 or 1.1",
        detect=replace(_V1_2.detect, when=fam.having(extra_in=3968), comfyui="HunyuanDiT1"),
        build=replace(_V1_2.build, optional_inputs=frozenset({"size"})),
        sampling=replace(
            _V1_2.sampling,
            noise=fam.NoiseFacts(fam.NoiseKind.SCALED_LINEAR, beta_start=0.00085, beta_end=0.03),
            reads=frozenset({"context", "context_mask", "context_2", "context_2_mask", "size"}),
        ),
        sources="diffusers' HunyuanDiTPipeline; Tencent-Hunyuan/HunyuanDiT-v1.1; 77 and 256 tokens, filled up",
    ),
    _V1_2,
)
