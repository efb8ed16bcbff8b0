"""The rows of the table of diffusion models that make images with transformers."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import (
    AuraFlowTransformer2DModel,
    ChromaTransformer2DModel,
    ErnieImageTransformer2DModel,
    Flux2Transformer2DModel,
    FluxTransformer2DModel,
    HiDreamImageTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanImageTransformer2DModel,
    Krea2Transformer2DModel,
    Lumina2Transformer2DModel,
    PixArtTransformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)

from modelpool.pool.models.diffusion import image_calls, image_configs, image_newer_calls, image_newer_configs
from modelpool.pool.models.diffusion.architecture import Architecture
from modelpool.pool.models.diffusion.key_maps import as_it_is, through_layout

_SD3 = Architecture(SD3Transformer2DModel, image_configs.sd3_config, through_layout("sd3"), image_calls.call_sd3)
_FLUX = Architecture(FluxTransformer2DModel, image_configs.flux_config, through_layout("flux"), image_calls.call_flux)
_FLUX_2 = Architecture(
    Flux2Transformer2DModel, image_configs.flux2_config, through_layout("flux2"), image_calls.call_flux2
)
_PIXART = Architecture(
    PixArtTransformer2DModel,
    image_configs.pixart_config,
    # what the model was trained to read for no text; everybody reads an empty text instead
    through_layout("pixart", without=("y_embedder.y_embedding",)),
    image_calls.call_pixart,
)
_HUNYUAN_DIT = Architecture(
    HunyuanDiT2DModel, image_configs.hunyuan_dit_config, through_layout("hunyuan_dit"), image_calls.call_hunyuan_dit
)

_QWEN_IMAGE = Architecture(
    QwenImageTransformer2DModel,
    image_configs.qwen_image_config,
    as_it_is("__index_timestep_zero__"),
    image_calls.call_qwen_image,
)
_HUNYUAN_IMAGE = Architecture(
    HunyuanImageTransformer2DModel,
    image_newer_configs.hunyuan_image_config,
    through_layout("hunyuan_image"),
    image_newer_calls.call_hunyuan_image,
)

IMAGE_ROWS: Mapping[str, Architecture] = {
    "sd3": _SD3,
    "sd35_medium": _SD3,
    "sd35_large": _SD3,
    "flux_dev": _FLUX,
    "flux_schnell": _FLUX,
    "flux_fill": _FLUX,
    "flux_control": _FLUX,
    "flux2": _FLUX_2,
    "flux2_dev": _FLUX_2,
    "flux2_klein": _FLUX_2,
    "chroma": Architecture(
        ChromaTransformer2DModel, image_configs.chroma_config, through_layout("chroma"), image_calls.call_chroma
    ),
    "qwen_image": _QWEN_IMAGE,
    "qwen_image_layered": _QWEN_IMAGE,
    "z_image": Architecture(
        ZImageTransformer2DModel, image_configs.z_image_config, through_layout("z_image"), image_calls.call_z_image
    ),
    "lumina2": Architecture(
        Lumina2Transformer2DModel, image_configs.lumina2_config, through_layout("lumina2"), image_calls.call_lumina2
    ),
    "auraflow": Architecture(
        AuraFlowTransformer2DModel,
        image_configs.aura_flow_config,
        through_layout("auraflow"),
        image_calls.call_aura_flow,
    ),
    "pixart_alpha": _PIXART,
    "pixart_alpha_512": _PIXART,
    "pixart_sigma": _PIXART,
    "hunyuan_dit": _HUNYUAN_DIT,
    "hunyuan_dit_1": _HUNYUAN_DIT,
    "hidream_i1": Architecture(
        HiDreamImageTransformer2DModel, image_configs.hidream_config, as_it_is(), image_calls.call_hidream
    ),
    "hunyuan_image_21": _HUNYUAN_IMAGE,
    "hunyuan_image_21_refiner": _HUNYUAN_IMAGE,
    "sana": Architecture(
        SanaTransformer2DModel, image_newer_configs.sana_config, through_layout("sana"), image_newer_calls.call_sana
    ),
    "ernie_image": Architecture(
        ErnieImageTransformer2DModel,
        image_newer_configs.ernie_image_config,
        as_it_is(),
        image_newer_calls.call_ernie_image,
    ),
    "krea2": Architecture(
        Krea2Transformer2DModel, image_newer_configs.krea2_config, through_layout("krea2"), image_newer_calls.call_krea2
    ),
    "qwen_image_21": Architecture(
        QwenImage21Transformer2DModel,
        image_newer_configs.qwen_image_21_config,
        through_layout("qwen_image_21"),
        image_newer_calls.call_qwen_image_21,
    ),
}
