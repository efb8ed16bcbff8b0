"""The rows of the table of diffusion models that make video with transformers."""

from __future__ import annotations

from collections.abc import Mapping

from diffusers import (
    HunyuanVideoTransformer3DModel,
    MochiTransformer3DModel,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)

from modelpool.pool.models.diffusion import video_calls, video_configs, video_names
from modelpool.pool.models.diffusion.architecture import Architecture
from modelpool.pool.models.diffusion.key_maps import through_layout
from modelpool.pool.models.diffusion.video_modules import (
    CosmosTransformer3DModel,
    HunyuanVideo15Transformer3DModel,
    LTXVideoTransformer3DModel,
)

_WAN = Architecture(WanTransformer3DModel, video_configs.wan_config, video_names.convert_wan, video_calls.call_wan)
_WAN_5B = Architecture(
    WanTransformer3DModel, video_configs.wan_config, video_names.convert_wan, video_calls.call_wan_5b
)
_WAN_VACE = Architecture(
    WanVACETransformer3DModel, video_configs.wan_vace_config, video_names.convert_wan, video_calls.call_wan_vace
)
_HUNYUAN = Architecture(
    HunyuanVideoTransformer3DModel,
    video_configs.hunyuan_video_config,
    through_layout("hunyuan_video"),
    video_calls.call_hunyuan_video,
)
_HUNYUAN_15 = Architecture(
    HunyuanVideo15Transformer3DModel,
    video_configs.hunyuan_video_15_config,
    through_layout("hunyuan_video_15"),
    video_calls.call_hunyuan_video_15,
)
_LTX = Architecture(LTXVideoTransformer3DModel, video_configs.ltx_config, through_layout("ltxv"), video_calls.call_ltx)
_MOCHI = Architecture(
    MochiTransformer3DModel, video_configs.mochi_config, video_names.convert_mochi, video_calls.call_mochi
)
_COSMOS = Architecture(
    CosmosTransformer3DModel, video_configs.cosmos_config, through_layout("cosmos"), video_calls.call_cosmos
)
_COSMOS_2 = Architecture(
    CosmosTransformer3DModel, video_configs.cosmos_config, through_layout("cosmos"), video_calls.call_cosmos_predict_2
)

VIDEO_ROWS: Mapping[str, Architecture] = {
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
    "ltxv": _LTX,
    "mochi": _MOCHI,
    "cosmos_t2v": _COSMOS,
    "cosmos_i2v": _COSMOS,
    "cosmos2_t2i": _COSMOS_2,
    "cosmos2_i2v": _COSMOS_2,
}
