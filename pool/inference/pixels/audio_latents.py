"""Encodes audio to the latent that a run starts from.

Shape legend: B batch, C channels, S samples, L cells.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from modelpool.pool.inference.pixels.audio_resampling import resampled_audio
from modelpool.pool.inference.pixels.latent_pixels import codec_of, tiling
from modelpool.pool.inference.pixels.spans import Downscale
from modelpool.pool.inference.pixels.tiled_vae import tiled_encode
from modelpool.pool.models.components.vae.codec import VaeCodec
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.values.core.family_facts import LatentFacts
from modelpool.pool.values.core.stage_params import AudioSamples, Latent, RunHooks
from modelpool.pool.values.core.stopping import stop_check, stop_if_asked
from modelpool.pool.values.specs.spec import ExecutionMode
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher

#: channels that the autoencoders read
CHANNELS = 2


def samples_encoded(seconds: float, latent: LatentFacts) -> int:
    """Return the samples of a channel that are encoded for audio of `seconds`: as many as its cells span."""
    assert latent.audio is not None, "a model of audio"
    return latent.audio.cells_of(seconds, latent.downscale) * cell_samples(latent)


def cell_samples(latent: LatentFacts) -> int:
    """Return the samples of a cell of a latent of audio."""
    assert latent.audio is not None, "a model of audio"
    return latent.audio.cell_samples or latent.downscale


def audio_codec(module: object, latent: LatentFacts) -> VaeCodec:
    """Return the codec of an autoencoder of audio."""
    return codec_of(module, replace(latent, downscale=cell_samples(latent)))


def encode_audio(
    seconds: float,
    audio: AudioSamples,
    vae: ModelPatcher,
    latent: LatentFacts,
    hooks: RunHooks,
    division: ExecutionMode | None = None,
) -> Latent:
    """Return the latent of `seconds` of audio in the scale of the diffusion model: the mean of the posterior.

    Samples are read with the rate and the channels of the model. Those that fill no cell are cut off at both ends; of
    a model with latents of one length, silence follows. One step, or one for each tile. Raises CorruptFile for a result
    with NaN or infinity, and Stopped at a tile or layer.
    """
    assert latent.audio is not None, "a model of audio"
    samples_CS = torch.from_numpy(np.ascontiguousarray(audio.samples_SC.T))
    samples_CS = samples_CS.expand(CHANNELS, -1) if len(samples_CS) == 1 else samples_CS[:CHANNELS]
    samples_CS = resampled_audio(samples_CS, audio.samples_per_second, latent.audio.samples_per_second)
    samples_1CS = _of_length(samples_CS, samples_encoded(seconds, latent))[None]
    with vae.running(stop_check(hooks)) as module:
        codec = audio_codec(module, latent)

        def encode_call(tile_BCS: Tensor) -> Tensor:
            return codec.encode(tile_BCS.to(vae.device).to(vae.compute_dtype))

        found_1CL = tiled_encode(
            encode_call,
            samples_1CS,
            tiling(division),
            (Downscale(cell_samples(latent)),),
            lambda: stop_if_asked(hooks.should_stop),
            hooks.on_step,
        )
    if not torch.isfinite(found_1CL).all():
        raise CorruptFile(f"VAE {vae.key}: found a latent with NaN or infinity, expected numbers")
    return Latent(found_1CL[0].contiguous().numpy())


def _of_length(samples_CS: Tensor, length: int) -> Tensor:
    """Return so many samples: the middle ones, or silence behind them."""
    more = samples_CS.shape[-1] - length
    if more >= 0:
        return samples_CS[:, more // 2 : more // 2 + length]
    return functional.pad(samples_CS, (0, -more))
