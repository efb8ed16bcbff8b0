"""What decodes the audio tracks of videos of LTX-2, and of Kandinsky 6 (MMAudio): an autoencoder of spectrograms, and a
vocoder that makes samples of them. It is a part of the module of the autoencoder of frames.

Knows its names in single files and in folders, and its classes in diffusers.

Legend: B batch, L positions of a latent, A numbers of each, C channels, F rows of a spectrogram, S samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from torch import Tensor, nn
from transformers.audio_utils import mel_filter_bank

from modelpool.pool.families.parts.audio_tracks import SOUND_HOP, SOUND_RATE
from modelpool.pool.families.parts.forward import Arguments, Shapes
from modelpool.pool.files.formats.folder_header import AUDIO_FOLDERS
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.models.components.common.vae_configs import count_all, size_of
from modelpool.pool.models.components.diffusion.folder_config import config_arguments
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

MMAudioVAE: Any = of_library("diffusers", "MMAudioVAE")
MMAudioVocoder: Any = of_library("diffusers", "MMAudioVocoder")
#: name of the part in the module of the autoencoder of frames
SOUND = "sound"
_VAE, _VOCODER = "vae", "vocoder"
#: a tensor of the autoencoder of MMAudio
_MMAUDIO = "audio_vae.vae.decoder.conv_in.weight"
_VAE_FOLDER, _ = AUDIO_FOLDERS
#: spectra per second. Source: diffusers' AutoencoderKLLTX2Audio
_SPECTRA = 100
#: samples of a window, and the smallest magnitude. Source: LTX-2 of Lightricks
SOUND_WINDOW, _QUIETEST = 1024, 1e-5
#: upsampling factors of transposed convolutions by their width; no shape determines them. Source: the conversion of
#: diffusers
_FACTORS = {16: 6, 15: 5, 8: 2, 4: 2}
_VAE_NAMES = (
    ("per_channel_statistics.mean-of-means", "latents_mean"),
    ("per_channel_statistics.std-of-means", "latents_std"),
)
_VOCODER_NAMES = (
    ("ups.", "upsamplers."),
    ("resblocks.", "resnets."),
    ("conv_pre.", "conv_in."),
    ("conv_post.", "conv_out."),
)


class SoundDecoder(nn.Module):
    """Decodes latents of audio to samples."""

    def __init__(self, vae: nn.Module, vocoder: nn.Module) -> None:
        super().__init__()
        self.vae, self.vocoder = vae, vocoder

    @property
    def samples_per_second(self) -> int:
        """Of each channel."""
        own: Any = self.vocoder
        return int(own.config.output_sampling_rate)

    def encode(self, samples_BCS: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the latents of samples with the rate `SOUND_RATE`, [B, L, A] in the scale of the diffusion model: the
        mean of the posterior, encoded in `dtype`."""
        vae: Any = self.vae
        spectra = spectra_of_samples(samples_BCS, vae.config.mel_bins)
        latent_BCLF = vae.encode(spectra.to(dtype), return_dict=False)[0].mode()
        latent_BLA: Tensor = latent_BCLF.float().transpose(1, 2).flatten(2)
        scaled_BLA: Tensor = (latent_BLA - vae.latents_mean.to(latent_BLA)) / vae.latents_std.to(latent_BLA)
        return scaled_BLA

    def forward(self, scaled_BLA: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the samples of latents in the scale of the diffusion model, -1 to 1, [B, C, S]; decoded in `dtype`."""
        vae: Any = self.vae
        latent_BLA = scaled_BLA * vae.latents_std.to(scaled_BLA) + vae.latents_mean.to(scaled_BLA)
        latent_BCLF = latent_BLA.to(dtype).unflatten(2, (vae.config.latent_channels, -1)).transpose(1, 2)
        samples_BCS: Tensor = self.vocoder(vae.decode(latent_BCLF, return_dict=False)[0])
        return samples_BCS


def spectra_of_samples(samples_BCS: Tensor, rows: int) -> Tensor:
    """Return the spectra that the autoencoder of LTX-2 reads, [B, C, T, F]: logarithms of magnitudes in `rows` mel
    bands. Samples have the rate `SOUND_RATE`.

    Source: LTX-2 of Lightricks, the arguments of its `torchaudio.transforms.MelSpectrogram`.
    """
    bands_NF = mel_filter_bank(
        SOUND_WINDOW // 2 + 1, rows, 0.0, SOUND_RATE / 2, SOUND_RATE, norm="slaney", mel_scale="slaney"
    )
    window = torch.hann_window(SOUND_WINDOW, dtype=torch.float32, device=samples_BCS.device)
    found_NT = torch.stft(
        samples_BCS.float().flatten(0, 1),
        SOUND_WINDOW,
        SOUND_HOP,
        window=window,
        pad_mode="reflect",
        return_complex=True,
    )
    bands = torch.from_numpy(bands_NF).to(window)
    spectra_NTF = (found_NT.abs().transpose(1, 2) @ bands).clamp(min=_QUIETEST).log()
    spectra_BCTF: Tensor = spectra_NTF.unflatten(0, samples_BCS.shape[:2])
    return spectra_BCTF


def sound_of(vae: nn.Module) -> SoundDecoder | None:
    """Return what decodes audio in the module of an autoencoder of frames; None if its file has none."""
    found = getattr(vae, SOUND, None)
    return found if isinstance(found, SoundDecoder) else None


class MMAudioDecoder(SoundDecoder):
    """Decodes latents of MMAudio, which have one scale, to samples of one channel; in full precision, as its filters
    are."""

    def __init__(self, vae: nn.Module, vocoder: nn.Module, scale: float) -> None:
        super().__init__(vae, vocoder)
        self._scale = scale

    @property
    def samples_per_second(self) -> int:
        """Of its channel."""
        own: Any = self.vae
        return int(own.config.sample_rate)

    def forward(self, scaled_BLA: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the samples of latents in the scale of the diffusion model, -1 to 1, [B, 1, S]."""
        vae: Any = self.vae
        spectra = vae.decode(scaled_BLA.float().transpose(1, 2) / self._scale, return_dict=False)[0]
        samples_B1S: Tensor = self.vocoder(spectra.float(), return_dict=False)[0]
        return samples_B1S


def plan_sound(
    shapes: Mapping[str, Shape], configs: Mapping[str, Mapping[str, Any]], scale: float = 1.0
) -> tuple[SoundDecoder, KeyMap]:
    """Return the decoder of audio among `shapes` (keys as in the file) without weights, and its key map. `configs` are
    the configurations of its parts, by folder, if there are any: they supply what shapes do not tell. `scale` is the
    latents' scale, if neither they nor tensors have one.

    Raises UnknownArchitecture if a part is missing.
    """
    if _MMAUDIO in shapes:
        return _plan_mmaudio(shapes, configs, scale)
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(tuple(f"{f}." for f in AUDIO_FOLDERS))}
    key_map = discover(own, _converted)
    parts = {
        part: {
            key.removeprefix(f"{part}."): shape for key, shape in key_map.shapes.items() if key.startswith(f"{part}.")
        }
        for part in (_VAE, _VOCODER)
    }
    missing = [part for part, found in parts.items() if not found]
    if missing:
        raise UnknownArchitecture(f"LTX-2: found no {' and no '.join(missing)} of audio, expected both or neither")
    vocoder, rows = _vocoder_arguments(parts[_VOCODER])
    arguments = {_VAE: _vae_arguments(parts[_VAE], rows), _VOCODER: vocoder}
    classes = {_VAE: AutoencoderKLLTX2Audio, _VOCODER: LTX2Vocoder}
    for part, folder in zip(parts, AUDIO_FOLDERS, strict=True):
        if folder in configs:
            arguments[part] |= config_arguments(classes[part], configs[folder], len(own))
    module = SoundDecoder(*(empty_module(classes[part], arguments[part]) for part in parts))
    return module, fitted(key_map, module, "recognised as the decoder of audio of LTX-2, but")


def _plan_mmaudio(
    shapes: Mapping[str, Shape], configs: Mapping[str, Mapping[str, Any]], scale: float
) -> tuple[SoundDecoder, KeyMap]:
    """Return `plan_sound` of a decoder of MMAudio: its tensors have the names of diffusers."""
    folders = dict(zip((_VAE, _VOCODER), AUDIO_FOLDERS, strict=True))
    starts = tuple(f"{folder}." for folder in folders.values())
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(starts)}
    if "vocoder.conv_pre.weight" not in own:
        raise UnknownArchitecture("MMAudio: found no vocoder, expected it next to its autoencoder")
    key_map = discover(own, lambda tensors: {key.removeprefix("audio_"): tensor for key, tensor in tensors.items()})
    coder, levels = f"{AUDIO_FOLDERS[0]}.vae.", count_all(own, r"vocoder\.ups\.(\d+)\.")
    width = size_of(own, f"{coder}encoder.conv_in.weight")
    multiples = count_all(own, r"audio_vae\.vae\.encoder\.down\.(\d+)\.")
    blocks = count_all(own, r"vocoder\.resblocks\.(\d+)\.") // max(1, levels)
    kernels = [size_of(own, f"vocoder.ups.{level}.0.weight", 2) for level in range(levels)]
    # each convolution is twice as wide as the factor by which it lengthens, in the published configuration
    rates = [kernel // 2 for kernel in kernels]
    dilations = [1, 3, 5][: count_all(own, r"vocoder\.resblocks\.0\.convs1\.(\d+)\.")]
    arguments: dict[str, Arguments] = {
        _VAE: {
            "mel_bins": size_of(own, f"{coder}encoder.conv_in.weight", 1),
            "latent_channels": size_of(own, f"{coder}decoder.conv_in.weight", 1),
            "hidden_channels": width,
            "channel_multipliers": tuple(
                size_of(own, f"{coder}encoder.down.{level}.block.0.conv1.weight") // width for level in range(multiples)
            ),
            "layers_per_block": count_all(own, r"audio_vae\.vae\.encoder\.down\.0\.block\.(\d+)\."),
            "n_fft": size_of(own, "audio_vae.mel_converter.hann_window"),
            "hop_length": math.prod(rates),
            "scaling_factor": scale,
        },
        _VOCODER: {
            "num_mels": size_of(own, "vocoder.conv_pre.weight", 1),
            "upsample_initial_channel": size_of(own, "vocoder.conv_pre.weight"),
            "upsample_rates": rates,
            "upsample_kernel_sizes": kernels,
            "resblock_kernel_sizes": [
                size_of(own, f"vocoder.resblocks.{block}.convs1.0.weight", 2) for block in range(blocks)
            ],
            "resblock_dilation_sizes": [dilations] * blocks,
        },
    }
    classes = {_VAE: MMAudioVAE, _VOCODER: MMAudioVocoder}
    for part, folder in folders.items():
        if folder in configs:
            arguments[part] |= config_arguments(classes[part], configs[folder], len(own))
    vae, vocoder = (empty_module(classes[part], arguments[part]) for part in folders)
    module = MMAudioDecoder(vae, vocoder, float(arguments[_VAE]["scaling_factor"]))
    return module, fitted(key_map, module, "recognised as the decoder of audio of MMAudio, but")


def _vae_arguments(shapes: Shapes, rows: int) -> Arguments:
    """Return the arguments of the class, for spectrograms of `rows` rows."""
    base = size_of(shapes, "encoder.conv_in.conv.weight")
    levels = count_all(shapes, r"encoder\.down\.(\d+)\.")
    return {
        "base_channels": base,
        "in_channels": size_of(shapes, "encoder.conv_in.conv.weight", 1),
        "output_channels": size_of(shapes, "decoder.conv_out.conv.weight"),
        "latent_channels": size_of(shapes, "decoder.conv_in.conv.weight", 1),
        "ch_mult": tuple(
            size_of(shapes, f"encoder.down.{level}.block.0.conv1.conv.weight") // base for level in range(levels)
        ),
        "num_res_blocks": count_all(shapes, r"encoder\.down\.0\.block\.(\d+)\."),
        "mid_block_add_attention": "decoder.mid.attn_1.q.weight" in shapes,
        "mel_bins": rows,
    }


def _vocoder_arguments(shapes: Shapes) -> tuple[Arguments, int]:
    """Return the arguments of the class, and the rows of a channel of the spectrograms that it reads."""
    levels = count_all(shapes, r"upsamplers\.(\d+)\.")
    blocks = count_all(shapes, r"resnets\.(\d+)\.") // max(1, levels)
    kernels = [size_of(shapes, f"upsamplers.{level}.weight", 2) for level in range(levels)]
    unknown = sorted(set(kernels) - _FACTORS.keys())
    if unknown:
        raise UnknownArchitecture(
            f"vocoder: found convolutions of widths {unknown}, expected {', '.join(map(str, sorted(_FACTORS)))}"
        )
    factors, channels = [_FACTORS[kernel] for kernel in kernels], size_of(shapes, "conv_out.weight")
    read = size_of(shapes, "conv_in.weight", 1)
    return {
        "in_channels": read,
        "hidden_channels": size_of(shapes, "conv_in.weight"),
        "out_channels": channels,
        "upsample_kernel_sizes": kernels,
        "upsample_factors": factors,
        "resnet_kernel_sizes": [size_of(shapes, f"resnets.{block}.convs1.0.weight", 2) for block in range(blocks)],
        "resnet_dilations": [[1, 3, 5]] * blocks,
        "output_sampling_rate": _SPECTRA * math.prod(factors),
    }, read // channels


def _converted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the module's parameters from tensors with keys as in a single file, or as in folders."""
    converted: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        folder, _, name = key.partition(".")
        for old, new in _VAE_NAMES if folder == _VAE_FOLDER else _VOCODER_NAMES:
            name = new + name.removeprefix(old) if name.startswith(old) else name
        converted[f"{_VAE if folder == _VAE_FOLDER else _VOCODER}.{name}"] = tensor
    return converted
