"""Outputs as the bytes of an image file in the format that a caller wants."""

from __future__ import annotations

import base64
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from modelpool.actors.http.service.problems import HttpProblem
from modelpool.actors.request.video_output_fields import IMAGE_FORMATS

if TYPE_CHECKING:
    from PIL.Image import Image

#: formats of the OpenAI API that Pillow writes, by name
FORMATS = ("png", "jpeg", "webp")
BEST_QUALITY = 100


def image_bytes(path: Path, file_format: str = "png", quality: int = BEST_QUALITY) -> bytes:
    """Return the image at `path` in a format of `FORMATS`; a PNG as it is, with its recipe, and a file of the format ""
    as it is. Raises HttpProblem (410 if it is gone, 409 if it is no image).
    """
    try:
        content = path.read_bytes()
    except OSError:
        raise HttpProblem(410, f"{path.name}: the output was removed from the server") from None
    suffix = path.suffix.removeprefix(".")
    if suffix not in IMAGE_FORMATS:
        raise HttpProblem(409, f"{path.name}: this interface returns images; read videos and audio from /api/jobs")
    if not file_format or file_format == suffix == "png":
        return content
    from PIL import Image

    converted = BytesIO()
    with Image.open(BytesIO(content)) as image:
        plain = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if plain.mode == "RGBA" and file_format == "jpeg":  # which has no transparency: over white, as images of callers
        plain = Image.alpha_composite(Image.new("RGBA", plain.size, "white"), plain).convert("RGB")
    plain.save(converted, file_format.upper(), quality=quality)
    return converted.getvalue()


def format_of(path: Path) -> str:
    """Return the format of an image file by the name that the OpenAI API and media types have for it."""
    suffix = path.suffix.removeprefix(".")
    return "jpeg" if suffix == "jpg" else suffix


def image_size(path: Path) -> tuple[int, int]:
    """Return width and height of the image at `path`. Raises HttpProblem as `image_bytes`."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return image.size
    except UnidentifiedImageError:
        raise HttpProblem(409, f"{path.name}: this interface returns images") from None
    except OSError:
        raise HttpProblem(410, f"{path.name}: the output was removed from the server") from None


def image_text(path: Path, file_format: str = "png", quality: int = BEST_QUALITY) -> str:
    """Return the same as base64."""
    return base64.b64encode(image_bytes(path, file_format, quality)).decode()


def png_text(image: Image) -> str:
    """Return an image as base64 of a PNG."""
    content = BytesIO()
    image.save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()
