"""Audio tracks with the voice of given audio: an input of the model, and guidance away from a prediction without it.

Source: ID-LoRA, "identity guidance": the difference of the clean latents of the audio, times a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import VOICE, SoundTrack, joined
from modelpool.pool.inference.conditioning.run_parts import CallInputs, DenoisingRun, RunPart
from modelpool.pool.inference.extensions.unet_attention import PERTURBED
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.stage_params import Latent, VoiceCondition
from modelpool.pool.values.core.task_inputs import VOICE as INPUT
from modelpool.pool.weights.options.run_context import call_facts, extra_options
from modelpool.pool.weights.options.transformer_options import TransformerOptions

_NO_OPTIONS = TransformerOptions()


def voice_part(run: DenoisingRun) -> RunPart | None:
    """Add the voice that the audio of a video has to the inputs of its model, and its guidance to the options."""
    voice = next(iter(run.work.all_of(VoiceCondition)), None)
    if voice is None:
        return None
    run.prompts = run.prompts.with_inputs({VOICE: _voices(run, voice)})
    shape = run.work.shape
    track = SoundTrack.of(run.facts.video, shape.frames, shape.frame_rate, shape.leading)
    assert track is not None, "a model that reads a voice makes audio"
    if not voice.scale:
        return None

    def guide(args: Mapping[str, Any]) -> Tensor:
        with call_facts(**{PERTURBED: VOICE}):
            without_BCTHW: Tensor = args["predict_prompt"](args["input"])
        video, sound = track.parted(args["cond_denoised"] - without_BCTHW)
        denoised_BCTHW: Tensor = args["denoised"]
        return denoised_BCTHW + joined(torch.zeros_like(video), sound * voice.scale)

    run.options = run.options.with_sampler_post_cfg_function(guide)
    return RunPart(before_call=_without_voice)


def _without_voice(call: CallInputs) -> None:
    """Leave out the voice of a call for its guidance."""
    if extra_options(_NO_OPTIONS).get(PERTURBED) == VOICE:
        call.model_kwargs = {name: value for name, value in call.model_kwargs.items() if name != VOICE}


def _voices(run: DenoisingRun, voice: VoiceCondition) -> Tensor:
    """Return the voice of each of the works of a run, [B, R, A]. Raises UnusableField for none, or another length."""
    found = []
    for each in run.inputs:
        sound_LA = each.read(INPUT, Latent).sound_LA
        if sound_LA is None or len(sound_LA) != voice.length:
            shape = "no audio" if sound_LA is None else counted(len(sound_LA), "position")
            raise unusable_field("voice", shape, f"{counted(voice.length, 'position')} of audio")
        found.append(torch.from_numpy(sound_LA.copy()))
    return torch.stack(found)
