"""Draws a contact sheet: many images with prompt, seed and LoRAs below; of videos the first frame, of audio the
wave.

Knows drawing; not where images come from or where the sheet goes.
"""

from __future__ import annotations

import bisect
import io
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, PngImagePlugin

from modelpool.actors.graph.features.recipe import Recipe
from modelpool.actors.outputs.image_metadata import text_before_pixels
from modelpool.actors.outputs.preview_image import first_image
from modelpool.pool.values.core.errors import counted

#: more would make a sheet that cannot be opened; the sheet notes how many are left out
MOST_IMAGES = 400
_CELL_PIXELS = 192
_GAP_PIXELS = 20
_MARGIN_PIXELS = 28
_PROMPT_LINES = 2
_LINE_PIXELS = 18
_TEXT_PIXELS = 14
_BACKGROUND = (247, 247, 245)
_INK = (32, 33, 36)
_FAINT_INK = (112, 116, 122)
_FRAME = (210, 211, 209)
_LABEL_PIXELS = 8 + _LINE_PIXELS * (_PROMPT_LINES + 1)
#: a large image is reduced to this multiple of its size on the sheet before the costly filter
_REDUCED_FIRST = 3.0
#: the text of the PNG that holds the mark of a sheet
_MARK = "modelpool:drawn"

_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """The file of an image, video or audio clip, and the recipe for its label."""

    path: Path
    recipe: Recipe


def make_contact_sheet(images: Sequence[LabelledImage], mark: str = "", count: int | None = None) -> bytes:
    """Return the sheet as the bytes of a PNG. The cell of a file that cannot be read says so. `mark_of` reads `mark`
    again: it identifies the content of the sheet. `count` of all images, if these are only the first.
    """
    shown, count = images[:MOST_IMAGES], len(images) if count is None else count
    columns = columns_for(len(shown))
    rows = math.ceil(len(shown) / columns)
    pitch_x, pitch_y = _CELL_PIXELS + _GAP_PIXELS, _CELL_PIXELS + _LABEL_PIXELS + _GAP_PIXELS
    note_pixels = _LINE_PIXELS + 10 if len(shown) < count or not shown else 0
    width = 2 * _MARGIN_PIXELS + columns * pitch_x - _GAP_PIXELS
    height = 2 * _MARGIN_PIXELS + max(0, rows * pitch_y - _GAP_PIXELS) + note_pixels
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    font = _font()
    for place, image in enumerate(shown):
        row, column = divmod(place, columns)
        x, y = _MARGIN_PIXELS + column * pitch_x, _MARGIN_PIXELS + row * pitch_y
        _draw_image(sheet, pen, image.path, x, y, font)
        _draw_label(pen, image.recipe, x, y + _CELL_PIXELS + 8, font)
    if note_pixels:
        note = f"the first {len(shown)} of {counted(count, 'image')}" if shown else "no images"
        pen.text((_MARGIN_PIXELS, height - _MARGIN_PIXELS - _LINE_PIXELS), note, _FAINT_INK, font)
    texts = PngImagePlugin.PngInfo()
    if mark:
        texts.add_text(_MARK, mark)
    buffer = io.BytesIO()
    # a fifth of the time of the smallest file, for a file that is a tenth larger
    sheet.save(buffer, format="PNG", compress_level=1, compress_type=zlib.Z_RLE, pnginfo=texts)
    return buffer.getvalue()


def mark_of(path: Path) -> str:
    """Return the mark of the sheet in a file; "" if there is no such file, or none that can be read."""
    return text_before_pixels(path, _MARK)


def columns_for(count: int) -> int:
    """Return the number of columns that makes a sheet of `count` images somewhat wider than high, with a full last
    row if possible.
    """
    if count <= 4:
        return max(1, count)
    widest = min(12, max(4, math.ceil(math.sqrt(count * 1.6))))
    narrowest = min(widest, max(3, math.floor(math.sqrt(count))))
    return min(range(widest, narrowest - 1, -1), key=lambda columns: -count % columns)


def fitted_size(width: int, height: int, cell_pixels: int) -> tuple[int, int]:
    """Return the size that fits a square cell and keeps the aspect ratio, at least one pixel per side."""
    factor = cell_pixels / max(width, height)
    return max(1, round(width * factor)), max(1, round(height * factor))


def wrapped(text: str, width_pixels: int, most_lines: int, font: _Font) -> list[str]:
    """Break `text` at spaces into lines that fit; a text that is too long ends in '...'."""
    lines: list[str] = []
    words = text.split()
    while words:
        taken = 1
        while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= width_pixels:
            taken += 1
        if len(lines) == most_lines - 1:
            taken = len(words)
        line, words = " ".join(words[:taken]), words[taken:]
        lines.append(line if font.getlength(line) <= width_pixels else _shortened(line, width_pixels, font))
    return lines


def _shortened(line: str, width_pixels: int, font: _Font) -> str:
    def pixels(end: int) -> int:
        return math.ceil(font.getlength(line[:end] + "..."))

    fits = bisect.bisect_right(range(len(line)), width_pixels, key=pixels)
    line = line[:fits]
    while line and font.getlength(line + "...") > width_pixels:  # a longer text may be narrower: ligatures
        line = line[:-1]
    return line.rstrip() + "..."


def _draw_image(sheet: Image.Image, pen: ImageDraw.ImageDraw, path: Path, x: int, y: int, font: _Font) -> None:
    try:
        image = first_image(path)
    except Exception:  # decoders raise arbitrary exceptions for damaged files, and a file may be gone by now
        pen.rectangle((x, y, x + _CELL_PIXELS, y + _CELL_PIXELS), outline=_FRAME)
        pen.text((x + _TEXT_PIXELS, y + _CELL_PIXELS // 2), "damaged file", _FAINT_INK, font)
        return
    size = fitted_size(*image.size, _CELL_PIXELS)
    # Lanczos keeps drawn edges smooth; very small images would only blur, so their pixels are enlarged
    tiny = max(image.size) * 6 <= _CELL_PIXELS
    scaled = (
        image.resize(size, Image.Resampling.NEAREST)
        if tiny
        else image.resize(size, Image.Resampling.LANCZOS, reducing_gap=_REDUCED_FIRST)
    )
    left, top = x + (_CELL_PIXELS - size[0]) // 2, y + (_CELL_PIXELS - size[1]) // 2
    pen.rectangle((left - 1, top - 1, left + size[0], top + size[1]), outline=_FRAME)
    sheet.paste(scaled, (left, top))


def _draw_label(pen: ImageDraw.ImageDraw, recipe: Recipe, x: int, y: int, font: _Font) -> None:
    for line in wrapped(recipe.prompt or "(empty prompt)", _CELL_PIXELS, _PROMPT_LINES, font):
        pen.text((x, y), line, _INK, font)
        y += _LINE_PIXELS
    how = [*_length(recipe), f"seed {recipe.seed}", *(f"{lora.name} {lora.strength:g}" for lora in recipe.loras)]
    line = wrapped(", ".join(how), _CELL_PIXELS, 1, font)[0]
    pen.text((x, y), line, _FAINT_INK, font)


def _length(recipe: Recipe) -> list[str]:
    """Return the length of a video or an audio clip, or the number of layers."""
    if recipe.is_layers:
        return [counted(recipe.frames, "layer")]
    if recipe.frames and recipe.frame_rate:
        return [f"{recipe.frames / recipe.frame_rate:.1f} s video"]
    return [f"{recipe.seconds:g} s audio"] if recipe.seconds else []


def _font() -> _Font:
    return ImageFont.load_default(_TEXT_PIXELS)
