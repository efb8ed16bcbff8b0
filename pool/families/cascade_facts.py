"""Sampling facts of the stages of Stable Cascade. Torch-free; see `facts`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, Prediction
from modelpool.pool.families.parts.model_facts import Guidance, Level, ModelFacts

_C = ModelFacts(
    prediction=Prediction.NOISE,
    noise=NoiseFacts(NoiseKind.COSINE),
    level=Level.COSINE,
    guidance=Guidance.CLASSIFIER_FREE,
    cfg=4.0,
    steps=20,
    width=1024,
    height=1024,
    frames=1,
    side_multiple=128,
    frame_multiple=0,
    frame_rate=0.0,
    reads=("context", "pooled"),
    may_read=("image_context",),
    sources="diffusers' StableCascadePriorPipeline (ComfyUI shifts its levels by 2); a cell is 128 / 3 pixels wide",
)
_B = replace(
    _C,
    guidance=Guidance.NONE,
    cfg=1.0,
    steps=10,
    reads=("pooled", "prior"),
    may_read=(),
    sources="diffusers' StableCascadeDecoderPipeline; a cell of stage B is 4 pixels wide",
)

#: by the name that `pool.detection` gives
CASCADE_FACTS: Mapping[str, ModelFacts] = {"cascade_c": _C, "cascade_c_lite": _C, "cascade_b": _B, "cascade_b_lite": _B}
