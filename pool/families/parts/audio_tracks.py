"""Audio tracks of videos: how long they are, and how their latents are sampled together with the frames.
Torch-free to import.

While it is sampled, the latent of the audio is in cells behind the frames, filled up with numbers that mean
nothing: so it has one noise, one sampler and one guidance with them.

Legend: B batch, C channels, T H W cells of a latent, L positions of the audio's latent, A numbers of each.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from modelpool.pool.values.core.run_options import SoundScale
from modelpool.pool.values.core.sampling_facts import SoundFacts, VideoFacts

if TYPE_CHECKING:
    from torch import Tensor

#: positions of the longest audio that requests may name; longer videos are refused
MOST_SOUND = 1 << 15
#: samples per second that LTX-2 encodes, samples from one spectrum to the next, and spectra of a position of the latent
SOUND_RATE, SOUND_HOP, POSITION_SPECTRA = 16000, 160, 4
#: model input: the latent of audio that a run keeps, [B, L, A]
KEPT_SOUND = "sound"
#: model input: the latent of audio with the voice that the audio has, [B, L, A]
VOICE = "voice"


def sound_length(sound: SoundFacts, frames: int, frame_rate: float) -> int:
    """Return the positions of the audio's latent for a video. Sources: diffusers' LTX2Pipeline; those that round up:
    its Kandinsky6TI2VAPipeline."""
    # models read the frame rate in float32, and have to find the same length
    rate: float = struct.unpack("f", struct.pack("f", frame_rate))[0]
    length = frames / rate * sound.cells_per_second
    return max(1, math.ceil(length) if sound.rounds_up else round(length))


def sound_cells(sound: SoundFacts, frames: int, frame_rate: float, numbers: int) -> int:
    """Return the cells of time behind the frames of a video, of `numbers` numbers each, that have its audio
    while it is sampled."""
    return math.ceil(sound_length(sound, frames, frame_rate) * sound.width / numbers)


def cells_of_frames(sound: SoundFacts, cells: int, numbers: int, frames_per_cell: int, frame_rate: float) -> int:
    """Return how many of `cells` cells of time, of `numbers` numbers each, are frames; the others are audio. The
    inverse of `sound_cells`."""
    for own in range(cells - 1, 0, -1):
        frames = 1 + (own - 1) * frames_per_cell
        if own + sound_cells(sound, frames, frame_rate, numbers) == cells:
            return own
    raise AssertionError(
        f"{cells} cells of {numbers} numbers are no video with sound at {frame_rate} frames per second"
    )


@dataclass(frozen=True, slots=True)
class SoundTrack:
    """Where a latent that is sampled has its audio: behind `cells` cells of frames, in `length` positions."""

    facts: SoundFacts
    cells: int
    length: int

    @classmethod
    def of(cls, video: VideoFacts | None, frames: int, frame_rate: float, leading: int = 0) -> SoundTrack | None:
        """Return the audio track of a video for a model of `video`, with `leading` cells before its frames; None
        without audio."""
        if video is None or video.sound is None:
            return None
        cells = leading + 1 + (frames - 1) // video.frames_per_cell
        return cls(video.sound, cells, sound_length(video.sound, frames, frame_rate))

    def parted(self, x_BCTHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents of frames, and of their audio, [B, L, A]."""
        sound_BN = x_BCTHW[:, :, self.cells :].flatten(1)[:, : self.length * self.facts.width]
        return x_BCTHW[:, :, : self.cells], sound_BN.unflatten(1, (self.length, self.facts.width))

    def rest(self, x_BCTHW: Tensor) -> Tensor:
        """Return the numbers behind the audio, [B, ...]."""
        return x_BCTHW[:, :, self.cells :].flatten(1)[:, self.length * self.facts.width :]


def guided_track(track: SoundTrack, option: SoundScale | None) -> SoundTrack:
    """Return the track with the guidance that an option of a run has for it."""
    if option is None:
        return track
    return replace(track, facts=replace(track.facts, cfg=option.cfg, rescale=option.rescale))


def joined(video_BCTHW: Tensor, sound_BLA: Tensor, rest_BN: Tensor | None = None) -> Tensor:
    """Return frames with their audio behind them, the inverse of `SoundTrack.parted`. `rest_BN` are the numbers that
    fill up the last cell; default: zeros."""
    import torch

    batch, channels, _, *sides = video_BCTHW.shape
    sound_BN = sound_BLA.flatten(1).to(video_BCTHW.dtype)
    missing = -sound_BN.shape[1] % (channels * math.prod(sides))
    rest = sound_BN.new_zeros(batch, missing) if rest_BN is None else rest_BN.to(video_BCTHW.dtype)
    behind = torch.cat((sound_BN, rest), dim=1).reshape(batch, channels, -1, *sides)
    return torch.cat((video_BCTHW, behind), dim=2)
