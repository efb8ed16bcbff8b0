"""Kandinsky 5 for video: the architecture of its image model, over frames, with a mask of a given first frame, which
takes the place of the latent there. Torch-free.

Models of longer videos were trained with sparse attention ("nabla"), which is a selection of the attention that this
project computes: all of it. Sources: diffusers' Kandinsky5T2VPipeline and Kandinsky5I2VPipeline, and
kandinskylab/Kandinsky-5.0-T2V-Lite-sft-5s. The latter pipeline also moves mean and deviation of the first cells towards
those after them; here that is operation `latent_normalize_start`, which a workflow may have.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from modelpool.pool.families.definitions import kandinsky5_image
from modelpool.pool.families.parts import sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import one_length_at_a_time
from modelpool.pool.families.parts.video_calls import towards_image, with_image

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Kandinsky 6 has almost the same
TEMPLATE = "\n".join(
    (
        "<|im_start|>system\nYou are a prompt engineer. Describe the video in detail.",
        "Describe how the camera moves or shakes, describe the zoom and view angle, whether it follows the objects.",
        "Describe the location of the video, main characters or objects and their action.",
        "Describe the dynamism of the video and presented actions.",
        "Name the visual style of the video: whether it is a professional footage, user generated content, some kind "
        "of animation, video game or scren content.",
        "Describe the visual effects, postprocessing and transitions if they are presented in the video.",
        "Pay attention to the order of key actions shown in the scene.<|im_end|>",
        "<|im_start|>user\n{}<|im_end|>",
    )
)
#: tokens of the template before the prompt
_BEFORE = 128
_TOKENS = 512
#: pixels of a cell
_CELL = 8
#: sides in pixels between which a video is of the smaller training size, and the scale of positions of each size.
#: Source: `_get_scale_factor` of the pipeline
_SMALL_SIDES = (480, 854)
_SMALL_SCALE, _LARGE_SCALE = (1.0, 2.0, 2.0), (1.0, 3.16, 3.16)
#: timestep of sigma 1
_TIMESTEPS = 1000

(_IMAGE,) = kandinsky5_image.FAMILIES


def is_for_video(found: fam.Config) -> bool:
    """Return whether a model with these sizes makes videos."""
    return not kandinsky5_image.is_for_images(found)


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.Kandinsky5Transformer3DModel`: models that read a given frame and its mask
    have twice the channels, and one more."""
    arguments = kandinsky5_image.config(found, shapes)
    channels, read = arguments["out_visual_dim"], arguments["in_visual_dim"]
    return {**arguments, "in_visual_dim": channels, "visual_cond": read == 2 * channels + 1}


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. A given first frame ("image") is read in the place of the latent, and marked. The model
    has no mask of texts: texts of different lengths run one after the other."""
    import torch

    shown_BCTHW = with_image(x_BCTHW, kwargs)
    if fam.config_of(module).visual_cond:
        marks = kwargs.get("image_mask")
        marks = x_BCTHW.new_zeros((len(x_BCTHW), 1, *x_BCTHW.shape[2:])) if marks is None else marks.to(x_BCTHW.dtype)
        shown_BCTHW = torch.cat((shown_BCTHW, torch.zeros_like(x_BCTHW), marks), dim=1)
    predicted = one_length_at_a_time(_forward_one_length, module, shown_BCTHW, level_B, kwargs)
    return towards_image(predicted, x_BCTHW, level_B, kwargs)


def _forward_one_length(
    module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, context_BLD: Tensor, pooled_BV: Tensor
) -> Tensor:
    import torch

    x_BTHWC = x_BCTHW.movedim(1, -1)
    _, frames, rows, columns, _ = x_BTHWC.shape
    is_small = all(_SMALL_SIDES[0] <= side * _CELL <= _SMALL_SIDES[1] for side in (rows, columns))
    out_BTHWC = fam.sample_of(
        (
            module(
                hidden_states=x_BTHWC,
                encoder_hidden_states=context_BLD,
                timestep=level_B * _TIMESTEPS,
                pooled_projections=pooled_BV,
                visual_rope_pos=[torch.arange(n, device=x_BCTHW.device) for n in (frames, rows // 2, columns // 2)],
                text_rope_pos=torch.arange(context_BLD.shape[1], device=x_BCTHW.device),
                scale_factor=_SMALL_SCALE if is_small else _LARGE_SCALE,
                return_dict=False,
            ),
        )
    )
    return out_BTHWC.movedim(-1, 1)


def _reading(image: fam.Reading) -> fam.Reading:
    """Return how the language model is read: as for images, with another template."""
    return replace(image, template=TEMPLATE, dropped_tokens=_BEFORE, most_tokens=_TOKENS + _BEFORE)


FAMILIES = (
    replace(
        _IMAGE,
        name="kandinsky5_video",
        title="Kandinsky 5 video",
        detect=replace(_IMAGE.detect, when=is_for_video, comfyui="Kandinsky5"),
        build=replace(
            _IMAGE.build,
            config=config,
            forward=forward,
            optional_inputs=_IMAGE.build.optional_inputs | {"image", "image_mask"},
        ),
        text=replace(
            _IMAGE.text, readings=(_IMAGE.text.readings[0], _reading(_IMAGE.text.readings[1])), set_name="kandinsky5"
        ),
        latent="hunyuan_video",
        sampling=fam.SamplingFacts(
            fam.Prediction.FLOW,
            noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=10.0),
            reads=frozenset({"context", "pooled", "context_mask", "image", "image_mask"}),
            side_multiple=16,
            video=fam.VideoFacts(frames=121, multiple=4, rate=24.0, begins=fam.FirstFrameMode.KEPT),
            defaults=fam.SamplingDefaults(
                steps=50, cfg=5.0, sampler="euler", schedule="normal", guidance=fam.Guidance.CLASSIFIER_FREE
            ),
            sequence=sequence_plans.KANDINSKY5,
        ),
        size=(768, 512),
        sources="diffusers' Kandinsky5T2VPipeline and Kandinsky5I2VPipeline; the shift is that of ComfyUI",
        folder=replace(_IMAGE.folder, pipeline="Kandinsky5T2VPipeline"),
    ),
)
