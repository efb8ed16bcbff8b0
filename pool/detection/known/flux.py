"""Detection rows of the models derived from Flux and its code. Torch-free; see `signatures`."""

from __future__ import annotations

from modelpool.pool.detection.layouts import flux, newer, other
from modelpool.pool.detection.layouts.signature import Row, Signature, having, rows

FLUXES: tuple[Signature, ...] = (
    *rows(
        flux.HUNYUAN_VIDEO,
        "hunyuan_image_refiner",
        "HunyuanImageTransformer2DModel",
        Row(
            "hunyuan_image_21_refiner",
            "the Hunyuan Image 2.1 refiner",
            "HunyuanImage21Refiner",
            having(patch_size=(1, 1, 1), vec_in_dim=None),
        ),
    ),
    *rows(
        flux.HUNYUAN_VIDEO,
        "hunyuan_image",
        "HunyuanImageTransformer2DModel",
        Row("hunyuan_image_21", "Hunyuan Image 2.1", "HunyuanImage21", having(vec_in_dim=None)),
    ),
    *rows(
        other.HUNYUAN_3D,
        "hunyuan3d_2_mini",
        "",
        Row("hunyuan3d_2_mini", "Hunyuan3D 2 mini", "Hunyuan3Dv2mini", having(depth=8)),
    ),
    *rows(other.HUNYUAN_3D, "hunyuan3d_2", "", Row("hunyuan3d_2", "Hunyuan3D 2", "Hunyuan3Dv2")),
    *rows(newer.JOY_IMAGE, "wan21", "JoyImageEditTransformer3DModel", Row("joyimage", "JoyImage", "JoyImage")),
    *rows(flux.FLUX_3, "", "Flux3Transformer2DModel", Row("flux3", "Flux 3")),
    *rows(
        flux.FLUX_2,
        "flux2",
        "Flux2Transformer2DModel",
        Row("flux2_dev", "Flux 2 dev", "Flux2", having(hidden_size=6144)),
        Row("flux2_klein", "Flux 2 klein", "Flux2", having(guidance_embed=False)),
        Row("flux2", "Flux 2", "Flux2"),
    ),
    *rows(flux.CHROMA_RADIANCE, "pixels", "", Row("chroma_radiance", "Chroma Radiance", "ChromaRadiance")),
    *rows(flux.CHROMA, "flux", "ChromaTransformer2DModel", Row("chroma", "Chroma", "Chroma")),
    *rows(
        flux.FLUX,
        "flux",
        "LongCatImageTransformer2DModel",
        Row("longcat_image", "LongCat-Image", "LongCatImage", having(vec_in_dim=None, context_in_dim=3584)),
    ),
    *rows(
        flux.FLUX,
        "flux",
        "FluxTransformer2DModel",
        Row("flux_fill", "Flux fill", "FluxInpaint", having(guidance_embed=True, in_channels=96)),
        Row("flux_control", "Flux control (edges or depth)", "Flux", having(guidance_embed=True, in_channels=32)),
        Row("flux_dev", "Flux dev", "Flux", having(guidance_embed=True)),
        Row("flux_schnell", "Flux schnell", "FluxSchnell"),
    ),
)
