"""Kandinsky 5 for images: patches attend to text states; time and a pooled text modulate the blocks. Torch-free.

Source: diffusers' Kandinsky5T2IPipeline and kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.video_layouts import KANDINSKY_5
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import one_length_at_a_time

if TYPE_CHECKING:
    from torch import Tensor, nn

_TEMPLATE = (
    "<|im_start|>system\nYou are a prompt engineer. Describe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>"
)
#: tokens of the template before the prompt
_BEFORE = 40
_TOKENS = 512
#: values of a patch of 2x2 cells, per latent channel
_PATCH = 4
#: channels times `_PATCH`; models for video also read a frame and its mask
_IMAGE_PATCH = 64
#: widths of the published models for video
_VIDEO_WIDTHS = (1792, 4096)
#: timestep of sigma 1
_TIMESTEPS = 1000


def is_for_images(found: fam.Config) -> bool:
    """Return whether a model with these sizes makes images: it reads latents alone, and is none of those for video."""
    return found.get("visual_embed_dim") == _IMAGE_PATCH and found.get("model_dim") not in _VIDEO_WIDTHS


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.Kandinsky5Transformer3DModel`. A quarter of a head is rotated by the frame, the rest
    by row and column, as in the published configurations (16, 24 and 24 of 64)."""
    sizes: dict[str, Any] = dict(found)
    head = shapes["visual_transformer_blocks.0.cross_attention.key_norm.weight"][0]
    return {
        "in_visual_dim": sizes["visual_embed_dim"] // _PATCH,
        "in_text_dim": sizes["context_dim"],
        "in_text_dim2": shapes["pooled_text_embeddings.in_layer.weight"][1],
        "time_dim": sizes["time_dim"],
        "out_visual_dim": shapes["out_layer.out_layer.weight"][0] // _PATCH,
        "model_dim": sizes["model_dim"],
        "ff_dim": sizes["ff_dim"],
        "num_text_blocks": sizes["num_text_blocks"],
        "num_visual_blocks": sizes["num_visual_blocks"],
        "axes_dims": (head // 4, head * 3 // 8, head * 3 // 8),
        "visual_cond": False,
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. The model has no mask: texts of different lengths run one after the other."""
    return one_length_at_a_time(_forward_one_length, module, x_BCHW, level_B, kwargs)


def _forward_one_length(
    module: nn.Module, x_BCHW: Tensor, level_B: Tensor, context_BLD: Tensor, pooled_BV: Tensor
) -> Tensor:
    import torch

    lengths = (1, x_BCHW.shape[2] // 2, x_BCHW.shape[3] // 2)
    out_B1HWC = fam.sample_of(
        (
            module(
                hidden_states=x_BCHW.movedim(1, -1)[:, None],
                encoder_hidden_states=context_BLD,
                timestep=level_B * _TIMESTEPS,
                pooled_projections=pooled_BV,
                visual_rope_pos=[torch.arange(length, device=x_BCHW.device) for length in lengths],
                text_rope_pos=torch.arange(context_BLD.shape[1], device=x_BCHW.device),
                return_dict=False,
            ),
        )
    )
    return out_B1HWC[:, 0].movedim(-1, 1)


FAMILIES = (
    fam.Family(
        name="kandinsky5_image",
        title="Kandinsky 5 images",
        detect=fam.Detection(KANDINSKY_5, is_for_images, "Kandinsky5Image"),
        build=fam.ModelBuild(
            "Kandinsky5Transformer3DModel",
            config,
            fam.unchanged(),
            forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=fam.TextInputs(
            (
                fam.Reading(
                    "clip_l", 768, cleaning=fam.Cleaning.UNESCAPED, pooled=fam.Pooled.PLAIN, reads_states=False
                ),
                fam.Reading(
                    "qwen25_7b",
                    3584,
                    _TEMPLATE,
                    cleaning=fam.Cleaning.UNESCAPED,
                    dropped_tokens=_BEFORE,
                    most_tokens=_TOKENS + _BEFORE,
                    is_masked=True,
                    padding=fam.Padding.DROPPED,
                ),
            )
        ),
        latent="flux",
        # the pipeline only scales the latents of Flux's VAE; ComfyUI also shifts them
        shifts_latent=False,
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=3.0),
            reads=frozenset({"context", "pooled", "context_mask"}),
            side_multiple=16,
            defaults=fam.SamplingDefaults(
                steps=50, cfg=3.5, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.KANDINSKY5,
        ),
        sources="diffusers' Kandinsky5T2IPipeline; the shift is that of ComfyUI",
        folder=fam.DiffusersFolder(
            "Kandinsky5T2IPipeline",
            text_folders={fam.Role.TEXT_ENCODER: "text_encoder_2", fam.Role.TEXT_ENCODER_2: "text_encoder"},
        ),
        lora=fam.GENERIC,
    ),
)
