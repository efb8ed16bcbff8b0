"""Ovis-Image: Flux with gated feed-forwards, guided by a negative prompt, without a pooled text. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from modelpool.pool.families.detection.layouts.flux_layouts import FLUX
from modelpool.pool.families.detection.layouts.shape_sizes import Config
from modelpool.pool.families.detection.layouts.signature import having
from modelpool.pool.families.parts import flux_architecture as flux
from modelpool.pool.families.parts.arguments import rope_axes
from modelpool.pool.families.parts.family import (
    BFLOAT16_FIRST,
    DiffusersFolder,
    Family,
    ModelBuild,
    TextInputs,
)
from modelpool.pool.families.parts.forward import Arguments, ModelKwargs, Shapes
from modelpool.pool.families.parts.lora_naming import TRANSFORMER
from modelpool.pool.families.parts.model_facts import image_flow
from modelpool.pool.families.parts.text_reading import Padding, Reading
from modelpool.pool.families.parts.text_templates import QWEN3_WITHOUT_THINKING
from modelpool.pool.values.core.sampling_facts import Guidance, NoiseFacts, NoiseKind, ShiftBySize

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the instruction that the pipeline adds to a prompt, inside of the chat template of its tokenizer
_TEMPLATE = QWEN3_WITHOUT_THINKING.replace(
    "{}",
    "Describe the image by detailing the color, quantity, text, shape, size, texture, spatial relationships of the "
    "objects and background: {}",
)
#: tokens of the template before the prompt
_BEFORE = 28
_TOKENS = 256


def config(found: Config, shapes: Shapes) -> Arguments:
    """The arguments of `diffusers.OvisImageTransformer2DModel`."""
    arguments, head = flux.block_arguments(found, shapes)
    return arguments | {
        "out_channels": shapes["proj_out.weight"][0],
        "axes_dims_rope": rope_axes(head),
    }


def forward(module: nn.Module, x_BCHW: Tensor, level_B: Tensor, kwargs: ModelKwargs) -> Tensor:
    """Predict noise - clean. Words have the positions of a diagonal."""
    return flux.call_with_text_positions(module, x_BCHW, level_B, kwargs, flux.diagonal_ids)


FAMILIES = (
    Family(
        name="ovis_image",
        title="Ovis-Image",
        layout=FLUX,
        when=having(yak_mlp=True),
        comfyui="Flux",
        build=ModelBuild("OvisImageTransformer2DModel", config, flux.names_of_diffusers("timestep_embedder"), forward),
        latent="flux",
        text=TextInputs(
            (
                Reading(
                    "qwen3_2b",
                    2048,
                    _TEMPLATE,
                    dropped_tokens=_BEFORE,
                    least_tokens=_TOKENS + _BEFORE,
                    most_tokens=_TOKENS + _BEFORE,
                    is_masked=True,
                    padding=Padding.ZEROED,
                    chat_template=QWEN3_WITHOUT_THINKING,
                ),
            ),
            set_name="ovis",
        ),
        facts=image_flow(
            NoiseFacts(NoiseKind.FLOW, shift_by_size=ShiftBySize((256, 4096), (0.5, 1.15))),
            Guidance.CLASSIFIER_FREE,
            cfg=5.0,
            steps=50,
            reads=("context",),
            sources="diffusers' OvisImagePipeline; AIDC-AI/Ovis-Image-7B",
        ),
        schedule="simple",
        dtypes=BFLOAT16_FIRST,
        lora=TRANSFORMER,
        folder=DiffusersFolder("OvisImagePipeline"),
    ),
)
