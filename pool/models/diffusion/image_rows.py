"""Architecture rows of the image transformers."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import (
    ErnieImageTransformer2DModel,
    HunyuanImageTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
)

from modelpool.pool.families.modules import qwen_image
from modelpool.pool.families.parts.forward import unchanged
from modelpool.pool.models.diffusion import image_newer_calls, image_newer_configs
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.key_maps import layout_converter

_HUNYUAN_IMAGE = DiffusionArchitecture(
    HunyuanImageTransformer2DModel,
    image_newer_configs.hunyuan_image_config,
    layout_converter("hunyuan_image"),
    image_newer_calls.call_hunyuan_image,
)

IMAGE_ROWS: Mapping[str, DiffusionArchitecture] = {
    "qwen_image_layered": DiffusionArchitecture(
        QwenImageTransformer2DModel, qwen_image.config, qwen_image.CONVERT, qwen_image.forward
    ),
    "hunyuan_image_21": _HUNYUAN_IMAGE,
    "hunyuan_image_21_refiner": _HUNYUAN_IMAGE,
    "sana": DiffusionArchitecture(
        SanaTransformer2DModel, image_newer_configs.sana_config, layout_converter("sana"), image_newer_calls.call_sana
    ),
    "ernie_image": DiffusionArchitecture(
        ErnieImageTransformer2DModel,
        image_newer_configs.ernie_image_config,
        unchanged(),
        image_newer_calls.call_ernie_image,
    ),
    "krea2": DiffusionArchitecture(
        Krea2Transformer2DModel,
        image_newer_configs.krea2_config,
        layout_converter("krea2"),
        image_newer_calls.call_krea2,
    ),
    "qwen_image_21": DiffusionArchitecture(
        QwenImage21Transformer2DModel,
        image_newer_configs.qwen_image_21_config,
        layout_converter("qwen_image_21"),
        image_newer_calls.call_qwen_image_21,
    ),
}
