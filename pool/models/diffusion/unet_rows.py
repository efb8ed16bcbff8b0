"""Architecture rows of the UNets with inputs other than text.

UNets that read only texts are built by `pool.models.common.module_classes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from diffusers import UNet2DConditionModel, UNetSpatioTemporalConditionModel

from modelpool.pool.models.diffusion import unet_calls, unet_configs
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.key_maps import layout_converter
from modelpool.pool.models.diffusion.unet_video_modules import ViewedUNet
from modelpool.pool.models.diffusion.unet_video_names import convert_unet_video

_UNET = DiffusionArchitecture(
    UNet2DConditionModel, unet_configs.unet_config, layout_converter("sd1"), unet_calls.call_unet
)
_VIDEO = DiffusionArchitecture(
    UNetSpatioTemporalConditionModel, unet_configs.unet_video_config, convert_unet_video, unet_calls.call_unet_video
)
_VIEWED = replace(_VIDEO, module=ViewedUNet)

UNET_ROWS: Mapping[str, DiffusionArchitecture] = {
    "sd1_inpaint": _UNET,
    "sd1_ip2p": _UNET,
    "sd2_inpaint": _UNET,
    "sd2_depth": _UNET,
    "sd_x4": _UNET,
    "sdxl_inpaint": _UNET,
    "sdxl_ip2p": _UNET,
    "svd": _VIDEO,
    "sv3d_u": _VIDEO,
    "sv3d_p": _VIEWED,
}
