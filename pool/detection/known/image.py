"""Detection rows of the image transformers. Torch-free; see `signatures`."""

from __future__ import annotations

from modelpool.pool.detection.layouts import image, newer
from modelpool.pool.detection.layouts.signature import Row, Signature, having, rows

IMAGES: tuple[Signature, ...] = (
    *rows(image.SANA, "", "SanaTransformer2DModel", Row("sana", "Sana")),
    *rows(image.PIXART, "", "AllegroTransformer3DModel", Row("allegro", "Allegro", "", having(hidden_size=2304))),
    *rows(
        image.LUMINA_2,
        "pixels",
        "",
        Row("z_image_pixels", "Z-Image on pixels", "ZImagePixelSpace", having(pixel_space=True)),
    ),
    *rows(image.LUMINA_2, "flux", "", Row("newbie", "NewBie", "Lumina2", having(pooled_text=True))),
    *rows(image.OMNIGEN_2, "flux", "", Row("omnigen2", "OmniGen 2", "Omnigen2")),
    *rows(newer.LENS, "", "", Row("lens", "Lens", "Lens")),
    *rows(
        image.QWEN_IMAGE,
        "flux2",
        "",
        Row("mage_flow", "Mage-Flow", "MageFlow", having(context_dim=2560, out_channels=128)),
    ),
    *rows(newer.QWEN_IMAGE_21, "", "QwenImage21Transformer2DModel", Row("qwen_image_21", "Qwen-Image 2.1")),
    *rows(newer.KREA_2, "wan21", "Krea2Transformer2DModel", Row("krea2", "Krea 2", "Krea2")),
    *rows(newer.IDEOGRAM_4, "flux2", "Ideogram4Transformer2DModel", Row("ideogram4", "Ideogram 4", "Ideogram4")),
    *rows(newer.ERNIE_IMAGE, "flux2", "ErnieImageTransformer2DModel", Row("ernie_image", "Ernie Image", "ErnieImage")),
    *rows(newer.HIDREAM_O1, "pixels", "", Row("hidream_o1", "HiDream O1", "HiDreamO1")),
    *rows(newer.BOOGU, "flux", "", Row("boogu", "Boogu", "Boogu")),
    *rows(newer.PIXEL_DIT, "pixels", "", Row("pixeldit", "PixelDiT", "PixelDiTT2I")),
    *rows(newer.PID, "pixels", "", Row("pid", "PiD", "PiD")),
    *rows(newer.GLM_IMAGE, "", "GlmImageTransformer2DModel", Row("glm_image", "GLM-Image")),
    *rows(newer.OMNIGEN, "sdxl", "OmniGenTransformer2DModel", Row("omnigen", "OmniGen")),
)
