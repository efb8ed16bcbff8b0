"""Ernie Image: one stream of patches and words, in Flux 2's latents, with the texts of Ministral 3. Torch-free.

The pipeline can have a language model rewrite prompts; here they are read as they are. Ernie Image Turbo has the same
tensors: it is run with 8 steps and without guidance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.parts.patches import text_mask
from modelpool.pool.families.parts.vocabulary import (
    NO_FLOAT16,
    NOTHING,
    TIMESTEPS,
    TRANSFORMER,
    Arguments,
    Config,
    Detection,
    DiffusersFolder,
    Family,
    Guidance,
    Layout,
    ModelBuild,
    ModelKwargs,
    NoiseFacts,
    NoiseKind,
    Padding,
    Prediction,
    Reading,
    SamplingDefaults,
    SamplingFacts,
    Shapes,
    TextInputs,
    anything,
    count,
    dim,
    heads,
    maybe,
    published,
    rope_quarters,
    sample_of,
    sizes,
    unchanged,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

_PATCHES, _WORDS = "x_embedder.proj.weight", "text_proj.weight"
#: single files have the names of diffusers
LAYOUT = Layout(
    "Ernie Image",
    (
        published(
            "layers.0.mlp.linear_fc2.weight",
            "adaLN_modulation.1.weight",
            measure=sizes(
                in_channels=dim(_PATCHES, 1, 4),
                patch_size=dim(_PATCHES, 2, 4),
                hidden_size=dim(_PATCHES, 0, 4),
                depth=count("layers."),
                num_heads=heads((_PATCHES, 0, 4), "layers.0.self_attention.norm_q.weight"),
                inner_size=dim("layers.0.mlp.linear_fc2.weight", 1),
                # texts as wide as the model are not projected
                context_dim=maybe(_WORDS, 1),
            ),
        ),
    ),
)


def config(found: Config, shapes: Shapes) -> Arguments:
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
        "rope_axes_dim": rope_quarters(hidden // sizes["num_heads"]),
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Predict noise - clean. Patches have the number of words as the first coordinate of their positions."""
    return sample_of(
        module(
            hidden_states=x_BCHW,
            timestep=level_B * TIMESTEPS,
            text_bth=kwargs["context"],
            text_lens=text_mask(kwargs, "context").sum(dim=1),
            return_dict=False,
        )
    )


FAMILIES = (
    Family(
        name="ernie_image",
        title="Ernie Image",
        detect=Detection(LAYOUT, anything, "ErnieImage"),
        build=ModelBuild(
            "ErnieImageTransformer2DModel",
            config,
            unchanged(),
            forward,
            dtypes=NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=TextInputs(
            (
                Reading(
                    "ministral3_3b",
                    3072,
                    is_masked=True,
                    layers_left_out=1,
                    final_norm=False,
                    padding=Padding.DROPPED,
                ),
            )
        ),
        latent="flux2",
        sampling=SamplingFacts(
            Prediction.FLOW,
            noise=NoiseFacts(NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            defaults=SamplingDefaults(
                steps=50, cfg=4.0, sampler="euler", schedule="simple", guidance=Guidance.CLASSIFIER_FREE
            ),
        ),
        sources="diffusers' ErnieImagePipeline; the shift is that of ComfyUI's class",
        folder=DiffusersFolder("ErnieImagePipeline", entries={"pe": NOTHING, "pe_tokenizer": NOTHING}),
        lora=TRANSFORMER,
    ),
)
