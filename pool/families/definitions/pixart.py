"""PixArt alpha and sigma: diffusion over timesteps, with the texts of T5. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import PIXART
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import output_size, text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the same in every published size
_HEADS = 16
#: cells along a side of 1024-pixel images, which models without a position table were trained for
_CELLS = 128
#: tokens of a prompt of alpha and of sigma
_ALPHA_TOKENS, _SIGMA_TOKENS = 120, 300
#: its names in the original and in diffusers
_NAMES = fam.LayoutTable(
    outer=(
        ("x_embedder.proj.", "pos_embed.proj."),
        ("t_embedder.mlp.0.", "adaln_single.emb.timestep_embedder.linear_1."),
        ("t_embedder.mlp.2.", "adaln_single.emb.timestep_embedder.linear_2."),
        ("csize_embedder.mlp.0.", "adaln_single.emb.resolution_embedder.linear_1."),
        ("csize_embedder.mlp.2.", "adaln_single.emb.resolution_embedder.linear_2."),
        ("ar_embedder.mlp.0.", "adaln_single.emb.aspect_ratio_embedder.linear_1."),
        ("ar_embedder.mlp.2.", "adaln_single.emb.aspect_ratio_embedder.linear_2."),
        ("t_block.1.", "adaln_single.linear."),
        ("y_embedder.y_proj.fc1.", "caption_projection.linear_1."),
        ("y_embedder.y_proj.fc2.", "caption_projection.linear_2."),
        ("y_embedder.y_embedding", "caption_projection.y_embedding"),
        ("final_layer.linear.", "proj_out."),
        ("final_layer.scale_shift_table", "scale_shift_table"),
    ),
    swapped=(),
    blocks="transformer_blocks",
    block={
        "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
        "attn.proj": ("attn1.to_out.0",),
        "cross_attn.q_linear": ("attn2.to_q",),
        "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
        "cross_attn.proj": ("attn2.to_out.0",),
        "mlp.fc1": ("ff.net.0.proj",),
        "mlp.fc2": ("ff.net.2",),
    },
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.PixArtTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, patch = sizes["hidden_size"], sizes["patch_size"]
    return {
        "num_attention_heads": _HEADS,
        "attention_head_dim": hidden // _HEADS,
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "num_layers": sizes["depth"],
        "cross_attention_dim": hidden,
        "sample_size": sizes.get("input_size") or _CELLS,
        "patch_size": patch,
        "use_additional_conditions": sizes["micro_condition"],
        "caption_channels": sizes["context_dim"],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the noise; the predicted variance is dropped. Alpha reads the image's size and aspect ratio."""
    conditions: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    if fam.config_of(module).use_additional_conditions:
        size = output_size(x_BCHW, kwargs)
        conditions = {"resolution": size, "aspect_ratio": size[:, :1] / size[:, 1:]}
    out = fam.sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context"),
            timestep=level_B,
            added_cond_kwargs=conditions,
            return_dict=False,
        )
    )
    return out[:, : x_BCHW.shape[1]]


def _reading(tokens: int) -> fam.Reading:
    return fam.fixed_length("t5xxl", tokens, cleaning=fam.Cleaning.LOWERED, is_masked=True, mask=fam.MaskMode.REAL)


_SIGMA = fam.Family(
    name="pixart_sigma",
    title="PixArt sigma",
    detect=fam.Detection(PIXART, fam.anything, "PixArtSigma"),
    build=fam.ModelBuild(
        "PixArtTransformer2DModel",
        config,
        # the embedding of no text was trained; all pipelines read an empty text instead
        fam.LayoutNames("pixart", without=("y_embedder.y_embedding",), converter=_NAMES.convert),
        forward,
        dtypes=fam.HALF_FIRST,
        optional_inputs=frozenset({"context_mask"}),
    ),
    text=fam.TextInputs((_reading(_SIGMA_TOKENS),)),
    latent="sdxl",
    sampling=fam.SamplingFacts(
        fam.Prediction.NOISE,
        noise=fam.NoiseFacts(fam.NoiseKind.LINEAR, beta_start=0.0001, beta_end=0.02),
        reads=frozenset({"context", "context_mask"}),
        side_multiple=16,
        defaults=fam.SamplingDefaults(
            steps=20, cfg=4.5, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
        sequence=sequence_plans.PIXART,
    ),
    sources="diffusers' PixArtSigmaPipeline; PixArt-alpha/PixArt-Sigma-XL-2-1024-MS; prompts of 300 tokens",
    folder=fam.DiffusersFolder("PixArtSigmaPipeline"),
    lora=fam.TRANSFORMER,
    options=fam.OptionFacts(skips_blocks=True),
)
_ALPHA = replace(
    _SIGMA,
    name="pixart_alpha",
    title="PixArt alpha",
    detect=replace(_SIGMA.detect, when=fam.having(micro_condition=True), comfyui="PixArtAlpha"),
    build=replace(_SIGMA.build, optional_inputs=frozenset({"context_mask", "size"})),
    text=replace(_SIGMA.text, readings=(_reading(_ALPHA_TOKENS),), set_name="pixart"),
    latent="sd1",
    sampling=replace(_SIGMA.sampling, reads=frozenset({"context", "context_mask", "size"})),
    sources="diffusers' PixArtAlphaPipeline; PixArt-alpha/PixArt-XL-2-1024-MS; prompts of 120 tokens",
    folder=replace(_SIGMA.folder, pipeline="PixArtAlphaPipeline"),
)

FAMILIES = (
    _ALPHA,
    replace(
        _ALPHA,
        name="pixart_alpha_512",
        title="PixArt alpha of 512 pixels",
        detect=replace(
            _ALPHA.detect,
            # it reads no sizes; its prompts are shorter than sigma's
            when=fam.having(model_max_length=_ALPHA_TOKENS),
            comfyui="PixArtSigma",
        ),
        build=_SIGMA.build,
        sampling=_SIGMA.sampling,
        size=(512, 512),
        sources="PixArt-alpha/PixArt-XL-2-512x512; prompts of 120 tokens",
        folder=replace(_ALPHA.folder, same_as="pixart_sigma"),
    ),
    _SIGMA,
)
