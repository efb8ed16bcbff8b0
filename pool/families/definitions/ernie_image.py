"""Ernie Image: one stream of patches and words, in Flux 2's latents, with the texts of Ministral 3. Torch-free.

The pipeline can have a language model rewrite prompts; here they are read as they are. Ernie Image Turbo has the same
tensors: it is run with 8 steps and without guidance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

_PATCHES, _WORDS = "x_embedder.proj.weight", "text_proj.weight"
#: single files have the names of diffusers
LAYOUT = fam.Layout(
    "Ernie Image",
    (
        fam.published(
            "layers.0.mlp.linear_fc2.weight",
            "adaLN_modulation.1.weight",
            measure=fam.sizes(
                in_channels=fam.dim(_PATCHES, 1, 4),
                patch_size=fam.dim(_PATCHES, 2, 4),
                hidden_size=fam.dim(_PATCHES, 0, 4),
                depth=fam.count("layers."),
                num_heads=fam.heads((_PATCHES, 0, 4), "layers.0.self_attention.norm_q.weight"),
                inner_size=fam.dim("layers.0.mlp.linear_fc2.weight", 1),
                # texts as wide as the model are not projected
                context_dim=fam.maybe(_WORDS, 1),
            ),
        ),
    ),
)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.ErnieImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    hidden, patch = sizes["hidden_size"], sizes["patch_size"]
    return {
        "hidden_size": hidden,
        "num_attention_heads": sizes["num_heads"],
        "num_layers": sizes["depth"],
        "ffn_hidden_size": sizes["inner_size"],
        "in_channels": sizes["in_channels"],
        "out_channels": shapes["final_linear.weight"][0] // patch**2,
        "patch_size": patch,
        "text_in_dim": sizes["context_dim"] or hidden,
        "rope_axes_dim": fam.rope_quarters(hidden // sizes["num_heads"]),
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Patches have the number of words as the first coordinate of their positions."""
    return fam.sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * fam.TIMESTEPS,
            text_bth=kwargs["context"],
            text_lens=text_mask(kwargs, "context").sum(dim=1),
            return_dict=False,
        )
    )


FAMILIES = (
    fam.Family(
        name="ernie_image",
        title="Ernie Image",
        detect=fam.Detection(LAYOUT, fam.anything, "ErnieImage"),
        build=fam.ModelBuild(
            "ErnieImageTransformer2DModel",
            config,
            fam.unchanged(),
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "ministral3_3b",
                    3072,
                    is_masked=True,
                    layers_left_out=1,
                    final_norm=False,
                    padding=fam.Padding.DROPPED,
                ),
            )
        ),
        latent="flux2",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=4.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.ERNIE_IMAGE,
        ),
        sources="diffusers' ErnieImagePipeline; the shift is that of ComfyUI's class",
        folder=fam.DiffusersFolder("ErnieImagePipeline", entries={"pe": fam.NOTHING, "pe_tokenizer": fam.NOTHING}),
        lora=fam.TRANSFORMER,
    ),
)
