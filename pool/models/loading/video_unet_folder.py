"""Recognises diffusers folders with a video UNet as diffusion model as families. Torch-free and pure.

The tensors determine the family; what no shape determines comes from the configurations: arguments of the classes, the
number of frames, the latent scale, the noise levels. Configurations are untrusted and must be consistent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.files.formats.folder_header import CLASS_KEY
from modelpool.pool.files.formats.safetensors_file import Header, Shape
from modelpool.pool.models.loading.folder_values import FolderConfig, number_in, wrong_value
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import NoiseFacts
from modelpool.pool.values.specs.spec import Role

#: the folder of each component, and its class
FOLDERS: Mapping[Role, tuple[str, str]] = {
    Role.VISION_ENCODER: ("image_encoder", "CLIPVisionModelWithProjection"),
    Role.DIFFUSION_MODEL: ("unet", "UNetSpatioTemporalConditionModel"),
    Role.VAE: ("vae", "AutoencoderKLTemporalDecoder"),
}
_SCHEDULER = "scheduler"
#: maximum number of frames in a configuration
_MAX_FRAMES = 1 << 10


def video_folder_family(base: LocatedFamily, header: Header, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return `base` with the settings of the folder of `header`, with tensors of `shapes`.

    Raises UnknownArchitecture naming the component and the key for missing parts and for invalid configurations.
    """
    names = [name for name, _ in FOLDERS.values()]
    missing = [name for name in names if not any(key.startswith(f"{name}.") for key in shapes)]
    if missing:
        raise UnknownArchitecture(f"recognised as {base.title}, but its folder has no {' and no '.join(missing)}")
    configs: dict[Role, FolderConfig] = {}
    for role, (name, expected) in FOLDERS.items():
        config = header.configs.get(name, {})
        if config.get(CLASS_KEY) != expected:
            raise wrong_value(name, CLASS_KEY, config.get(CLASS_KEY), expected)
        configs[role] = config
    vae, video = configs[Role.VAE], base.sampling.video
    scale = number_in("vae", vae, "scaling_factor", base.scaling_factor)
    if not scale > 0.0:
        raise wrong_value("vae", "scaling_factor", scale, "a number above 0")
    assert video is not None, f"{base.name} generates no videos"
    frames = number_in("unet", configs[Role.DIFFUSION_MODEL], "num_frames", float(video.frames))
    if not frames.is_integer() or not 1 <= frames <= _MAX_FRAMES:
        raise wrong_value("unet", "num_frames", frames, f"a whole number from 1 to {_MAX_FRAMES}")
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


def _noise(noise: NoiseFacts, config: FolderConfig) -> NoiseFacts:
    """Return `noise` with the range of levels of a scheduler."""
    if not config:
        return noise
    prediction = config.get("prediction_type", "v_prediction")
    if prediction != "v_prediction":
        raise wrong_value(_SCHEDULER, "prediction_type", prediction, "v_prediction")
    least = number_in(_SCHEDULER, config, "sigma_min", noise.sigma_min)
    most = number_in(_SCHEDULER, config, "sigma_max", noise.sigma_max)
    if not 0.0 < least < most:
        raise wrong_value(_SCHEDULER, "sigma_min and sigma_max", (least, most), "a rising range above 0")
    return replace(noise, sigma_min=least, sigma_max=most)
