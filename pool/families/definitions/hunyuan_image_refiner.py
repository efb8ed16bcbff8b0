"""The refiner of Hunyuan Image 2.1: the image to refine, with noise, is concatenated with the latent. Torch-free.

Its autoencoder is HunyuanVideo 1.5's: two cells of the autoencoder are one cell here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.families.definitions import hunyuan_image
from modelpool.pool.families.parts import hunyuan
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.video_calls import joined

if TYPE_CHECKING:
    from torch import Tensor, nn

#: in special tokens of another language model, which Qwen reads as text: the states of as many first tokens are dropped
#: wherever the prompt begins. Source: diffusers' HunyuanImageRefinerPipeline
_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the image by detailing the color, shape, size, texture, "
    "quantity, text, spatial relationships of the objects and background:<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
_BEFORE = 36
#: tokens of a prompt
_TOKENS = 256
#: share of a head that is rotated by the frame
_FRAME_SHARE = 8

(_IMAGE,) = hunyuan_image.FAMILIES


def is_refiner(found: fam.Config) -> bool:
    """Return whether a model with these sizes refines images."""
    is_plain = found["vec_in_dim"] is None and found["vision_in_dim"] is None
    return is_plain and found["patch_size"] == hunyuan_image.REFINER_PATCH


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.HunyuanImageTransformer2DModel`."""
    arguments = hunyuan_image.config(found, shapes)
    head = arguments["attention_head_dim"]
    frame = head // _FRAME_SHARE
    return {**arguments, "rope_axes_dim": (frame, (head - frame) // 2, (head - frame) // 2)}


def forward(module: nn.Module, x: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. An image is one frame."""
    frame = x.unsqueeze(2) if x.dim() == 4 else x
    both = joined(frame, {"image": kwargs["image"].reshape(frame.shape)})
    return hunyuan_image.forward(module, both, level_B, kwargs).reshape(x.shape)


FAMILIES = (
    replace(
        _IMAGE,
        name="hunyuan_image_21_refiner",
        title="Hunyuan Image 2.1 refiner",
        detect=replace(_IMAGE.detect, when=is_refiner, comfyui="HunyuanImage21Refiner"),
        build=replace(
            _IMAGE.build,
            config=config,
            forward=forward,
            dtypes=fam.NO_FLOAT16,
            optional_inputs=frozenset({"context_mask"}),
        ),
        text=replace(
            _IMAGE.text,
            readings=(
                replace(
                    hunyuan.qwen_reading(_TEMPLATE, _BEFORE),
                    least_tokens=_TOKENS + _BEFORE,
                    most_tokens=_TOKENS + _BEFORE,
                ),
            ),
            set_name="hunyuan_image_refiner",
            optional=frozenset(),
        ),
        latent="hunyuan_image_refiner",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=4.0),
            reads=frozenset({"context", "image", "guidance", "context_mask"}),
            side_multiple=32,
            image_concat=fam.ImageConcat.NOISED_LATENT,
            defaults=fam.SamplingDefaults(
                steps=4, cfg=3.25, sampler="euler", schedule="simple", guidance=fam.Guidance.DISTILLED
            ),
            not_divided="it sharpens an image of the base model, as a second stage",
        ),
        sources="diffusers' HunyuanImageRefinerPipeline; shift of ComfyUI's class",
        folder=replace(
            _IMAGE.folder, pipeline="HunyuanImageRefinerPipeline", entries={"guider": fam.NOTHING}, guiders={}
        ),
    ),
)
