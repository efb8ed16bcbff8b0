"""Build the prompt of a text encoder that reads images together with text. Torch-free.

Source: the pipelines of diffusers 0.42 for Qwen-Image's editing models, QwenImageEditPipeline (for Qwen-Image-Edit) and
QwenImageEditPlusPipeline (for Qwen-Image-Edit 2509 and later). Other families have a template of their own
(`Reading.image_template`).
"""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.families.parts.text_reading import IMAGE_TOKEN, Padding, Reading

_IMAGE = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
_BEFORE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n"
#: largest aspect ratio of an input image. Source: `smart_resize` of transformers, which rejects others
MOST_PROPORTION = 200
#: template tokens before the images
_DROPPED = 64


def reading_with_images(reading: Reading, images: int, numbered: bool) -> Reading:
    """Return `reading` for an encoder that reads `images` images, numbered or, for a single image, unnumbered.

    Texts are not truncated. Without images, returns `reading` unchanged.
    """
    if not images or reading.is_clip or reading.sees:
        return reading
    if reading.image_template:
        return replace(reading, template=reading.image_template, most_tokens=0)
    named = (f"Picture {number}: {_IMAGE}" if numbered else _IMAGE for number in range(1, images + 1))
    return replace(
        reading,
        template=f"{_BEFORE}{''.join(named)}{{}}{_AFTER}",
        dropped_tokens=_DROPPED,
        most_tokens=0,
        is_masked=True,
        padding=Padding.DROPPED,
    )
