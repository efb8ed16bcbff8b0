"""Encodes an image that an upscaler has made from the image in a file, with the metadata of that file."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, PngImagePlugin

from modelpool.actors.request.image_decoding import open_image
from modelpool.actors.request.video_output_fields import DEFAULT_QUALITY, MAX_QUALITY
from modelpool.pool.values.core.errors import UserError
from modelpool.pool.values.core.stage_params import PixelArray

#: endings of the formats that are written, by Pillow's names of them
ENDINGS = {"PNG": "png", "WEBP": "webp", "JPEG": "jpg", "MPO": "jpg", "AVIF": "avif"}
#: the orientation in XMP, as Pillow finds it, and the texts of a PNG that hold XMP, and EXIF as older programs wrote it
_XMP_ORIENTATION = re.compile(rb'(tiff:Orientation(?:="|>))[0-9]')
_XMP_TEXT, _EXIF_TEXT = "XML:com.adobe.xmp", "Raw profile type exif"
#: modes of images with a colour profile of RGB
_RGB_MODES = ("RGB", "RGBA", "P")


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """What a result keeps of the file of its source.

    ending       of the format: the file's, or "png" if it is in one that is not written
    texts        text chunks of a PNG, except for EXIF
    exif, xmp    as in the file, but upright, and so are the texts: the pixels of the result are
    profile      ICC profile of its colours; empty if the pixels had another kind of colours
    is_clear     it has transparent pixels, which become white
    """

    ending: str
    texts: tuple[tuple[str, str], ...]
    exif: bytes
    xmp: bytes
    profile: bytes
    is_clear: bool


def source_facts(name: str, path: Path) -> SourceFacts:
    """Read the metadata of an image file. Raises UserError naming the field `name`, also for damaged files."""
    with open_image(name, str(path)) as image:
        try:
            image.load()  # texts of a PNG may be located after the pixels
            info: dict[Any, Any] = image.info
            exif = image.getexif()
            exif.pop(ExifTags.Base.Orientation, None)
            content = exif.tobytes() if exif else b""
        except Exception as error:  # decoders raise arbitrary exceptions for damaged files
            raise UserError(f"{name}: {path} cannot be read as an image ({error})") from None
        texts = [
            (str(key), _upright_xmp(text.encode()).decode() if key == _XMP_TEXT else text)
            for key, text in (info.items() if image.format == "PNG" else ())
            if isinstance(text, str) and key != _EXIF_TEXT
        ]
        xmp, profile = info.get("xmp", b""), info.get("icc_profile") if image.mode in _RGB_MODES else None
        return SourceFacts(
            ENDINGS.get(image.format or "", "png"),
            tuple(texts),
            content,
            _upright_xmp(xmp if isinstance(xmp, bytes) else str(xmp).encode()),
            profile or b"",
            image.has_transparency_data,
        )


def encode_enlarged(pixels_HWC: PixelArray, facts: SourceFacts, ending: str, quality: int | None = None) -> bytes:
    """Encode pixels (uint8 RGB) in the format `ending`, with the metadata of their source. The texts of a PNG are kept
    in a PNG only."""
    image, buffer = Image.fromarray(pixels_HWC), io.BytesIO()
    kept: dict[str, Any] = {"exif": facts.exif, "icc_profile": facts.profile}
    kept = {name: value for name, value in kept.items() if value}
    level = quality or DEFAULT_QUALITY.get(ending)
    match ending:
        case "png":
            texts = PngImagePlugin.PngInfo()
            for key, text in facts.texts:
                texts.add_itxt(key, text) if not _is_latin(text) else texts.add_text(key, text)
            image.save(buffer, "PNG", pnginfo=texts, **kept)
        case "jpg":
            image.save(buffer, "JPEG", quality=level, subsampling="4:4:4", **kept, **_xmp(facts))
        case "webp":
            image.save(buffer, "WEBP", quality=level, lossless=level == MAX_QUALITY, **kept, **_xmp(facts))
        case "avif":
            image.save(buffer, "AVIF", quality=level, subsampling="4:4:4", max_threads=1, **kept, **_xmp(facts))
        case _:
            raise AssertionError(f"{ending} is no image format")
    return buffer.getvalue()


def _upright_xmp(xmp: bytes) -> bytes:
    return _XMP_ORIENTATION.sub(rb"\g<1>1", xmp)


def _xmp(facts: SourceFacts) -> dict[str, bytes]:
    return {"xmp": facts.xmp} if facts.xmp else {}


def _is_latin(text: str) -> bool:
    try:
        text.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True
