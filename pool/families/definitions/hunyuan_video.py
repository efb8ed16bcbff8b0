"""HunyuanVideo: text-to-video, image-to-video by an image in its text and latents, and SkyReels. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from modelpool.pool.families.detection.layouts.flux_layouts import HUNYUAN_VIDEO
from modelpool.pool.families.parts import hunyuan, sequence_plans
from modelpool.pool.families.parts import vocabulary as fam
from modelpool.pool.families.parts.patches import text_mask
from modelpool.pool.families.parts.video_calls import joined

if TYPE_CHECKING:
    from torch import Tensor, nn

_ASPECTS = (
    "1. The main content and theme of the video."
    "2. The color, shape, size, texture, quantity, text, and spatial relationships of the objects."
    "3. Actions, events, behaviors temporal relationships, physical movement changes of the objects."
    "4. background environment, light, style and atmosphere."
    "5. camera angles, movements, and transitions used in the video:<|eot_id|>"
)
_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\nDescribe the video by detailing the following aspects: "
    f"{_ASPECTS}"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
)
#: tokens of that template before the prompt, including the begin token
_BEFORE = 95
#: the same, with an image
_I2V_TEMPLATE = (
    "<|start_header_id|>system<|end_header_id|>\n\n<image>\nDescribe the video by detailing the following aspects "
    "according to the reference image: "
    f"{_ASPECTS}\n\n"
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_I2V_BEFORE = 103
_TOKENS = 256
_CLIP = fam.Reading("clip_l", 768, pooled=fam.Pooled.PLAIN, reads_states=False)
#: ComfyUI does not pad
_LLAMA = fam.fixed_length(
    "llama3_8b", _TOKENS + _BEFORE, template=_TEMPLATE, dropped_tokens=_BEFORE, is_masked=True, mask=fam.MaskMode.REAL,
    layers_left_out=2, final_norm=False,
)  # fmt: skip


def config(found: fam.Config, shapes: fam.Shapes) -> fam.Arguments:
    """Return the arguments of `diffusers.HunyuanVideoTransformer3DModel`, for text-to-video and concatenated images."""
    sizes: dict[str, Any] = dict(found)
    images = {"image_condition_type": "latent_concat"} if sizes["in_channels"] == 2 * sizes["out_channels"] + 1 else {}
    return {
        **hunyuan.block_arguments(found, shapes),
        "num_single_layers": sizes["depth_single_blocks"],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "pooled_projection_dim": sizes["vec_in_dim"],
        **images,
    }


def forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean. Latents of an image, and their mask ("image"), are concatenated along channels."""
    guidance = kwargs.get("guidance")
    return fam.sample_of(
        module(
            hidden_states=joined(x_BCTHW, kwargs),
            timestep=level_B * fam.TIMESTEPS,
            encoder_hidden_states=kwargs["context"],
            encoder_attention_mask=text_mask(kwargs, "context").to(kwargs["context"].dtype),
            pooled_projections=kwargs["pooled"],
            # 16 bits cannot represent the exact number
            guidance=None if guidance is None else guidance.float() * fam.TIMESTEPS,
            return_dict=False,
        )
    )


def skyreels_forward(module: nn.Module, x_BCTHW: Tensor, level_B: Tensor, kwargs: fam.ModelKwargs) -> Tensor:
    """Predict noise - clean, as `forward`. The model reads a guidance scale, which its pipeline sets to 1."""
    import torch

    return forward(module, x_BCTHW, level_B, {"guidance": torch.ones_like(level_B), **kwargs})


def _reading(channels: int) -> fam.Condition:
    """Return the condition for a model that reads `channels` channels and pooled texts, which the newer models of this
    layout lack."""
    return lambda found: found.get("in_channels") == channels and found.get("vec_in_dim") is not None


_T2V = fam.Family(
    name="hunyuan_video",
    title="Hunyuan Video",
    detect=fam.Detection(HUNYUAN_VIDEO, fam.anything, "HunyuanVideo"),
    build=fam.ModelBuild(
        "HunyuanVideoTransformer3DModel",
        config,
        fam.LayoutNames("hunyuan_video", cuts=fam.single_block_cuts("img_in.proj.weight"), older=hunyuan.original_key),
        forward,
        dtypes=fam.BFLOAT16_FIRST,
        optional_inputs=frozenset({"context_mask"}),
    ),
    text=fam.TextInputs((_CLIP, _LLAMA), set_name="hunyuan_video"),
    latent="hunyuan_video",
    sampling=fam.SamplingFacts(
        fam.Prediction.FLOW,
        sequence=sequence_plans.HUNYUAN_VIDEO,
        noise=fam.NoiseFacts(fam.NoiseKind.FLOW, shift=7.0),
        reads=frozenset({"context", "pooled", "guidance", "context_mask"}),
        side_multiple=16,
        video=fam.VideoFacts(frames=129, multiple=4, rate=24.0),
        defaults=fam.SamplingDefaults(
            steps=50, cfg=6.0, sampler="euler", schedule="simple", guidance=fam.Guidance.DISTILLED
        ),
    ),
    size=(1280, 720),
    sources="diffusers' HunyuanVideoPipeline",
    folder=fam.DiffusersFolder(
        "HunyuanVideoPipeline",
        # the pipeline has another order than its readings
        text_folders={fam.Role.TEXT_ENCODER: "text_encoder_2", fam.Role.TEXT_ENCODER_2: "text_encoder"},
    ),
    lora=hunyuan.HUNYUAN_LORA,
    options=fam.OptionFacts(
        teacache=(
            fam.TeaCacheFacts((7.33226126e02, -4.01131952e02, 6.75869174e01, -3.14987800e00, 9.61237896e-02), 0.1),
        ),
        skips_blocks=True,
        moves_positions=True,
        takes_windows=True,
    ),
)
_I2V = replace(
    _T2V,
    name="hunyuan_video_i2v",
    title="Hunyuan Video image-to-video",
    detect=replace(_T2V.detect, when=_reading(33), comfyui="HunyuanVideoI2V"),
    text=replace(
        _T2V.text,
        readings=(
            _CLIP,
            # every second image state is passed to the model
            replace(
                _LLAMA,
                template=_I2V_TEMPLATE,
                dropped_tokens=_I2V_BEFORE,
                least_tokens=_TOKENS + _I2V_BEFORE,
                most_tokens=_TOKENS + _I2V_BEFORE,
                image_token="<image>",
                images_every=2,
                last_head="<|end_header_id|>",
            ),
        ),
        set_name="hunyuan_video_i2v",
    ),
    sampling=replace(
        _T2V.sampling,
        reads=frozenset({"context", "pooled", "image", "context_mask"}),
        vision_use=fam.VisionEncoderUse.WORDS,
        video=fam.video_like(_T2V.sampling, frames=125, begins=fam.FirstFrameMode.LEADING_CELL),
        defaults=fam.defaults_like(_T2V.sampling, cfg=1.0, guidance=fam.Guidance.CLASSIFIER_FREE),
    ),
    sources="diffusers' HunyuanVideoImageToVideoPipeline, whose 129 frames include four discarded ones; "
    "concatenated: latents of the image, and their mask",
    folder=replace(_T2V.folder, pipeline="HunyuanVideoImageToVideoPipeline"),
    options=replace(_T2V.options, teacache=(), takes_windows=False),
)
_SKYREELS = replace(
    _T2V,
    name="skyreels_i2v",
    title="SkyReels image-to-video",
    detect=replace(_T2V.detect, when=_reading(32), comfyui="HunyuanVideoSkyreelsI2V"),
    build=replace(_T2V.build, forward=skyreels_forward),
    sampling=replace(
        _T2V.sampling,
        reads=frozenset({"context", "pooled", "image", "context_mask"}),
        video=fam.video_like(_T2V.sampling, frames=97, begins=fam.FirstFrameMode.FIRST_CELL),
        defaults=fam.defaults_like(_T2V.sampling, guidance=fam.Guidance.CLASSIFIER_FREE),
    ),
    size=(960, 544),
    sources="diffusers' HunyuanSkyreelsImageToVideoPipeline; concatenated: latents of the image, zeros after it",
    folder=replace(_T2V.folder, pipeline="HunyuanSkyreelsImageToVideoPipeline"),
    options=replace(_T2V.options, teacache=(), takes_windows=False),
)

FAMILIES = (_SKYREELS, _I2V, _T2V)
