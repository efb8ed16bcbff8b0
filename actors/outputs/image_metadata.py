"""Texts in the metadata of image files: PNG text chunks; in WebP, JPEG and AVIF, EXIF and XMP.

The A1111 web UI writes its `parameters` to the EXIF field UserComment, where viewers look for them. The recipe is the
text of an element in an XMP packet, under the namespace of modelpool. Knows image files; not what the texts mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from PIL import Image

from modelpool.pool.values.core.errors import UserError, unusable_field

#: the keys of the texts
PARAMETERS_KEY, RECIPE_KEY, LABELS_KEY = "parameters", "modelpool", "modelpool-request"
#: the formats that Pillow names so
_READ_FORMATS = ("PNG", "WEBP", "JPEG", "AVIF")
#: EXIF: pointer to the Exif fields, and the field UserComment, which begins with the name of its encoding. Source:
#: Exif 3.0, sections 4.6.3 and 4.6.5
_EXIF_FIELDS, _USER_COMMENT = 0x8769, 0x9286
_UTF_16 = b"UNICODE\0"
#: bytes of a JPEG segment after its length and the name of its content. Source: ITU-T T.81, B.1.1.4; XMP part 3, 1.1.3
_MOST_JPEG_XMP, _MOST_JPEG_EXIF = 65_533 - 29, 65_533 - 6
_NAMESPACE = "urn:modelpool:xmp"
_OPENING = re.compile(rf"<modelpool:({RECIPE_KEY}|{LABELS_KEY})>")


def is_image(start: bytes) -> bool:
    """Whether a file that starts with these bytes, at least 12, is an image in a format of outputs."""
    if start[4:8] == b"ftyp":
        return start[8:12] in (b"avif", b"avis", b"mif1")
    return start.startswith((b"\x89PNG", b"\xff\xd8\xff")) or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")


def exif_of(parameters: str) -> bytes:
    """Return EXIF data with this text as UserComment. No date, so that equal texts give equal bytes."""
    exif = Image.Exif()
    exif[_EXIF_FIELDS] = {_USER_COMMENT: _UTF_16 + parameters.encode("utf-16-be", "replace")}
    return exif.tobytes()


def xmp_of(recipe: str, labels: str = "") -> bytes:
    """Return an XMP packet with these texts, as far as they are not empty."""
    texts = {name: text for name, text in ((RECIPE_KEY, recipe), (LABELS_KEY, labels)) if text}
    elements = "".join(
        f"<modelpool:{name}>{escape(text, quote=False)}</modelpool:{name}>" for name, text in texts.items()
    )
    return (
        '<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?><x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF '
        f'xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"><rdf:Description xmlns:modelpool="{_NAMESPACE}" '
        f'rdf:about="">{elements}</rdf:Description></rdf:RDF>'
        '</x:xmpmeta><?xpacket end="r"?>'
    ).encode()


def check_jpeg_metadata(exif: bytes, xmp: bytes) -> None:
    """Raise UnusableField if the metadata is too long for a JPEG."""
    if len(exif) > _MOST_JPEG_EXIF or len(xmp) > _MOST_JPEG_XMP:
        expected = f"png, webp or avif: a jpg holds {_MOST_JPEG_XMP} bytes of recipe, and this one has {len(xmp)}"
        raise unusable_field("format", "jpg", expected)


def text_before_pixels(path: Path, name: str) -> str:
    """Return a text of a PNG that precedes its pixels, which are not read; "" if there is no such file or text."""
    try:
        with Image.open(path) as image:
            return str(image.info.get(name, ""))
    except (OSError, SyntaxError, ValueError):  # Pillow raises each of them for damaged files
        return ""


def texts_of_image(path: Path) -> dict[str, str]:
    """Return the texts in an image by `PARAMETERS_KEY`, `RECIPE_KEY` and `LABELS_KEY`; of a PNG all of them. Raises
    UserError for a file that is missing, damaged or in another format.
    """
    try:
        with Image.open(path) as image:
            if image.format not in _READ_FORMATS:
                raise UserError(f"{path}: found a {image.format} file, expected {', '.join(_READ_FORMATS)}")
            image.load()  # texts of a PNG may be located after the pixels
            return texts_in(image)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError:
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for damaged files
        raise UserError(f"{path}: cannot be read as an image ({error})") from error


def texts_in(image: Image.Image) -> dict[str, str]:
    """Return the texts in a loaded image, as `texts_of_image` does."""
    texts = {str(key): value for key, value in image.info.items() if isinstance(value, str)}
    return texts if image.format == "PNG" else _texts_of_exif_and_xmp(image)


def _texts_of_exif_and_xmp(image: Image.Image) -> dict[str, str]:
    texts: dict[str, str] = {}
    comment = image.getexif().get_ifd(_EXIF_FIELDS).get(_USER_COMMENT)
    if isinstance(comment, bytes) and comment.startswith(_UTF_16):
        texts[PARAMETERS_KEY] = comment.removeprefix(_UTF_16).decode("utf-16-be", "replace")
    xmp = image.info.get("xmp", b"")
    found = _elements(xmp.decode("utf-8", "replace") if isinstance(xmp, bytes) else str(xmp))
    return texts | {name: _unescaped(text) for name, text in found}


def _elements(xmp: str) -> Iterator[tuple[str, str]]:
    """Yield the elements of modelpool by name. Linear in the length of the text, which may come from anybody, even with
    many that are not closed."""
    place, unclosed = 0, set[str]()
    while found := _OPENING.search(xmp, place):
        place, name = found.end(), found[1]
        end = -1 if name in unclosed else xmp.find(f"</modelpool:{name}>", place)
        if end < 0:
            unclosed.add(name)
            continue
        yield name, xmp[place:end]
        place = end


def _unescaped(text: str) -> str:
    """Undo `escape`. The functions of xml.sax do the same and load an HTTP client, which drivers do not need."""
    return text.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
