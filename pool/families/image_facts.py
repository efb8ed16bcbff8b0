"""Sampling facts of image transformers that are recognised, and built, but do not run. Torch-free; see
`families.parts.model_facts`.

Unless `sources` states otherwise: sizes, steps and guidance scales are the defaults of diffusers' pipelines, shifts
those of the published schedulers. Properties that no file tells for models with one layout (distilled or not) are those
of the best-known model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, ShiftBySize
from modelpool.pool.families.parts.model_facts import Guidance, ModelFacts, image_flow


def _by_size(tokens: tuple[int, int], exponents: tuple[float, float]) -> NoiseFacts:
    return NoiseFacts(NoiseKind.FLOW, shift_by_size=ShiftBySize(tokens, exponents))


_FLOW = image_flow(
    NoiseFacts(NoiseKind.FLOW, shift=3.0),
    Guidance.CLASSIFIER_FREE,
    cfg=4.0,
    steps=50,
    reads=("context",),
    may_read=("context_mask",),
)

#: by the name that recognition returns
IMAGE_FACTS: Mapping[str, ModelFacts] = {
    "hunyuan_image_21_refiner": replace(
        _FLOW,
        noise=NoiseFacts(NoiseKind.FLOW, shift=4.0),
        guidance=Guidance.DISTILLED,
        cfg=3.25,
        steps=4,
        width=2048,
        height=2048,
        reads=("context", "guidance", "image"),
        sources="diffusers' HunyuanImageRefinerPipeline; shift of ComfyUI's class",
    ),
    "sana": replace(
        _FLOW,
        cfg=4.5,
        steps=20,
        side_multiple=32,
        sources="diffusers' SanaPipeline; Efficient-Large-Model/Sana_1600M_1024px, scheduler; prompts of 300 tokens",
    ),
    "ernie_image": replace(
        _FLOW,
        sources="diffusers' ErnieImagePipeline; shift of ComfyUI's class. Turbo needs 8 steps and no guidance",
    ),
    "krea2": replace(
        _FLOW,
        noise=_by_size((256, 6400), (0.5, 1.15)),
        # the pipeline adds 4.5 times the difference to the prediction; our scale includes the prediction itself
        cfg=5.5,
        steps=28,
        sources="diffusers' Krea2Pipeline, of layers 2, 5, ... 35 of its text encoder; the distilled one has the "
        "exponent 1.15 at every size and no guidance",
    ),
    "qwen_image_21": replace(
        _FLOW,
        noise=_by_size((256, 4096), (0.5, 1.15)),
        guidance=Guidance.NONE,
        cfg=1.0,
        steps=40,
        side_multiple=32,
        sources="diffusers' QwenImage21Pipeline, whose default is no guidance; the shift is its default for "
        "scheduler configurations without one",
    ),
}
