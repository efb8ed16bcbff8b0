"""AuraFlow: a flow that reads the texts of T5-XL, on the latents of SDXL. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: width of a head, which no tensor tells. Source: the published code
_HEAD = 256

_LAYOUT = fam.Layout(
    "AuraFlow",
    (
        fam.published(
            "double_layers.0.attn.w1q.weight",
            measure=fam.sizes(
                in_channels=fam.dim("init_x_linear.weight", 1, divide=fam.PATCH),
                hidden_size=fam.dim("init_x_linear.weight", 0),
                max_seq=fam.maybe("positional_encoding", 1, 3),
                cond_seq_dim=fam.dim("cond_seq_linear.weight", 1),
                n_double_layers=fam.count("double_layers."),
                n_layers=fam.count("double_layers.", "single_layers."),
            ),
        ),
        fam.diffusers(
            "joint_transformer_blocks.0.attn.add_k_proj.weight",
            measure=fam.sizes(
                in_channels=fam.dim("pos_embed.proj.weight", 1, divide=fam.PATCH),
                hidden_size=fam.dim("pos_embed.proj.weight", 0),
                max_seq=fam.maybe("pos_embed.pos_embed", 1, 3),
                cond_seq_dim=fam.dim("context_embedder.weight", 1),
                n_double_layers=fam.count("joint_transformer_blocks."),
                n_layers=fam.count("joint_transformer_blocks.", "single_transformer_blocks."),
            ),
        ),
    ),
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.AuraFlowTransformer2DModel`."""
    measured: dict[str, Any] = dict(found)
    hidden = measured["hidden_size"]
    head = min(hidden, _HEAD)
    return {
        "in_channels": measured["in_channels"],
        "out_channels": shapes["proj_out.weight"][0] // fam.PATCH,
        "num_mmdit_layers": measured["n_double_layers"],
        "num_single_dit_layers": measured["n_layers"] - measured["n_double_layers"],
        "attention_head_dim": head,
        "num_attention_heads": hidden // head,
        "joint_attention_dim": measured["cond_seq_dim"],
        "caption_projection_dim": hidden,
        "pos_embed_max_size": measured["max_seq"],
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. States of padding are zeros."""
    context, mask = kwargs["context"], kwargs.get("context_mask")
    return fam.sample_of(
        module(
            hidden_states=x_BCHW,
            encoder_hidden_states=context if mask is None else context * mask[..., None],
            timestep=level_B,
            return_dict=False,
        )
    )


FAMILIES = (
    fam.Family(
        name="auraflow",
        title="AuraFlow",
        detect=fam.Detection(_LAYOUT, fam.anything, "AuraFlow"),
        build=fam.ModelBuild(
            "AuraFlowTransformer2DModel",
            config,
            "auraflow",
            forward,
            dtypes=fam.HALF_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (fam.fixed_length("t5xl", 256, 2048, is_masked=True, padding=fam.Padding.ZEROED),), set_name="aura_flow"
        ),
        latent="sdxl",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=1.73),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=3.5, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.AURAFLOW,
        ),
        sources="diffusers' AuraFlowPipeline; fal/AuraFlow-v0.3",
        folder=fam.DiffusersFolder("AuraFlowPipeline"),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(skips_blocks=True),
    ),
)
