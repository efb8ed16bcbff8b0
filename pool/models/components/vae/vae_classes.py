"""The diffusers classes of VAEs, without weights: the only module that names them.

Knows class, configuration and key converter of each kind of VAE, and which kinds the installed diffusers cannot build.
Everything is created on the meta device. `self_test` checks a new diffusers version against the converters. Reads no
files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    AutoencoderKLCosmos,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanImage,
    AutoencoderKLHunyuanImageRefiner,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLLTX2Video,
    AutoencoderKLLTXVideo,
    AutoencoderKLMochi,
    AutoencoderKLQwenImage,
    AutoencoderKLTemporalDecoder,
    AutoencoderKLWan,
    AutoencoderOobleck,
    AutoencoderTiny,
)
from torch import Tensor, nn

from modelpool.pool.families.detection.vaes import VaeFacts
from modelpool.pool.models.components.common.diffusers_private import ConverterChangedError, differing_keys
from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.models.components.common.vae_config_table import CONFIGS, DIFFUSERS_CONFIGS, FOLDER_KINDS
from modelpool.pool.models.components.common.vae_configs import Config, Shapes
from modelpool.pool.models.components.vae import ldm_names
from modelpool.pool.models.components.vae import vae_names as other_names
from modelpool.pool.models.components.vae.allegro_vae import AutoencoderKLAllegro
from modelpool.pool.models.components.vae.cascade_encoder import CascadeEncoder
from modelpool.pool.models.components.vae.weight_norm import drop_computed_weights
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import discover
from modelpool.pool.weights.ops.skip_init import uninitialised_on_meta

AutoencoderKLQwenImage21: Any = of_library("diffusers", "AutoencoderKLQwenImage21")
AutoencoderSAME: Any = of_library("diffusers", "AutoencoderSAME")
PaellaVQModel: Any = of_library(
    "diffusers.pipelines.deprecated.wuerstchen.modeling_paella_vq_model",
    "PaellaVQModel",
    "diffusers.pipelines.wuerstchen.modeling_paella_vq_model",
)

Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class VaeArchitecture:
    """The way to build one kind of VAE.

    module   the class
    config   its arguments from the shapes of a file, keys without prefix
    convert  the file's names to the module's
    """

    module: type[nn.Module]
    config: Callable[[Shapes], Config]
    convert: Convert


#: by the name that `pool.families.detection.vaes` returns
ARCHITECTURES: Mapping[str, VaeArchitecture] = {
    "kl": VaeArchitecture(AutoencoderKL, CONFIGS["kl"], ldm_names.convert_kl),
    "kl_temporal": VaeArchitecture(AutoencoderKLTemporalDecoder, CONFIGS["kl_temporal"], ldm_names.convert_kl_temporal),
    "flux2": VaeArchitecture(AutoencoderKLFlux2, CONFIGS["flux2"], ldm_names.convert_flux2),
    "taesd": VaeArchitecture(AutoencoderTiny, CONFIGS["taesd"], other_names.convert_taesd),
    "cascade_a": VaeArchitecture(PaellaVQModel, CONFIGS["cascade_a"], other_names.convert_cascade_a),
    "cascade_c_encoder": VaeArchitecture(CascadeEncoder, CONFIGS["cascade_c_encoder"], dict),
    "oobleck": VaeArchitecture(AutoencoderOobleck, CONFIGS["oobleck"], other_names.convert_oobleck),
    "stable_audio_3": VaeArchitecture(AutoencoderSAME, CONFIGS["stable_audio_3"], other_names.convert_same),
    "mochi": VaeArchitecture(AutoencoderKLMochi, CONFIGS["mochi"], other_names.convert_mochi),
    "ltx_v0": VaeArchitecture(AutoencoderKLLTXVideo, CONFIGS["ltx_v0"], other_names.convert_ltx),
    "ltx_v1": VaeArchitecture(AutoencoderKLLTXVideo, CONFIGS["ltx_v1"], other_names.convert_ltx),
    "ltx_v2": VaeArchitecture(AutoencoderKLLTXVideo, CONFIGS["ltx_v2"], other_names.convert_ltx),
    "ltx2": VaeArchitecture(AutoencoderKLLTX2Video, CONFIGS["ltx2"], other_names.convert_ltx),
    "hunyuan_image": VaeArchitecture(
        AutoencoderKLHunyuanImage, CONFIGS["hunyuan_image"], ldm_names.convert_hunyuan_image
    ),
    "hunyuan_video": VaeArchitecture(AutoencoderKLHunyuanVideo, CONFIGS["hunyuan_video"], ldm_names.convert_kl),
    "hunyuan_video_15": VaeArchitecture(
        AutoencoderKLHunyuanVideo15, CONFIGS["hunyuan_video_15"], ldm_names.convert_hunyuan_video_15
    ),
    "hunyuan_image_refiner": VaeArchitecture(
        AutoencoderKLHunyuanImageRefiner, CONFIGS["hunyuan_image_refiner"], ldm_names.convert_hunyuan_video_15
    ),
    "dc": VaeArchitecture(AutoencoderDC, CONFIGS["dc"], other_names.convert_dc),
    "cogvideox": VaeArchitecture(AutoencoderKLCogVideoX, CONFIGS["cogvideox"], ldm_names.convert_cogvideox),
    # published in the naming of diffusers alone
    "allegro": VaeArchitecture(AutoencoderKLAllegro, CONFIGS["allegro"], dict),
    "cosmos": VaeArchitecture(AutoencoderKLCosmos, CONFIGS["cosmos"], ldm_names.convert_cosmos),
    "wan21": VaeArchitecture(AutoencoderKLWan, CONFIGS["wan21"], other_names.convert_wan21),
    "qwen_image_layered": VaeArchitecture(AutoencoderKLWan, CONFIGS["qwen_image_layered"], other_names.convert_wan21),
    "wan22": VaeArchitecture(AutoencoderKLWan, CONFIGS["wan22"], other_names.convert_wan22),
    "qwen_image_21": VaeArchitecture(AutoencoderKLQwenImage21, CONFIGS["qwen_image_21"], other_names.convert_wan22),
}


#: kinds that are recognised in diffusers' naming without a configuration
IN_DIFFUSERS_NAMING: Mapping[str, VaeArchitecture] = {
    "kl": VaeArchitecture(AutoencoderKL, DIFFUSERS_CONFIGS["kl"], ldm_names.convert_diffusers),
    "flux2": VaeArchitecture(AutoencoderKLFlux2, DIFFUSERS_CONFIGS["flux2"], ldm_names.convert_diffusers),
}

#: classes that a diffusers folder may name, and the kind of each, by its configuration
FOLDER_CLASSES: Mapping[type[nn.Module], Callable[[Config], str]] = {
    cls: FOLDER_KINDS[cls.__name__]
    for cls in (
        AutoencoderKL,
        AutoencoderKLFlux2,
        AutoencoderKLTemporalDecoder,
        AutoencoderTiny,
        PaellaVQModel,
        AutoencoderOobleck,
        AutoencoderSAME,
        AutoencoderKLMochi,
        AutoencoderKLLTXVideo,
        AutoencoderKLLTX2Video,
        AutoencoderKLHunyuanImage,
        AutoencoderKLHunyuanVideo,
        AutoencoderKLHunyuanVideo15,
        AutoencoderKLHunyuanImageRefiner,
        AutoencoderDC,
        AutoencoderKLCogVideoX,
        AutoencoderKLAllegro,
        AutoencoderKLCosmos,
        AutoencoderKLWan,
        AutoencoderKLQwenImage,
        AutoencoderKLQwenImage21,
    )
}


def architecture_of(facts: VaeFacts) -> VaeArchitecture:
    """Return how the VAE of `facts` is built.

    Raises UnknownArchitecture, naming it, if the installed diffusers has no architecture for it, or if a file in
    diffusers' naming does not tell enough.
    """
    if facts.layout != "original":
        if facts.name not in IN_DIFFUSERS_NAMING:
            raise UnknownArchitecture(
                f"recognised as the VAE of {facts.title} in the naming of diffusers, whose shapes do not determine it: "
                "expected it in its folder, next to its config.json"
            )
        return IN_DIFFUSERS_NAMING[facts.name]
    if facts.name not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"recognised as the VAE of {facts.title}, for which the installed diffusers has no architecture; "
            f"expected one of {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[facts.name]


def empty_vae(architecture: VaeArchitecture, config: Config) -> nn.Module:
    """Return the module for `config`, in evaluation mode, its parameters and the buffers that files carry on the meta
    device.

    Buffers that no file carries have their values. Raises UnknownArchitecture if the class rejects the sizes.
    """
    try:
        with uninitialised_on_meta(), warnings.catch_warnings():
            # Oobleck's class has the older of torch's two weight norms
            warnings.filterwarnings("ignore", message=".*weight_norm.* is deprecated", category=FutureWarning)
            module = architecture.module(**config)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"VAE: {architecture.module.__name__} cannot have these sizes: {error}") from error
    drop_computed_weights(module)
    return module.eval().requires_grad_(False)


def self_test(facts: VaeFacts, shapes: Shapes) -> None:
    """Check that the module of the VAE of `facts` has the keys and shapes that its converter returns for `shapes`.

    Raises ConverterChangedError naming a difference.
    """
    architecture = architecture_of(facts)
    key_map = discover(shapes, architecture.convert)
    difference = differing_keys(key_map, empty_vae(architecture, architecture.config(shapes)))
    if difference:
        raise ConverterChangedError(f"{facts.title}: diffusers' module and converter disagree: {difference}")
