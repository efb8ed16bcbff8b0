"""Folders of diffusers whose diffusion model is a UNet of frames, as families. Torch-free and pure.

Which family it is, the tensors tell; what no shape tells is taken from the configurations: arguments of the classes,
how many frames the model was made for, the scale of latents, the levels of noise. Configurations come from outside and
have to fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.core.sampling_facts import NoiseFacts
from modelpool.pool.families.family import Family
from modelpool.pool.formats.folder_header import CLASS
from modelpool.pool.formats.safetensors_file import Header, Shape
from modelpool.pool.formats.strict_json import brief, finite_number
from modelpool.pool.specs.spec import Role

Said: TypeAlias = Mapping[str, Any]

#: the folder of each component, and the class that it has there
FOLDERS: Mapping[Role, tuple[str, str]] = {
    Role.VISION_ENCODER: ("image_encoder", "CLIPVisionModelWithProjection"),
    Role.DIFFUSION_MODEL: ("unet", "UNetSpatioTemporalConditionModel"),
    Role.VAE: ("vae", "AutoencoderKLTemporalDecoder"),
}
_SCHEDULER = "scheduler"
#: frames that a configuration may name
_MOST_FRAMES = 1 << 10


def video_folder_family(base: Family, header: Header, shapes: Mapping[str, Shape]) -> Family:
    """`base` as the folder that `header` is of has it, with tensors of `shapes`.

    Raises UnknownArchitecture naming the component and the key for what is missing, and for configurations that cannot
    be.
    """
    names = [name for name, _ in FOLDERS.values()]
    missing = [name for name in names if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing:
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    configs: dict[Role, Said] = {}
    for role, (name, expected) in FOLDERS.items():
        said = header.configs.get(name, {})
        if said.get(CLASS) != expected:
            raise _wrong(name, CLASS, said.get(CLASS), expected)
        configs[role] = said
    vae, video = configs[Role.VAE], base.sampling.video
    scale = _number("vae", vae, "scaling_factor", base.scaling_factor)
    if not scale > 0.0:
        raise _wrong("vae", "scaling_factor", scale, "a number above 0")
    assert video is not None, f"{base.name} makes no videos"
    frames = _number("unet", configs[Role.DIFFUSION_MODEL], "num_frames", float(video.frames))
    if not frames.is_integer() or not 1 <= frames <= _MOST_FRAMES:
        raise _wrong("unet", "num_frames", frames, f"a whole number from 1 to {_MOST_FRAMES}")
    return replace(
        base,
        prefixes={role: f"{name}." for role, (name, _) in FOLDERS.items()},
        configs=configs,
        scaling_factor=scale,
        sampling=replace(
            base.sampling,
            noise=_noise(base.sampling.noise, header.configs.get(_SCHEDULER, {})),
            video=replace(video, frames=int(frames)),
        ),
    )


def _noise(noise: NoiseFacts, said: Said) -> NoiseFacts:
    """`noise` with the ends that a scheduler says."""
    if not said:
        return noise
    prediction = said.get("prediction_type", "v_prediction")
    if prediction != "v_prediction":
        raise _wrong(_SCHEDULER, "prediction_type", prediction, "v_prediction")
    least = _number(_SCHEDULER, said, "sigma_min", noise.sigma_min)
    most = _number(_SCHEDULER, said, "sigma_max", noise.sigma_max)
    if not 0.0 < least < most:
        raise _wrong(_SCHEDULER, "sigma_min and sigma_max", (least, most), "a rising range above 0")
    return replace(noise, sigma_min=least, sigma_max=most)


def _number(name: str, said: Said, key: str, otherwise: float) -> float:
    value = said.get(key)
    if value is None:
        return otherwise
    number = finite_number(value)
    if number is None:
        raise _wrong(name, key, value, "a number")
    return number


def _wrong(name: str, key: str, found: object, expected: str) -> UnknownArchitecture:
    said = f"configuration of {name}: {key.lstrip('_')}: found {brief(found)}, expected {expected}"
    return UnknownArchitecture(said)
