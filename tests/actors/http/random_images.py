"""Random image files and the pixels that they show, by an account of their own: numpy and the specifications of PNG and
EXIF, without the decoder under test.

Shape legend: H W height and width as shown; h w as stored; C channels.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

#: stored pixels as they are shown, by EXIF orientation: where row 0 and column 0 of the file are in the shown image
SHOWN: dict[int, Callable[[Any], Any]] = {
    1: lambda a: a,  # top, left
    2: lambda a: a[:, ::-1],  # top, right
    3: lambda a: a[::-1, ::-1],  # bottom, right
    4: lambda a: a[::-1],  # bottom, left
    5: lambda a: a.swapaxes(0, 1),  # left, top
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],  # right, top
    7: lambda a: a.swapaxes(0, 1)[::-1, ::-1],  # right, bottom
    8: lambda a: a.swapaxes(0, 1)[::-1],  # left, bottom
}
#: two multiples of 8, so that no interface scales them
STORED_HEIGHT, STORED_WIDTH = 16, 24
_COLOURS_OF_PNG = {1: 0, 2: 4, 3: 2, 4: 6}


@dataclass(frozen=True)
class RandomImage:
    """A file and what it shows: `colours` [H, W, 3], and `alpha` [H, W] or None; or the mode that a refusal names.

    tolerance  levels by which a lossy format, or the high bytes of 16-bit colours and alpha values, may differ
    """

    label: str
    content: bytes
    colours: Any = None
    alpha: Any = None
    tolerance: int = 0
    refused: str = ""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height as shown; those of the file if it is refused."""
        height, width = (STORED_HEIGHT, STORED_WIDTH) if self.colours is None else self.colours.shape[:2]
        return width, height

    def over(self, background: int) -> Any:
        """Return the colours over a grey background."""
        if self.alpha is None:
            return self.colours.astype(np.float64)
        share = self.alpha[..., None] / 255.0
        return self.colours * share + background * (1 - share)

    def clear(self) -> Any:
        """Return where it is transparent."""
        return np.zeros(self.colours.shape[:2]) if self.alpha is None else 255.0 - self.alpha

    def red(self) -> Any:
        """Return the red channel."""
        return self.colours[..., 0]

    def mask(self) -> Any:
        """Return the brightness over black. Source of the weights: ITU-R BT.601."""
        return self.over(0) @ np.array([0.299, 0.587, 0.114])


def random_images(seed: int) -> Iterator[RandomImage]:
    """Every kind of file with two orientations, and one kind with all of them."""
    orientations = list(SHOWN) * 8
    random.Random(seed).shuffle(orientations)
    for orientation in SHOWN:
        yield _rgb_png(np.random.default_rng(seed + orientation), orientation)
    for place, kind in enumerate(2 * _KINDS):
        yield kind(np.random.default_rng(seed + 100 + place), orientations[place])


def turned_images(seed: int) -> Iterator[RandomImage]:
    """Every format that has an orientation, with all of them."""
    for kind in (_rgb_png, _jpeg, _clear_webp, _grey_16_tiff, _avif):
        for orientation in SHOWN:
            yield kind(np.random.default_rng(seed + orientation), orientation)


def exif_of(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png(samples_hwC: Any, depth: int, exif: bytes, chunks: bytes = b"", colour_type: int | None = None) -> bytes:
    """A PNG of whole samples. Source: PNG specification, sections 11.2 and 11.3."""
    height, width, channels = samples_hwC.shape
    rows = samples_hwC.astype(">u2" if depth == 16 else np.uint8)
    kind = _COLOURS_OF_PNG[channels] if colour_type is None else colour_type
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    turned = chunk(b"eXIf", exif.removeprefix(b"Exif\0\0"))
    return b"".join(
        (b"\x89PNG\r\n\x1a\n", chunk(b"IHDR", header), turned, chunks, chunk(b"IDAT", data), chunk(b"IEND", b""))
    )


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _stored(rng: Any, channels: int, values: int = 256) -> Any:
    return rng.integers(0, values, (STORED_HEIGHT, STORED_WIDTH, channels))


def _rounded(values: Any) -> Any:
    return np.round(values / 257).astype(np.uint8)


def _saved(image: Image.Image, file_format: str, orientation: int, **options: Any) -> bytes:
    content = BytesIO()
    image.save(content, file_format, exif=exif_of(orientation), **options)
    return content.getvalue()


def _rgb_png(rng: Any, orientation: int) -> RandomImage:
    stored, shown = _stored(rng, 3), SHOWN[orientation]
    return RandomImage(f"RGB PNG {orientation}", png(stored, 8, exif_of(orientation)), shown(stored))


def _grey_png(rng: Any, orientation: int) -> RandomImage:
    stored = _stored(rng, 1)
    shown = SHOWN[orientation](stored.repeat(3, axis=2))
    return RandomImage(f"L PNG {orientation}", png(stored, 8, exif_of(orientation)), shown)


def _clear_png(rng: Any, orientation: int) -> RandomImage:
    stored, shown = _stored(rng, 4), SHOWN[orientation]
    content = png(stored, 8, exif_of(orientation))
    return RandomImage(f"RGBA PNG {orientation}", content, shown(stored[..., :3]), shown(stored[..., 3]))


def _clear_grey_png(rng: Any, orientation: int) -> RandomImage:
    stored, shown = _stored(rng, 2), SHOWN[orientation]
    colours = shown(stored[..., :1].repeat(3, axis=2))
    return RandomImage(f"LA PNG {orientation}", png(stored, 8, exif_of(orientation)), colours, shown(stored[..., 1]))


def _palette_png(rng: Any, orientation: int) -> RandomImage:
    """With an alpha value for each of its 5 colours."""
    palette, alphas = rng.integers(0, 256, (5, 3)).astype(np.uint8), np.array([0, 77, 128, 254, 255], np.uint8)
    stored, shown = _stored(rng, 1, 5), SHOWN[orientation]
    chunks = chunk(b"PLTE", palette.tobytes()) + chunk(b"tRNS", alphas.tobytes())
    content = png(stored, 8, exif_of(orientation), chunks, colour_type=3)
    return RandomImage(
        f"P PNG {orientation}", content, shown(palette[stored[..., 0]].astype(int)), shown(alphas[stored[..., 0]])
    )


def _keyed_png(rng: Any, orientation: int) -> RandomImage:
    """With one transparent grey value."""
    stored, shown = _stored(rng, 1, 4) * 60, SHOWN[orientation]
    content = png(stored, 8, exif_of(orientation), chunk(b"tRNS", struct.pack(">H", 120)))
    alpha = np.where(stored[..., 0] == 120, 0, 255)
    return RandomImage(f"L key PNG {orientation}", content, shown(stored.repeat(3, axis=2)), shown(alpha))


def _bits_png(rng: Any, orientation: int) -> RandomImage:
    """One bit for each pixel: 24 pixels are 3 bytes of a row."""
    bits, shown = _stored(rng, 1, 2)[..., 0], SHOWN[orientation]
    header = struct.pack(">IIBBBBB", STORED_WIDTH, STORED_HEIGHT, 1, 0, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + np.packbits(row).tobytes() for row in bits))
    turned = chunk(b"eXIf", exif_of(orientation).removeprefix(b"Exif\0\0"))
    content = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + turned + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return RandomImage(f"1 PNG {orientation}", content, shown((bits * 255)[..., None].repeat(3, axis=2)))


def _grey_16_png(rng: Any, orientation: int) -> RandomImage:
    stored = _stored(rng, 1, 65536)
    shown = SHOWN[orientation](_rounded(stored).repeat(3, axis=2))
    return RandomImage(f"16-bit grey PNG {orientation}", png(stored, 16, exif_of(orientation)), shown)


def _clear_grey_16_png(rng: Any, orientation: int) -> RandomImage:
    stored, shown = _stored(rng, 2, 65536), SHOWN[orientation]
    whole = _rounded(stored)
    content = png(stored, 16, exif_of(orientation))
    colours = shown(whole[..., :1].repeat(3, axis=2))
    return RandomImage(f"16-bit LA PNG {orientation}", content, colours, shown(whole[..., 1]), tolerance=2)


def _rgb_16_png(rng: Any, orientation: int) -> RandomImage:
    stored = _stored(rng, 3, 65536)
    content = png(stored, 16, exif_of(orientation))
    return RandomImage(f"16-bit RGB PNG {orientation}", content, SHOWN[orientation](_rounded(stored)), tolerance=1)


def _clear_16_png(rng: Any, orientation: int) -> RandomImage:
    stored, shown = _stored(rng, 4, 65536), SHOWN[orientation]
    whole, content = _rounded(stored), png(stored, 16, exif_of(orientation))
    return RandomImage(f"16-bit RGBA PNG {orientation}", content, shown(whole[..., :3]), shown(whole[..., 3]), 2)


def _grey_16_tiff(rng: Any, orientation: int) -> RandomImage:
    stored = _stored(rng, 1, 65536)
    content = _saved(Image.fromarray(stored[..., 0].astype(np.uint16)), "TIFF", orientation)
    return RandomImage(f"I;16 TIFF {orientation}", content, SHOWN[orientation](_rounded(stored).repeat(3, axis=2)))


def _big_endian_tiff(rng: Any, orientation: int) -> RandomImage:
    stored = _stored(rng, 1, 65536)
    image = Image.frombytes("I;16B", (STORED_WIDTH, STORED_HEIGHT), stored.astype(">u2").tobytes())
    content = _saved(image, "TIFF", orientation)
    return RandomImage(f"I;16B TIFF {orientation}", content, SHOWN[orientation](_rounded(stored).repeat(3, axis=2)))


def _cmyk_tiff(rng: Any, orientation: int) -> RandomImage:
    stored = _stored(rng, 4)
    ink, black = stored[..., :3] / 255, stored[..., 3:] / 255
    colours = np.clip(255 * ((1 - black) - ink * (1 - black)), 0, 255)
    content = _saved(Image.frombytes("CMYK", (24, 16), stored.astype(np.uint8).tobytes()), "TIFF", orientation)
    return RandomImage(f"CMYK TIFF {orientation}", content, SHOWN[orientation](colours), tolerance=1)


def _clear_webp(rng: Any, orientation: int) -> RandomImage:
    stored, shown = _stored(rng, 4).astype(np.uint8), SHOWN[orientation]
    content = _saved(Image.fromarray(stored), "WEBP", orientation, lossless=True, exact=True)
    return RandomImage(f"RGBA WebP {orientation}", content, shown(stored[..., :3].astype(int)), shown(stored[..., 3]))


def _squares(rng: Any, channels: int) -> Any:
    """Squares of one colour, which formats of blocks of 8x8 pixels hold well."""
    small = rng.integers(0, 256, (STORED_HEIGHT // 8, STORED_WIDTH // 8, channels))
    return small.repeat(8, axis=0).repeat(8, axis=1).astype(np.uint8)


def _jpeg(rng: Any, orientation: int) -> RandomImage:
    stored = _squares(rng, 3)
    content = _saved(Image.fromarray(stored), "JPEG", orientation, quality=100, subsampling=0)
    return RandomImage(f"RGB JPEG {orientation}", content, SHOWN[orientation](stored.astype(int)), tolerance=4)


def _cmyk_jpeg(rng: Any, orientation: int) -> RandomImage:
    stored = _squares(rng, 4)
    ink, black = stored[..., :3] / 255, stored[..., 3:] / 255
    colours = 255 * (1 - black) * (1 - ink)
    image = Image.frombytes("CMYK", (STORED_WIDTH, STORED_HEIGHT), stored.tobytes())
    content = _saved(image, "JPEG", orientation, quality=100, subsampling=0)
    return RandomImage(f"CMYK JPEG {orientation}", content, SHOWN[orientation](colours), tolerance=6)


def _avif(rng: Any, orientation: int) -> RandomImage:
    stored = _squares(rng, 3)
    content = _saved(Image.fromarray(stored), "AVIF", orientation, quality=100, subsampling="4:4:4", max_threads=1)
    return RandomImage(f"RGB AVIF {orientation}", content, SHOWN[orientation](stored.astype(int)), tolerance=6)


def _animated_gif(rng: Any, orientation: int) -> RandomImage:
    """GIF has no orientation; the first frame counts."""
    stored = _squares(rng, 3)
    content = BytesIO()
    later = Image.new("RGB", (STORED_WIDTH, STORED_HEIGHT), "blue")
    Image.fromarray(stored).save(content, "GIF", save_all=True, append_images=[later])
    return RandomImage("animated GIF", content.getvalue(), stored.astype(int))


def _float_tiff(rng: Any, orientation: int) -> RandomImage:
    image = Image.fromarray(rng.random((STORED_HEIGHT, STORED_WIDTH), np.float32))
    return RandomImage(f"F TIFF {orientation}", _saved(image, "TIFF", orientation), refused="mode F")


def _wide_tiff(rng: Any, orientation: int) -> RandomImage:
    image = Image.fromarray(rng.integers(0, 1 << 20, (STORED_HEIGHT, STORED_WIDTH)).astype(np.int32))
    return RandomImage(f"I TIFF {orientation}", _saved(image, "TIFF", orientation), refused="mode I ")


def _lab_tiff(rng: Any, orientation: int) -> RandomImage:
    image = Image.frombytes("LAB", (STORED_WIDTH, STORED_HEIGHT), _stored(rng, 3).astype(np.uint8).tobytes())
    return RandomImage(f"LAB TIFF {orientation}", _saved(image, "TIFF", orientation), refused="mode LAB")


_KINDS: tuple[Callable[[Any, int], RandomImage], ...] = (
    *(_grey_png, _clear_png, _clear_grey_png, _palette_png, _keyed_png, _bits_png),
    *(_grey_16_png, _clear_grey_16_png, _rgb_16_png, _clear_16_png, _grey_16_tiff, _big_endian_tiff),
    *(_cmyk_tiff, _clear_webp, _jpeg, _cmyk_jpeg, _avif, _animated_gif),
    *(_float_tiff, _wide_tiff, _lab_tiff),
)
