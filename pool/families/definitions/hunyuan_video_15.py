"""HunyuanVideo 1.5, with or without a first frame, and its super-resolution. Torch-free.

The first frame is read by its latent alone: the states of a vision encoder are zeros, as without an image.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import HUNYUAN_VIDEO
from modelpool.pool.families.parts import hunyuan, sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask

if TYPE_CHECKING:
    from torch import Tensor, nn

#: the spaces are part of the published template
_TEMPLATE = (
    "<|im_start|>system\nYou are a helpful assistant. Describe the video by detailing the following aspects:"
    "         1. The main content and theme of the video."
    "         2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "         3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "         4. background environment, light, style and atmosphere."
    "         5. camera angles, movements, and transitions used in the video.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
#: tokens of the template before the prompt
_BEFORE = 108
#: image tokens, also without an image. Source: HunyuanVideo15Pipeline
_IMAGE_TOKENS = 729
#: width of the image states, which only these models of the layout read
_VISION_WIDTH = 1152


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """The arguments of `diffusers.HunyuanVideo15Transformer3DModel`."""
    sizes: dict[str, Any] = dict(found)
    return {
        **hunyuan.block_arguments(found, shapes),
        "text_embed_2_dim": shapes["context_embedder_2.norm.weight"][0],
        "image_embed_dim": sizes["vision_in_dim"],
        "use_meanflow": "time_embed.timestep_embedder_r.linear_1.weight" in shapes,
    }


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Latents and mask of an image ("image") and its states ("image_context") are zeros without
    one."""
    import torch

    context = kwargs["context"]
    arguments = fam.config_of(module)
    more = arguments.in_channels - x_BCTHW.shape[1]
    image = kwargs.get("image", x_BCTHW.new_zeros(1, 1, 1, 1, 1).expand(x_BCTHW.shape[0], more, *x_BCTHW.shape[2:]))
    none = context.new_zeros(context.shape[0], _IMAGE_TOKENS, arguments.image_embed_dim)
    return fam.sample_of(
        module(
            hidden_states=torch.cat((x_BCTHW, image), dim=1),
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=context,
            encoder_attention_mask=text_mask(kwargs, "context"),
            encoder_hidden_states_2=kwargs["context_2"],
            encoder_attention_mask_2=text_mask(kwargs, "context_2"),
            image_embeds=kwargs.get("image_context", none),
            return_dict=False,
        )
    )


_VIDEO = fam.Family(
    name="hunyuan_video_15",
    title="Hunyuan Video 1.5",
    detect=fam.Detection(HUNYUAN_VIDEO, fam.having(vision_in_dim=_VISION_WIDTH), "HunyuanVideo15"),
    build=fam.ModelBuild(
        "HunyuanVideo15Transformer3DModel",
        config,
        fam.LayoutNames(
            "hunyuan_video_15",
            like="hunyuan_video",
            prefixes=(
                *hunyuan.SECOND_TEXT,
                ("time_text_embed.", "time_embed."),
                ("vision_in.proj.0.", "image_embedder.norm_in."),
                ("vision_in.proj.1.", "image_embedder.linear_1."),
                ("vision_in.proj.3.", "image_embedder.linear_2."),
                ("vision_in.proj.4.", "image_embedder.norm_out."),
                ("cond_type_embedding.", "cond_type_embed."),
            ),
        ),
        forward,
        dtypes=fam.BFLOAT16_FIRST,
        optional_inputs=frozenset({"context_mask", "context_2_mask", "image", "image_context"}),
    ),
    text=fam.TextInputs(
        (
            hunyuan.qwen_reading(_TEMPLATE, _BEFORE, fam.Cleaning.NEVER_EMPTY),
            hunyuan.glyph_reading(256, fam.Cleaning.QUOTED_ONCE),
        ),
        set_name="hunyuan_video_15",
        optional=frozenset({"byt5_small_glyph"}),
    ),
    latent="hunyuan_video_15",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        sequence=sequence_plans.HUNYUAN_VIDEO_15,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=7.0),
        reads=frozenset({"context", "context_2", "context_mask", "context_2_mask", "image", "image_context"}),
        side_multiple=16,
        video=fam.VideoFacts(frames=121, multiple=4, rate=24.0, begins=fam.FirstFrameMode.MARKED_CELL),
        defaults=fam.SamplingDefaults(
            steps=50, cfg=6.0, sampler="euler", schedule="simple", guidance=fam.Guidance.CLASSIFIER_FREE
        ),
    ),
    size=(848, 480),
    sources="diffusers' HunyuanVideo15Pipeline and HunyuanVideo15ImageToVideoPipeline, without states of images; its "
    "published guider and its size of 640",
    folder=fam.DiffusersFolder(
        "HunyuanVideo15Pipeline", guiders={"guider": fam.SchedulerFacts("ClassifierFreeGuidance")}
    ),
    lora=hunyuan.HUNYUAN_LORA,
    options=fam.OptionFacts(moves_positions=True),
)
#: requests have no input for the video that it enlarges
_SUPER_RESOLUTION = replace(
    _VIDEO,
    name="hunyuan_video_15_sr",
    title="Hunyuan Video 1.5 super-resolution",
    detect=replace(
        _VIDEO.detect,
        when=fam.having(vision_in_dim=_VISION_WIDTH, in_channels=98),
        comfyui="HunyuanVideo15_SR_Distilled",
    ),
    build=replace(_VIDEO.build, optional_inputs=_VIDEO.build.optional_inputs - {"image"}),
    sampling=replace(
        _VIDEO.sampling,
        sequence=None,
        video=fam.video_like(_VIDEO.sampling, begins=None),
        not_divided="requests have no input for the video that it enlarges",
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=2.0),
    ),
    folder=replace(_VIDEO.folder, pipeline=""),
)

FAMILIES = (_SUPER_RESOLUTION, _VIDEO)
