"""Sampling facts of the video transformer families. Torch-free; see `facts`.

Unless `sources` states otherwise: shifts and noise are those of ComfyUI's classes (compared with golden data by the
tests); sizes, steps and guidance scales are the defaults of diffusers' pipelines and of the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.core.sampling_facts import (
    FirstFrameMode,
    LastFrameMode,
    NoiseFacts,
    NoiseKind,
    Prediction,
    VisionEncoderUse,
)
from modelpool.pool.families.parts.model_facts import Guidance, Level, ModelFacts


def _flow(shift: float) -> NoiseFacts:
    return NoiseFacts(NoiseKind.FLOW, shift=shift)


_WAN = ModelFacts(
    prediction=Prediction.FLOW,
    noise=_flow(8.0),
    level=Level.SHARE,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=5.0,
    steps=50,
    width=832,
    height=480,
    frames=81,
    side_multiple=16,
    frame_multiple=4,
    frame_rate=16.0,
    reads=("context",),
    may_read=("context_mask",),
    sources="diffusers' WanPipeline; Wan-Video/Wan2.1 has a shift of 3 at 480 lines and of 5 at 720",
)
_WAN_FUN = replace(_WAN, reads=("context", "image"), may_read=("context_mask", "image_context"))
_WAN_I2V = replace(
    _WAN,
    reads=("context", "image", "image_context"),
    begins=FirstFrameMode.CONCATENATED,
    vision_use=VisionEncoderUse.PENULTIMATE,
    sources="diffusers' WanImageToVideoPipeline; Wan-Video/Wan2.1 has a shift of 3 at 480 lines and of 5 at 720",
)
#: the two experts of Wan 2.2 14B text-to-video; no shape tells it from Wan 2.1
WAN_22_T2V = replace(
    _WAN,
    noise=_flow(12.0),
    cfg=4.0,
    steps=40,
    boundary=0.875,
    low_cfg=3.0,
    sources="Wan-Video/Wan2.2, wan_t2v_A14B: scale 4 above the boundary and 3 below; ComfyUI has a shift of 8",
)
_WAN_22_I2V = replace(
    _WAN,
    noise=_flow(5.0),
    cfg=3.5,
    steps=40,
    boundary=0.9,
    low_cfg=3.5,
    reads=("context", "image"),
    begins=FirstFrameMode.CONCATENATED,
    ends=LastFrameMode.MAY,
    sources="Wan-Video/Wan2.2, wan_i2v_A14B; ComfyUI has a shift of 8",
)
_WAN_22_5B = replace(
    _WAN,
    noise=_flow(5.0),
    width=1280,
    height=704,
    frames=121,
    side_multiple=32,
    frame_rate=24.0,
    may_read=("context_mask", "image", "image_mask"),
    begins=FirstFrameMode.KEPT,
    sources="Wan-Video/Wan2.2, wan_ti2v_5B; ComfyUI has a shift of 8",
)

_HUNYUAN = ModelFacts(
    prediction=Prediction.FLOW,
    noise=_flow(7.0),
    level=Level.SHARE,
    guidance=Guidance.DISTILLED,
    cfg=6.0,
    steps=50,
    width=1280,
    height=720,
    frames=129,
    side_multiple=16,
    frame_multiple=4,
    frame_rate=24.0,
    reads=("context", "pooled", "guidance"),
    may_read=("context_mask",),
    sources="diffusers' HunyuanVideoPipeline",
)
_HUNYUAN_I2V = replace(
    _HUNYUAN,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=1.0,
    frames=125,
    reads=("context", "pooled", "image"),
    begins=FirstFrameMode.LEADING_CELL,
    vision_use=VisionEncoderUse.WORDS,
    sources="diffusers' HunyuanVideoImageToVideoPipeline, whose 129 frames include four discarded ones; concatenated: "
    "latents of the image, and their mask",
)
_SKYREELS = replace(
    _HUNYUAN_I2V,
    width=960,
    height=544,
    frames=97,
    cfg=6.0,
    begins=None,
    vision_use=None,
    reads=("context", "pooled", "guidance", "image"),
    may_read=("context_mask",),
    sources="diffusers' HunyuanSkyreelsImageToVideoPipeline, which passes a guidance of 1; concatenated: latents of "
    "the image, zeros after it",
)
_HUNYUAN_15 = replace(
    _HUNYUAN,
    guidance=Guidance.CLASSIFIER_FREE,
    width=848,
    height=480,
    frames=121,
    reads=("context", "context_2"),
    may_read=("context_mask", "context_2_mask", "image", "image_context"),
    sources="diffusers' HunyuanVideo15Pipeline, its published guider and its size of 640",
)

_COSMOS = ModelFacts(
    prediction=Prediction.EDM,
    noise=NoiseFacts(NoiseKind.EDM, sigma_min=0.002, sigma_max=80.0, sigma_data=0.5),
    level=Level.LOGARITHM,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=7.0,
    steps=36,
    width=1280,
    height=704,
    frames=121,
    side_multiple=16,
    frame_multiple=8,
    frame_rate=30.0,
    reads=("context", "frame_rate"),
    sources="diffusers' CosmosTextToWorldPipeline; the padding of texts is read like the rest, as zeros",
)
_COSMOS_2 = ModelFacts(
    prediction=Prediction.FLOW,
    noise=NoiseFacts(NoiseKind.FLOW, sigma_min=0.002, sigma_max=80.0),
    level=Level.SHARE,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=7.0,
    steps=35,
    width=1360,
    height=768,
    frames=1,
    side_multiple=16,
    frame_multiple=0,
    frame_rate=0.0,
    reads=("context",),
    sources="diffusers' Cosmos2TextToImagePipeline: the shares are sigma / (1 + sigma) of Karras' levels between both "
    "sigmas, and its guidance scale is smaller by 1",
)
_COSMOS_2_VIDEO = replace(
    _COSMOS_2,
    width=1280,
    height=704,
    frames=93,
    frame_multiple=4,
    frame_rate=16.0,
    reads=("context", "frame_rate"),
    may_read=("image", "image_mask"),
    begins=FirstFrameMode.KEPT,
    sources="diffusers' Cosmos2VideoToWorldPipeline; shares and scale as for images",
)

#: by the name that `pool.detection` gives
VIDEO_FACTS: Mapping[str, ModelFacts] = {
    "wan_t2v": _WAN,
    "wan21_i2v": _WAN_I2V,
    "wan21_flf2v": replace(_WAN_I2V, ends=LastFrameMode.MUST),
    "wan21_fun_control": _WAN_FUN,
    "wan22_i2v": _WAN_22_I2V,
    "wan22_ti2v": _WAN_22_5B,
    "wan_vace": replace(
        _WAN,
        reads=("context", "control"),
        sources="diffusers' WanVACEPipeline, whose example has a shift of 3 at 480 lines and of 5 at 720",
    ),
    "hunyuan_video": _HUNYUAN,
    "hunyuan_video_i2v": _HUNYUAN_I2V,
    "skyreels_i2v": _SKYREELS,
    "hunyuan_video_15": _HUNYUAN_15,
    "hunyuan_video_15_sr": replace(_HUNYUAN_15, noise=_flow(2.0), reads=("context", "context_2", "image")),
    "cosmos_t2v": _COSMOS,
    "cosmos_i2v": replace(
        _COSMOS,
        may_read=("image", "image_mask"),
        begins=FirstFrameMode.KEPT_WITH_NOISE,
        sources="diffusers' CosmosVideoToWorldPipeline; the padding of texts is read like the rest, as zeros",
    ),
    "cosmos2_t2i": _COSMOS_2,
    "cosmos2_i2v": _COSMOS_2_VIDEO,
}
