"""Videos with an audio track, sampled together with their frames."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import KEPT_SOUND, SoundTrack
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.stage_params import KeptSoundCondition, Latent
from modelpool.pool.values.core.task_inputs import SOUND


def sound_track_part(run: DenoisingRun) -> RunPart | None:
    """Separate the audio behind the frames from them, in previews and in the results. Audio that is kept is an input of
    the model, and the audio of the results."""
    shape = run.work.shape
    # cells of images that guide the video lead its frames, and are dropped
    track = SoundTrack.of(run.facts.video, shape.frames, shape.frame_rate)
    if track is None:
        return None
    run.cells = shape.leading + track.cells
    kept = _kept_sounds(run, track) if run.work.has(KeptSoundCondition) else None
    if kept is not None:
        run.prompts = run.prompts.with_inputs({KEPT_SOUND: kept})

    def results(samples_BCTHW: Tensor) -> tuple[Latent, ...]:
        found = with_sounds(samples_BCTHW[:, :, shape.leading :], track)
        if kept is None:
            return found
        return tuple(replace(each, sound_LA=own_LA.numpy()) for each, own_LA in zip(found, kept.unbind(), strict=True))

    return RunPart(results=results, captures=True)


def _kept_sounds(run: DenoisingRun, track: SoundTrack) -> Tensor:
    """Return the audio that each of the works of a run keeps, [B, L, A]. Raises UnusableField for audio of another
    length, and for none."""
    found = []
    for each in run.inputs:
        sound_LA = each.read(SOUND, Latent).sound_LA
        expected = track.length, track.facts.width
        if sound_LA is None or sound_LA.shape != expected:
            shape = "no audio" if sound_LA is None else "x".join(map(str, sound_LA.shape))
            raise unusable_field("sound", shape, f"a latent of audio of {expected[0]}x{expected[1]} numbers")
        found.append(torch.from_numpy(sound_LA.copy()))
    return torch.stack(found)


def with_sounds(samples_BCTHW: Tensor, track: SoundTrack) -> tuple[Latent, ...]:
    """Return the latents of frames with the audio track behind them apart."""
    video_BCTHW, sound_BLA = (part.contiguous() for part in track.parted(samples_BCTHW))
    pairs = zip(video_BCTHW.unbind(), sound_BLA.unbind(), strict=True)
    return tuple(Latent(video_CTHW.numpy(), sound_LA.numpy()) for video_CTHW, sound_LA in pairs)
