"""Videos with an audio track, sampled together with their frames."""

from __future__ import annotations

from torch import Tensor

from modelpool.pool.families.parts.audio_tracks import SoundTrack
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.values.core.stage_params import Latent


def sound_track_part(run: DenoisingRun) -> RunPart | None:
    """Separate the audio behind the frames from them, in previews and in the results."""
    shape = run.work.shape
    # cells of images that guide the video lead its frames, and are dropped
    track = SoundTrack.of(run.facts.video, shape.frames, shape.frame_rate)
    if track is None:
        return None
    run.cells = shape.leading + track.cells

    return RunPart(
        results=lambda samples_BCTHW: with_sounds(samples_BCTHW[:, :, shape.leading :], track), captures=True
    )


def with_sounds(samples_BCTHW: Tensor, track: SoundTrack) -> tuple[Latent, ...]:
    """Return the latents of frames with the audio track behind them apart."""
    video_BCTHW, sound_BLA = (part.contiguous() for part in track.parted(samples_BCTHW))
    pairs = zip(video_BCTHW.unbind(), sound_BLA.unbind(), strict=True)
    return tuple(Latent(video_CTHW.numpy(), sound_LA.numpy()) for video_CTHW, sound_LA in pairs)
