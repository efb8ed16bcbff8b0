"""Detection rows of the UNets. Torch-free; see `signatures`."""

from __future__ import annotations

from modelpool.pool.detection.known.unet_conditions import refiner, sd1, sd2, sdxl, unclip, video
from modelpool.pool.detection.layouts.signature import Row, Signature, having, rows
from modelpool.pool.detection.layouts.unet import CASCADE, LDM_UNET

UNETS: tuple[Signature, ...] = (
    *rows(
        LDM_UNET,
        "sd1",
        "UNetSpatioTemporalConditionModel",
        Row("sv3d_u", "SV3D u", "SV3D_u", video(adm_in_channels=256)),
        Row("sv3d_p", "SV3D p", "SV3D_p", video(adm_in_channels=1280)),
        Row("svd", "Stable Video Diffusion", "SVD_img2vid", video()),
    ),
    *rows(
        LDM_UNET,
        "sd1",
        "UNet2DConditionModel",
        Row("lotus_d", "Lotus D (depth and normals)", "LotusD", unclip(adm_in_channels=4)),
        Row("zero123", "Stable Zero123", "Stable_Zero123", sd1(in_channels=8), ("cc_projection.weight",)),
        Row("sd1_ip2p", "Stable Diffusion 1 InstructPix2Pix", "SD15_instructpix2pix", sd1(in_channels=8)),
        Row("sd1_inpaint", "Stable Diffusion 1 inpainting", "SD15", sd1(in_channels=9)),
        Row("sd1", "Stable Diffusion 1", "SD15", sd1()),
    ),
    *rows(
        LDM_UNET,
        "sd_x4",
        "UNet2DConditionModel",
        Row("sd_x4", "the Stable Diffusion x4 upscaler", "SD_X4Upscaler", sd2(in_channels=7)),
    ),
    *rows(
        LDM_UNET,
        "sd1",
        "UNet2DConditionModel",
        Row("sd2_inpaint", "Stable Diffusion 2 inpainting", "SD20", sd2(in_channels=9)),
        Row("sd2_depth", "Stable Diffusion 2 depth", "SD20", sd2(in_channels=5)),
        Row("sd2", "Stable Diffusion 2", "SD20", sd2()),
    ),
    *rows(
        LDM_UNET,
        "playground_25",
        "UNet2DConditionModel",
        Row("playground_25", "Playground 2.5", "SDXL", sdxl(), ("edm_mean", "edm_std")),
    ),
    *rows(
        LDM_UNET,
        "sdxl",
        "UNet2DConditionModel",
        Row("cosxl_edit", "CosXL edit", "SDXL_instructpix2pix", sdxl(in_channels=8), ("edm_vpred.sigma_max",)),
        Row("sdxl_ip2p", "Stable Diffusion XL InstructPix2Pix", "SDXL_instructpix2pix", sdxl(in_channels=8)),
        Row("ssd_1b", "SSD-1B", "SSD1B", sdxl(transformer_depth=(0, 0, 2, 2, 4, 4))),
        Row("vega", "Segmind Vega", "Segmind_Vega", sdxl(transformer_depth=(0, 0, 1, 1, 2, 2))),
        Row("koala_700m", "KOALA 700M", "KOALA_700M", sdxl(transformer_depth=(0, 2, 5))),
        Row("koala_1b", "KOALA 1B", "KOALA_1B", sdxl(transformer_depth=(0, 2, 6))),
        Row("sdxl_refiner", "the Stable Diffusion XL refiner", "SDXLRefiner", refiner),
        Row("sdxl_inpaint", "Stable Diffusion XL inpainting", "SDXL", sdxl(in_channels=9)),
        Row("sdxl", "Stable Diffusion XL", "SDXL", sdxl()),
    ),
    *rows(
        LDM_UNET,
        "sd1",
        "UNet2DConditionModel",
        Row("sd21_unclip_l", "Stable Diffusion 2.1 unCLIP L", "SD21UnclipL", unclip(adm_in_channels=1536)),
        Row("sd21_unclip_h", "Stable Diffusion 2.1 unCLIP H", "SD21UnclipH", unclip(adm_in_channels=2048)),
    ),
    *rows(
        CASCADE,
        "cascade_c",
        "StableCascadeUNet",
        Row("cascade_c_lite", "Stable Cascade C lite", "Stable_Cascade_C", having(c_cond=1536)),
        Row("cascade_c", "Stable Cascade C", "Stable_Cascade_C", having(stable_cascade_stage="c")),
    ),
    *rows(
        CASCADE,
        "cascade_b",
        "StableCascadeUNet",
        Row("cascade_b_lite", "Stable Cascade B lite", "Stable_Cascade_B", having(c_hidden=(320, 576, 1152, 1152))),
        Row("cascade_b", "Stable Cascade B", "Stable_Cascade_B"),
    ),
)
