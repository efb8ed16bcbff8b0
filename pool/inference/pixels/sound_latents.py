"""Encodes audio of users to the latent of the audio track of a video (LTX-2).

Shape legend: B batch, C channels, S samples, L positions of a latent, A numbers of each.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.families.parts.audio_tracks import POSITION_SPECTRA, SOUND_HOP, SOUND_RATE
from modelpool.pool.inference.pixels.audio_latents import CHANNELS
from modelpool.pool.inference.pixels.audio_resampling import resampled_audio
from modelpool.pool.models.components.vae.audio_decoders import (
    SOUND_WINDOW,
    MMAudioDecoder,
    sound_of,
)
from modelpool.pool.values.core.errors import CorruptFile, UnusableField
from modelpool.pool.values.core.stage_params import AudioSamples, Latent, RunHooks
from modelpool.pool.values.core.stopping import stop_check
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher


def sound_samples(length: int) -> tuple[int, int]:
    """Return how many samples a latent of `length` positions needs at least, and how many it can depend on: its last
    position begins with its last spectrum of these, and reads half a window behind that."""
    last = POSITION_SPECTRA * (length - 1) * SOUND_HOP
    return max(last, SOUND_WINDOW), last + SOUND_HOP + SOUND_WINDOW


def encode_sound(length: int, audio: AudioSamples, vae: ModelPatcher, hooks: RunHooks) -> Latent:
    """Return the latent of audio as the audio track of a video, of `length` positions, without frames: the mean of the
    posterior. A longer track is cut off, silence follows a shorter one. Each position depends on no later one, so the
    cut changes nothing. One step.

    Raises UnusableField for a VAE that encodes none, CorruptFile for a result with NaN or infinity, and Stopped at a
    layer.
    """
    samples_CS = torch.from_numpy(np.ascontiguousarray(audio.samples_SC.T))
    samples_CS = samples_CS.expand(CHANNELS, -1) if len(samples_CS) == 1 else samples_CS[:CHANNELS]
    least, most = sound_samples(length)
    before = -(-most * audio.samples_per_second // SOUND_RATE) + audio.samples_per_second
    samples_CS = resampled_audio(samples_CS[:, :before], audio.samples_per_second, SOUND_RATE)[:, :most]
    samples_1CS = functional.pad(samples_CS, (0, max(0, least - samples_CS.shape[1])))[None]
    found = sound_of(vae.module)
    if found is None or isinstance(found, MMAudioDecoder):
        raise UnusableField(f"VAE {vae.key}: found none that encodes audio tracks, expected one of LTX-2")
    with vae.running(stop_check(hooks)) as module:
        coder = sound_of(module)
        assert coder is not None, "the module of the patcher"
        sound_1LA: Tensor = coder.encode(samples_1CS.to(vae.device), vae.compute_dtype)[:, :length].float().cpu()
    if not torch.isfinite(sound_1LA).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    hooks.on_step(1, 1)
    sound_LA = sound_1LA[0].contiguous().numpy()
    return Latent(np.zeros((1, 1, 1, 1), np.float32), sound_LA)
