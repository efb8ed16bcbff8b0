"""Z-Image: distilled to few steps, with texts of individual lengths. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.image_layouts import LUMINA_2
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam

if TYPE_CHECKING:
    from torch import Tensor, nn

#: positions in the tables of words and patches. Source: the published configuration
_POSITIONS = [1536, 512, 512]


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.ZImageTransformer2DModel`."""
    sizes: dict[str, Any] = dict(found)
    head = sizes["dim"] // sizes["n_heads"]
    return {
        "in_channels": sizes["in_channels"],
        "dim": sizes["dim"],
        "n_layers": sizes["n_layers"],
        "n_refiner_layers": len(fam.ShapeReader(shapes).numbers("noise_refiner.")),
        "n_heads": sizes["n_heads"],
        "n_kv_heads": sizes["n_kv_heads"],
        "qk_norm": sizes["qk_norm"],
        "cap_feat_dim": sizes["cap_feat_dim"],
        "axes_dims": list(fam.rope_quarters(head)),
        "axes_lens": _POSITIONS,
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Time and output of the module run from noise to image; texts have individual lengths."""
    import torch

    context, mask = kwargs["context"], kwargs.get("context_mask")
    texts = list(context) if mask is None else [text[real] for text, real in zip(context, mask, strict=True)]
    out = module(list(x_BCHW.unsqueeze(2)), 1 - level_B, texts, return_dict=False)[0]
    return -torch.stack(list(out)).squeeze(2)


FAMILIES = (
    fam.Family(
        name="z_image",
        title="Z-Image",
        detect=fam.Detection(LUMINA_2, fam.having(z_image_modulation=True, pixel_space=False), "ZImage"),
        build=fam.ModelBuild(
            "ZImageTransformer2DModel",
            config,
            "z_image",
            forward,
            dtypes=fam.BFLOAT16_FIRST,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "qwen3_4b",
                    2560,
                    fam.QWEN3_CHAT,
                    most_tokens=512,
                    is_masked=True,
                    layers_left_out=1,
                    final_norm=False,
                    padding=fam.Padding.DROPPED,
                ),
            )
        ),
        latent="flux",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            sequence=sequence_plans.Z_IMAGE,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "context_mask"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=8, cfg=1.0, sampler="euler", schedule="simple", guidance=fam.Guidance.NONE
            ),
        ),
        sources="Tongyi-MAI/Z-Image-Turbo, card and scheduler; its base model needs 50 steps and guidance",
        folder=fam.DiffusersFolder("ZImagePipeline"),
        lora=fam.TRANSFORMER,
        options=fam.OptionFacts(controlnets="z_image", skips_blocks=True),
    ),
)
