"""Sampling facts of the audio families. Torch-free; see `facts`."""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.core.sampling_facts import NoiseFacts, NoiseKind, Prediction
from modelpool.pool.families.parts.model_facts import Guidance, Level, ModelFacts

#: by the name that `pool.detection` gives
AUDIO_FACTS: Mapping[str, ModelFacts] = {
    "stable_audio_1": ModelFacts(
        prediction=Prediction.VELOCITY,
        noise=NoiseFacts(NoiseKind.ANGLE, sigma_min=0.3, sigma_max=500.0),
        level=Level.ANGLE,
        guidance=Guidance.CLASSIFIER_FREE,
        cfg=7.0,
        steps=100,
        width=0,
        height=0,
        frames=0,
        side_multiple=1,
        frame_multiple=0,
        frame_rate=0.0,
        reads=("context", "seconds"),
        may_read=("context_mask",),
        seconds=47.55,
        samples_per_second=44100,
        cells=1024,
        sources="diffusers' StableAudioPipeline and scripts/convert_stable_audio.py; ComfyUI's minimum sigma is 0.03. "
        "Without a negative prompt the unconditional side reads zeros for text and seconds, in the context alone",
    ),
}
