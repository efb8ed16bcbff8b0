"""Audio of users as the audio track of a video of LTX-2: the spectra of torchaudio, the encoder of diffusers, and the
length of the video."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from modelpool.pool.families.parts.audio_tracks import SOUND_HOP
from modelpool.pool.inference.pixels.sound_latents import sound_samples
from modelpool.pool.models.components.vae.audio_decoders import spectra_of_samples
from modelpool.pool.values.core.stage_params import AudioSamples, EncodeImageParams, Latent
from modelpool.pool.values.specs.spec import Role
from tests.pool.families.definitions.test_ltx2 import SOUNDING
from tests.pool.families.whole_transformer import Whole

#: every ninth band of the first spectrum of the first channel, and of the last one of the second, of the noise below:
#: `torchaudio.transforms.MelSpectrogram(16000, n_fft=1024, hop_length=160, n_mels=64, power=1, norm="slaney",
#: mel_scale="slaney")` of torchaudio 2.11, clamped at 1e-5, and its logarithm
FIRST = (-1.663472, -1.81123, -2.136427, -1.977552, -1.821733, -1.851129, -2.023112, -1.421886)
LAST = (-1.627964, -1.236826, -1.544907, -2.05935, -1.681684, -1.567085, -1.5614, -1.844476)


def noise(samples: int, channels: int = 2) -> npt.NDArray[np.float32]:
    return np.random.default_rng(3).normal(0, 0.2, (1, channels, samples)).astype(np.float32)


def test_spectra_are_those_of_torchaudio() -> None:
    found = spectra_of_samples(torch.from_numpy(noise(4000)), 64)
    assert found.shape == (1, 2, 26, 64)
    np.testing.assert_allclose(found[0, 0, 0, ::9], FIRST, atol=2e-5)
    np.testing.assert_allclose(found[0, 1, -1, ::9], LAST, atol=2e-5)


def test_latents_are_those_of_the_encoder_of_diffusers(tmp_path: Path) -> None:
    """The mean of the posterior, in the scale of its statistics; whole, cut off, with silence behind it, of one
    channel, and at another rate."""
    whole = Whole(tmp_path, SOUNDING)
    vae = whole.module(Role.VAE).sound.vae

    def encoded(samples_CS: npt.NDArray[np.float32], rate: int, length: int) -> npt.NDArray[np.float32]:
        audio = AudioSamples(np.ascontiguousarray(samples_CS.T), rate)
        found = whole.run(EncodeImageParams(whole.model, 0, 0, sound=length), audio)
        assert isinstance(found, Latent)
        assert found.sound_LA is not None
        assert found.sound_LA.shape == (length, 128)
        return found.sound_LA

    def of_diffusers(samples_CS: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        spectra = spectra_of_samples(torch.from_numpy(samples_CS)[None], 64)
        with torch.no_grad():
            latent_BCLF = vae.encode(spectra).latent_dist.mode()
        latent_BLA = latent_BCLF.transpose(1, 2).flatten(2)
        found: npt.NDArray[np.float32] = ((latent_BLA - vae.latents_mean) / vae.latents_std)[0].numpy()
        return found

    samples = noise(16000)[0]
    theirs = of_diffusers(samples)
    assert theirs.shape == (26, 128), "a second has 101 spectra"
    np.testing.assert_allclose(encoded(samples, 16000, 26), theirs, atol=1e-5)
    np.testing.assert_allclose(encoded(samples, 16000, 11), theirs[:11], atol=1e-5)
    silent = np.pad(samples, ((0, 0), (0, sound_samples(40)[0] - 16000)))
    np.testing.assert_allclose(encoded(samples, 16000, 40), of_diffusers(silent), atol=1e-5)
    both = np.repeat(samples[:1], 2, axis=0)
    np.testing.assert_allclose(encoded(samples[:1], 16000, 26), of_diffusers(both), atol=1e-5)
    # a slow wave is the same at another rate
    times = np.arange(48000) / 48000
    wave = np.stack([0.5 * np.sin(2 * np.pi * 440 * times)] * 2).astype(np.float32)
    middle = slice(4, 20)
    slow = encoded(wave[:, ::3].copy(), 16000, 26)[middle]
    np.testing.assert_allclose(encoded(wave, 48000, 26)[middle], slow, atol=0.05 * float(slow.std()))
    assert encoded(samples[:, :10], 16000, 1).shape == (1, 128)
    whole.engine.close()


def test_samples_of_a_latent_are_as_many_as_its_positions_need() -> None:
    """Four spectra are a position, and the first position is one spectrum."""
    for length in (2, 8, 26):
        least, most = sound_samples(length)
        assert 1 + max(least, 1024) // SOUND_HOP >= 4 * (length - 1) + 1
        assert most > least
