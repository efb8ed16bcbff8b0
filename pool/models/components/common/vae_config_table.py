"""The function that infers the configuration of each kind of VAE from shapes. Torch-free.

Separate from the classes (`pool.models.components.vae.vae_classes`), so that planning knows a VAE's ratios without
loading torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from modelpool.pool.models.components.common import vae_configs as configs
from modelpool.pool.models.components.common import vae_video_configs as video_configs
from modelpool.pool.models.components.common.vae_configs import Config, Shapes

Measure: TypeAlias = Callable[[Shapes], Config]

#: by the name that `pool.families.detection.vaes` returns, for files under published names
CONFIGS: Mapping[str, Measure] = {
    "kl": configs.kl_config,
    "kl_temporal": configs.kl_temporal_config,
    "flux2": configs.flux2_config,
    "taesd": configs.taesd_config,
    "cascade_a": configs.cascade_a_config,
    "oobleck": configs.oobleck_config,
    "stable_audio_3": configs.same_config,
    "mochi": video_configs.mochi_config,
    "ltx_v0": video_configs.ltx_config,
    "ltx_v1": video_configs.ltx_config,
    "ltx_v2": video_configs.ltx_config,
    "ltx2": video_configs.ltx2_config,
    "hunyuan_image": configs.hunyuan_image_config,
    "hunyuan_video": video_configs.hunyuan_video_config,
    "hunyuan_video_15": video_configs.hunyuan_video_15_config,
    "hunyuan_image_refiner": video_configs.hunyuan_video_15_config,
    "cosmos": video_configs.cosmos_config,
    "dc": configs.dc_config,
    "cogvideox": video_configs.cogvideox_config,
    "allegro": video_configs.allegro_config,
    "wan21": video_configs.wan21_config,
    "qwen_image_layered": video_configs.qwen_image_layered_config,
    "wan22": video_configs.wan22_config,
    "qwen_image_21": video_configs.qwen_image_21_config,
}
#: kinds whose files in diffusers' naming suffice without a configuration
DIFFUSERS_CONFIGS: Mapping[str, Measure] = {
    "kl": configs.diffusers_kl_config,
    "flux2": configs.diffusers_kl_config,
}

#: channels of pixels with transparency
_WITH_OPACITY = 4


def _ltx_version(config: Config) -> str:
    if not config.get("timestep_conditioning"):
        return "ltx_v0"
    return "ltx_v2" if "LTXVideo095DownBlock3D" in (config.get("down_block_types") or ()) else "ltx_v1"


#: the kind of each class that a diffusers folder may name, by its configuration
FOLDER_KINDS: Mapping[str, Callable[[Config], str]] = {
    "AutoencoderKL": lambda config: "kl",
    "AutoencoderKLFlux2": lambda config: "flux2",
    "AutoencoderKLTemporalDecoder": lambda config: "kl_temporal",
    "AutoencoderTiny": lambda config: "taesd",
    "PaellaVQModel": lambda config: "cascade_a",
    "AutoencoderOobleck": lambda config: "oobleck",
    "AutoencoderSAME": lambda config: "stable_audio_3",
    "AutoencoderKLMochi": lambda config: "mochi",
    "AutoencoderKLLTXVideo": lambda config: _ltx_version(config),
    "AutoencoderKLLTX2Video": lambda config: "ltx2",
    "AutoencoderKLHunyuanImage": lambda config: "hunyuan_image",
    "AutoencoderKLHunyuanVideo": lambda config: "hunyuan_video",
    "AutoencoderKLHunyuanVideo15": lambda config: "hunyuan_video_15",
    "AutoencoderKLHunyuanImageRefiner": lambda config: "hunyuan_image_refiner",
    "AutoencoderDC": lambda config: "dc",
    "AutoencoderKLCogVideoX": lambda config: "cogvideox",
    "AutoencoderKLAllegro": lambda config: "allegro",
    "AutoencoderKLCosmos": lambda config: "cosmos",
    "AutoencoderKLWan": lambda config: "wan22" if config.get("is_residual") else "wan21",
    "AutoencoderKLQwenImage": lambda config: (
        "qwen_image_layered" if config.get("input_channels") == _WITH_OPACITY else "wan21"
    ),
    "AutoencoderKLQwenImage21": lambda config: "qwen_image_21",
}
