"""The prompt of a language model that writes the tokens of an image, and the order of these. Torch-free.

A token stands for 32 x 32 pixels. After a text alone, the model writes a small image first and then the image itself;
after reference images, only the latter. Source: diffusers' GlmImagePipeline, transformers' GlmImageProcessor, and the
chat template of zai-org/GLM-Image.
"""

from __future__ import annotations

import math
from dataclasses import replace

from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.values.core.written_tokens import TOKEN_SIDE, WrittenTokens

#: tokens around an image: both for reference images, only the first for the image to write. Image tokens have lower
#: ids
IMAGE_START, IMAGE_END = "<|dit_token_16384|>", "<|dit_token_16385|>"
#: the token of a template for a reference image
REFERENCE_TOKEN = "<|image|>"
#: limits of the sides of a reference image in pixels, and of the ratio of its sides. Source: `smart_resize` of
#: transformers' image processor, and its settings in zai-org/GLM-Image
LEAST_SIDE, MOST_SIDE, MOST_RATIO = 512, 2048, 4
#: sides of the small image, if they are equal
_SMALL_SIDE = 16


def written_reading(reading: Reading, written: WrittenTokens, images: int) -> Reading:
    """Return `reading` with the template of a prompt for the image to be written, about `images` reference images."""
    sizes = "".join(f"<sop>{rows} {columns}<eop>" for rows, columns in reversed(written_grids(written, images)))
    shown = f"{IMAGE_START}{REFERENCE_TOKEN}{IMAGE_END}" * images
    return replace(reading, template=f"{shown}{{}}{sizes}{IMAGE_START}")


def reference_sides(width: int, height: int) -> tuple[int, int]:
    """Return the width and height in which a reference image of this size is read: its own as far as the limits allow,
    in whole tokens."""
    scale = max(1.0, LEAST_SIDE / min(width, height))
    scale = min(scale, MOST_SIDE / max(width, height))
    sides = (max(LEAST_SIDE, round(side * scale / TOKEN_SIDE) * TOKEN_SIDE) for side in (width, height))
    wide, high = sides
    return wide, high


def written_grids(written: WrittenTokens, images: int) -> tuple[tuple[int, int], ...]:
    """Return rows and columns of the images that are written, in order: the last one is the image itself."""
    rows, columns = written.height // TOKEN_SIDE, written.width // TOKEN_SIDE
    if images:
        return ((rows, columns),)
    ratio = rows / columns
    small = int(math.sqrt(ratio) * _SMALL_SIDE), int(math.sqrt(1 / ratio) * _SMALL_SIDE)
    return small, (rows, columns)


def tokens_written(written: WrittenTokens, images: int) -> int:
    """Return the number of tokens of all images that are written."""
    return sum(rows * columns for rows, columns in written_grids(written, images))
