"""Reads what the smallest tensors of a checkpoint say about its model and no key or shape does. Torch-free.

Knows the names of these tensors, and reads their few bytes. Does not recognise families
(`pool.models.loading.detect_family`).

1. SD2 files of 768 pixels predict velocity and look like files of 512: the biases of a norm of the last level have a
   larger spread. Source: ComfyUI, which uses a standard deviation above 0.09.
2. EDM files specify the range of their noise levels, or mean and deviation of their latents' channels.
3. unCLIP files, and their folders, may have the mean and the deviation of the image embeddings of the training.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import replace

from modelpool.pool.families.detection.prediction import NOISE_WORD, declared_prediction
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.unet_families import UNETS, labels_width
from modelpool.pool.files.formats.folder_header import NORMALIZER
from modelpool.pool.files.formats.safetensors_file import Header, stored_bytes
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.values.core.sampling_facts import ImageLabels, NoiseKind, Prediction
from modelpool.pool.values.specs.spec import Role

SPREAD_KEY, VELOCITY_SPREAD = "output_blocks.11.1.transformer_blocks.0.norm1.bias", 0.09
EDM_SIGMA_MIN, EDM_SIGMA_MAX = "edm_vpred.sigma_min", "edm_vpred.sigma_max"
EDM_MEAN, EDM_DEVIATION = "edm_mean", "edm_std"
#: mean and deviation of image embeddings, in a file and in a folder. Sources: `CLIPEmbeddingNoiseAugmentation` of
#: Stability-AI/stablediffusion, `StableUnCLIPImageNormalizer` of diffusers
LABEL_STATISTICS = (
    ("noise_augmentor.data_mean", "noise_augmentor.data_std"),
    (f"{NORMALIZER}.mean", f"{NORMALIZER}.std"),
)

#: a smaller ratio of the ends leaves no room for a thousand levels between them
MIN_RATIO = 1.01

#: struct format of a number, and the bytes to prepend: some dtypes are the upper half of a wider one
_FORMATS = {"F16": ("e", b""), "F32": ("f", b""), "F64": ("d", b""), "BF16": ("f", b"\0\0"), "F8_E5M2": ("e", b"\0")}
#: larger than any of these tensors
_MAX_NUMBERS = 1 << 16


def refine_family(family: LocatedFamily, header: Header) -> LocatedFamily:
    """Return `family` with what the small tensors of the file specify; without any, `family` itself.

    Raises UnknownArchitecture naming the tensor for an invalid one, CorruptFile if the file can no longer be read.
    """
    if family.sampling.image_labels is not None:
        return _with_label_statistics(family, header)
    if header.configs:  # the configurations of a diffusers folder specify all of it
        return family
    family = _with_noise_range(family, header)
    unet = UNETS.get(family.name)
    if unet is None:
        return family
    if EDM_MEAN in unet.detect.extra_keys:
        return _with_latent_measures(family, header)
    if unet.velocity_pixels and _has_wide_spread(family, header):
        sampling = replace(family.sampling, prediction=Prediction.VELOCITY)
        return replace(family, sampling=sampling, native_pixels=unet.velocity_pixels)
    return family


def read_numbers(header: Header, name: str) -> list[float]:
    """Return the numbers of the small tensor `name` of the file.

    Raises UnknownArchitecture if it is empty, too large, or not of a float dtype; CorruptFile if the file can no longer
    be read.
    """
    entry = header.tensors[name]
    if not 1 <= entry.elements <= _MAX_NUMBERS or entry.dtype not in (*_FORMATS, "F8_E4M3"):
        raise UnknownArchitecture(
            f"{header.path}: tensor {name!r}: found {entry.dtype} of shape {entry.shape}, expected a few floats"
        )
    data = stored_bytes(header, name)
    if entry.dtype == "F8_E4M3":
        return [_of_e4m3(byte) for byte in data]
    letter, before = _FORMATS[entry.dtype]
    size = struct.calcsize(letter) - len(before)
    padded = b"".join(before + data[i : i + size] for i in range(0, len(data), size))
    return list(struct.unpack(f"<{entry.elements}{letter}", padded))


def read_number(header: Header, name: str) -> float:
    """Return the one number of the tensor `name` of the file. Raises as `read_numbers`, and for another count."""
    entry = header.tensors[name]
    if entry.elements != 1:
        raise UnknownArchitecture(
            f"{header.path}: tensor {name!r}: found {entry.dtype} of shape {entry.shape}, expected one number"
        )
    return read_numbers(header, name)[0]


def _of_e4m3(byte: int) -> float:
    """Return the value of a float8_e4m3fn byte."""
    sign, exponent, fraction = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (math.ldexp(8 + fraction, exponent - 10) if exponent else math.ldexp(fraction, -9))


def _has_wide_spread(family: LocatedFamily, header: Header) -> bool:
    """Whether an SD2 file without a marker predicts velocity."""
    key = family.prefixes[Role.DIFFUSION_MODEL] + SPREAD_KEY
    says_noise = declared_prediction(header.tensors, header.metadata) == NOISE_WORD
    if key not in header.tensors or says_noise or family.sampling.prediction is Prediction.VELOCITY:
        return False
    biases = read_numbers(header, key)
    # a damaged file is not judged here; using its weights raises the error (`mapped_file.check_finite`)
    return _are_finite(biases) and statistics.pstdev(biases) > VELOCITY_SPREAD


def _with_noise_range(family: LocatedFamily, header: Header) -> LocatedFamily:
    noise = family.sampling.noise
    if noise.kind is not NoiseKind.EDM:
        return family
    low, high = _number(header, EDM_SIGMA_MIN, noise.sigma_min), _number(header, EDM_SIGMA_MAX, noise.sigma_max)
    if not 0.0 < MIN_RATIO * low < high < math.inf:
        raise UnknownArchitecture(
            f"{header.path}: {EDM_SIGMA_MIN} and {EDM_SIGMA_MAX}: found noise from {low} to {high}, expected a rising "
            "range above 0"
        )
    ends = replace(noise, sigma_min=low, sigma_max=high)
    return replace(family, sampling=replace(family.sampling, noise=ends))


def _number(header: Header, name: str, default: float) -> float:
    return read_number(header, name) if name in header.tensors else default


def _with_latent_measures(family: LocatedFamily, header: Header) -> LocatedFamily:
    means, deviations = read_numbers(header, EDM_MEAN), read_numbers(header, EDM_DEVIATION)
    channels = len(family.latent_means)
    if not (len(means) == len(deviations) == channels and _are_finite(means) and _are_finite(deviations)):
        raise UnknownArchitecture(
            f"{header.path}: {EDM_MEAN} and {EDM_DEVIATION}: found {means} and {deviations}, expected a finite number "
            f"for each of {channels} channels"
        )
    if min(deviations) <= 0.0:
        raise UnknownArchitecture(f"{header.path}: {EDM_DEVIATION}: found {deviations}, expected numbers above 0")
    return replace(family, latent_means=tuple(means), latent_deviations=tuple(deviations))


def _with_label_statistics(family: LocatedFamily, header: Header) -> LocatedFamily:
    """Return `family` with the statistics of the image embeddings, if the file or folder has them."""
    for mean, deviation in LABEL_STATISTICS:
        if mean not in header.tensors or deviation not in header.tensors:
            continue
        means, deviations = read_numbers(header, mean), read_numbers(header, deviation)
        width = labels_width(family)
        if not (len(means) == len(deviations) == width and _are_finite(means) and _are_finite(deviations)):
            raise UnknownArchitecture(
                f"{header.path}: {mean} and {deviation}: found {len(means)} and {counted(len(deviations), 'number')}, "
                f"expected "
                f"{width} finite ones each"
            )
        if min(deviations) <= 0.0:
            raise UnknownArchitecture(f"{header.path}: {deviation}: found {min(deviations)}, expected numbers above 0")
        if not any(means) and set(deviations) == {1.0}:  # says no more than a file without them
            return family
        labels = ImageLabels(tuple(means), tuple(deviations))
        return replace(family, sampling=replace(family.sampling, image_labels=labels))
    return family


def _are_finite(numbers: Sequence[float]) -> bool:
    return all(map(math.isfinite, numbers))
