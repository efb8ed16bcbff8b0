"""CogView 3+: diffusion over timesteps to pure noise, with the texts of T5. Torch-free.

Its tensors have the names and the layout of CogView 4. An empty negative prompt is all zeros, as one that is left out
in the pipeline; an empty prompt is too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelpool.pool.families.definitions import cogvideox, cogview4
from modelpool.pool.families.detection.layouts.image_layouts import COGVIEW
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import output_size

if TYPE_CHECKING:
    from torch import Tensor, nn

_TOKENS = 224
#: factor of the variances of the noise, and the level of pure noise
_SHIFT, _PURE_NOISE = 4.0, 1e5


def is_version_3(found: fam.Config) -> bool:
    """Return whether a model with these sizes is a CogView 3+."""
    return cogview4.is_older(found) and found["in_channels"] == cogview4.CHANNELS


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.CogView3PlusTransformer2DModel`."""
    arguments = cogview4.config(found, shapes)
    hidden = arguments["attention_head_dim"] * arguments["num_attention_heads"]
    head = cogview4.OLDER_HEAD
    return {**arguments, "attention_head_dim": head, "num_attention_heads": hidden // head}


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict the velocity."""
    return cogview4.call(module, x_BCHW, level_B, kwargs["context"], output_size(x_BCHW, kwargs))


FAMILIES = (
    fam.Family(
        name="cogview3_plus",
        title="CogView 3+",
        detect=fam.Detection(COGVIEW, is_version_3, ""),
        build=fam.ModelBuild(
            "CogView3PlusTransformer2DModel",
            config,
            fam.unchanged("patch_embed.pos_embed"),
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"size"}),
        ),
        text=fam.TextInputs((fam.fixed_length("t5xxl", _TOKENS, is_optional=True),)),
        latent="cogview4",
        sampling=fam.SamplingFacts(
            fam.Prediction.VELOCITY,
            noise=fam.NoiseFacts(fam.NoiseKind.ZERO_TERMINAL, sigma_max=_PURE_NOISE, shift=_SHIFT),
            reads=frozenset({"context", "size"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=5.0, sampler="euler", schedule="trailing", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.COGVIEW3_PLUS,
        ),
        sources="diffusers' CogView3PlusPipeline; THUDM/CogView3-Plus-3B",
        folder=fam.DiffusersFolder(
            "CogView3PlusPipeline",
            scheduler=cogvideox.scheduler(_SHIFT),
        ),
        lora=fam.TRANSFORMER,
    ),
)
