"""Sampling facts of the image transformer families. Torch-free; see `facts`.

Unless `sources` states otherwise: sizes, steps and guidance scales are the defaults of diffusers' pipelines, shifts
those of the published schedulers. Properties that no file tells for models with one layout (distilled or not) are those
of the best-known model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, Prediction, ShiftBySize, ShiftBySizeAndSteps
from modelpool.pool.families.parts.model_facts import Guidance, Level, ModelFacts


def _flow(
    shift: float = 1.0, by_size: ShiftBySize | ShiftBySizeAndSteps | None = None, last_share: float = 0.0
) -> NoiseFacts:
    return NoiseFacts(NoiseKind.FLOW, shift=shift, shift_by_size=by_size, last_share=last_share)


_SD3 = ModelFacts(
    prediction=Prediction.FLOW,
    noise=_flow(3.0),
    level=Level.SHARE,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=7.0,
    steps=28,
    width=1024,
    height=1024,
    frames=1,
    side_multiple=16,
    frame_multiple=0,
    frame_rate=0.0,
    reads=("context", "pooled"),
    sources="diffusers' StableDiffusion3Pipeline; stabilityai/stable-diffusion-3-medium",
)
_FLUX_SHIFT = ShiftBySize((256, 4096), (0.5, 1.15))
_PIXART = replace(
    _SD3,
    prediction=Prediction.NOISE,
    noise=NoiseFacts(NoiseKind.LINEAR, beta_start=0.0001, beta_end=0.02),
    level=Level.TIMESTEP,
    cfg=4.5,
    steps=20,
    reads=("context",),
    may_read=("context_mask",),
    sources="diffusers' PixArtSigmaPipeline; PixArt-alpha/PixArt-Sigma-XL-2-1024-MS; prompts of 300 tokens",
)
_HUNYUAN_DIT = replace(
    _SD3,
    prediction=Prediction.VELOCITY,
    noise=NoiseFacts(NoiseKind.SCALED_LINEAR, beta_start=0.00085, beta_end=0.018),
    level=Level.TIMESTEP,
    cfg=5.0,
    steps=50,
    reads=("context", "context_mask", "context_2", "context_2_mask"),
    sources="diffusers' HunyuanDiTPipeline; Tencent-Hunyuan/HunyuanDiT-v1.2; 77 and 256 tokens, filled up",
)

#: by the name that recognition returns
IMAGE_FACTS: Mapping[str, ModelFacts] = {
    "qwen_image_layered": replace(
        _SD3,
        # # the square root of one image's patches, in units of 256, at the two training sizes
        noise=_flow(by_size=ShiftBySize((1600, 4096), (2.5, 4.0))),
        cfg=4.0,
        steps=50,
        width=640,
        height=640,
        frames=5,
        reads=("context", "reference"),
        may_read=("context_mask",),
        sources="diffusers' QwenImageLayeredPipeline, which optionally rescales each patch to its norm before "
        "guidance: the complete image and four layers, of 640 or 1024 pixels a side",
    ),
    "pixart_alpha": replace(
        _PIXART,
        may_read=("context_mask", "size"),
        sources="diffusers' PixArtAlphaPipeline; PixArt-alpha/PixArt-XL-2-1024-MS; prompts of 120 tokens",
    ),
    "pixart_alpha_512": replace(
        _PIXART, width=512, height=512, sources="PixArt-alpha/PixArt-XL-2-512x512; prompts of 120 tokens"
    ),
    "pixart_sigma": _PIXART,
    "hunyuan_dit": _HUNYUAN_DIT,
    "hunyuan_dit_1": replace(
        _HUNYUAN_DIT,
        noise=NoiseFacts(NoiseKind.SCALED_LINEAR, beta_start=0.00085, beta_end=0.03),
        may_read=("size",),
        sources="diffusers' HunyuanDiTPipeline; Tencent-Hunyuan/HunyuanDiT-v1.1; 77 and 256 tokens, filled up",
    ),
    "hunyuan_image_21": replace(
        _SD3,
        noise=_flow(5.0),
        guidance=Guidance.PROJECTED_LATE,
        cfg=3.5,
        steps=50,
        width=2048,
        height=2048,
        side_multiple=64,
        reads=("context",),
        may_read=("context_mask", "context_2", "context_2_mask", "guidance", "next_level"),
        sources="diffusers' HunyuanImagePipeline; shift of ComfyUI's class. The distilled one has a shift of 4 and 8 "
        "steps, reads a guidance of 3.25 and its next level; its file has guidance_in and time_r_in",
    ),
    "hunyuan_image_21_refiner": replace(
        _SD3,
        noise=_flow(4.0),
        guidance=Guidance.DISTILLED,
        cfg=3.25,
        steps=4,
        width=2048,
        height=2048,
        reads=("context", "guidance", "image"),
        may_read=("context_mask",),
        sources="diffusers' HunyuanImageRefinerPipeline; shift of ComfyUI's class",
    ),
    "sana": replace(
        _SD3,
        cfg=4.5,
        steps=20,
        side_multiple=32,
        reads=("context",),
        may_read=("context_mask",),
        sources="diffusers' SanaPipeline; Efficient-Large-Model/Sana_1600M_1024px, scheduler; prompts of 300 tokens",
    ),
    "ernie_image": replace(
        _SD3,
        cfg=4.0,
        steps=50,
        reads=("context",),
        may_read=("context_mask",),
        sources="diffusers' ErnieImagePipeline; shift of ComfyUI's class. Turbo needs 8 steps and no guidance",
    ),
    "krea2": replace(
        _SD3,
        noise=_flow(by_size=ShiftBySize((256, 6400), (0.5, 1.15))),
        # # the pipeline adds 4.5 times the difference to the prediction; our scale includes the prediction itself
        cfg=5.5,
        reads=("context",),
        may_read=("context_mask",),
        sources="diffusers' Krea2Pipeline, of layers 2, 5, ... 35 of its text encoder; the distilled one has the "
        "exponent 1.15 at every size and no guidance",
    ),
    "qwen_image_21": replace(
        _SD3,
        noise=_flow(by_size=_FLUX_SHIFT),
        guidance=Guidance.NONE,
        cfg=1.0,
        steps=40,
        side_multiple=32,
        reads=("context",),
        may_read=("context_mask",),
        sources="diffusers' QwenImage21Pipeline, whose default is no guidance; the shift is its default for "
        "scheduler configurations without one",
    ),
}
