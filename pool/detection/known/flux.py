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
        other.HUNYUAN_3D,
        "hunyuan3d_2_mini",
        "",
        Row("hunyuan3d_2_mini", "Hunyuan3D 2 mini", "Hunyuan3Dv2mini", having(depth=8)),
    ),
    *rows(other.HUNYUAN_3D, "hunyuan3d_2", "", Row("hunyuan3d_2", "Hunyuan3D 2", "Hunyuan3Dv2")),
    *rows(newer.JOY_IMAGE, "wan21", "JoyImageEditTransformer3DModel", Row("joyimage", "JoyImage", "JoyImage")),
    *rows(flux.FLUX_3, "", "Flux3Transformer2DModel", Row("flux3", "Flux 3")),
    *rows(flux.CHROMA_RADIANCE, "pixels", "", Row("chroma_radiance", "Chroma Radiance", "ChromaRadiance")),
    *rows(
        flux.FLUX,
        "flux",
        "LongCatImageTransformer2DModel",
        Row("longcat_image", "LongCat-Image", "LongCatImage", having(vec_in_dim=None, context_in_dim=3584)),
    ),
)
