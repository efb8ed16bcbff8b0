"""Architecture rows of image transformers that are built and do not run, and have no module in
`pool.families.modules`."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import (
    ErnieImageTransformer2DModel,
    HunyuanImageTransformer2DModel,
    Krea2Transformer2DModel,
    QwenImage21Transformer2DModel,
    SanaTransformer2DModel,
)

from modelpool.pool.families.modules import hunyuan_image
from modelpool.pool.families.parts.forward import unchanged
from modelpool.pool.models.diffusion import image_calls, image_configs
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.key_maps import layout_converter

IMAGE_ROWS: Mapping[str, DiffusionArchitecture] = {
    "hunyuan_image_21_refiner": DiffusionArchitecture(
        HunyuanImageTransformer2DModel,
        hunyuan_image.config,
        layout_converter(hunyuan_image.NAMES),
        hunyuan_image.forward,
    ),
    "sana": DiffusionArchitecture(
        SanaTransformer2DModel, image_configs.sana_config, layout_converter("sana"), image_calls.call_sana
    ),
    "ernie_image": DiffusionArchitecture(
        ErnieImageTransformer2DModel,
        image_configs.ernie_image_config,
        unchanged(),
        image_calls.call_ernie_image,
    ),
    "krea2": DiffusionArchitecture(
        Krea2Transformer2DModel,
        image_configs.krea2_config,
        layout_converter("krea2"),
        image_calls.call_krea2,
    ),
    "qwen_image_21": DiffusionArchitecture(
        QwenImage21Transformer2DModel,
        image_configs.qwen_image_21_config,
        layout_converter("qwen_image_21"),
        image_calls.call_qwen_image_21,
    ),
}
