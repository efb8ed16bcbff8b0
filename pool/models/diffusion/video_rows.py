"""Architecture rows of the video transformers."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import (
    HunyuanVideoTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)

from modelpool.pool.models.diffusion import video_calls, video_configs, video_names
from modelpool.pool.models.diffusion.adapted_modules import (
    CosmosTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
)
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.key_maps import layout_converter

_WAN = DiffusionArchitecture(
    WanTransformer3DModel, video_configs.wan_config, video_names.convert_wan, video_calls.call_wan
)
_WAN_5B = DiffusionArchitecture(
    WanTransformer3DModel, video_configs.wan_config, video_names.convert_wan, video_calls.call_wan_5b
)
_WAN_VACE = DiffusionArchitecture(
    WanVACETransformer3DModel, video_configs.wan_vace_config, video_names.convert_wan, video_calls.call_wan_vace
)
_HUNYUAN = DiffusionArchitecture(
    HunyuanVideoTransformer3DModel,
    video_configs.hunyuan_video_config,
    layout_converter("hunyuan_video"),
    video_calls.call_hunyuan_video,
)
_HUNYUAN_15 = DiffusionArchitecture(
    HunyuanVideo15Transformer3DModel,
    video_configs.hunyuan_video_15_config,
    layout_converter("hunyuan_video_15"),
    video_calls.call_hunyuan_video_15,
)
_COSMOS = DiffusionArchitecture(
    CosmosTransformer3DModel, video_configs.cosmos_config, layout_converter("cosmos"), video_calls.call_cosmos
)
_COSMOS_2 = DiffusionArchitecture(
    CosmosTransformer3DModel, video_configs.cosmos_config, layout_converter("cosmos"), video_calls.call_cosmos_predict_2
)

VIDEO_ROWS: Mapping[str, DiffusionArchitecture] = {
    "wan_t2v": _WAN,
    "wan21_i2v": _WAN,
    "wan21_flf2v": _WAN,
    "wan21_fun_control": _WAN,
    "wan22_i2v": _WAN,
    "wan22_ti2v": _WAN_5B,
    "wan_vace": _WAN_VACE,
    "hunyuan_video": _HUNYUAN,
    "hunyuan_video_i2v": _HUNYUAN,
    "skyreels_i2v": _HUNYUAN,
    "hunyuan_video_15": _HUNYUAN_15,
    "hunyuan_video_15_sr": _HUNYUAN_15,
    "cosmos_t2v": _COSMOS,
    "cosmos_i2v": _COSMOS,
    "cosmos2_t2i": _COSMOS_2,
    "cosmos2_i2v": _COSMOS_2,
}
