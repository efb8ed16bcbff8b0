"""Files and images in memory as upright pixels of 8 bits: orientations, ranges of values, transparency, refusals."""

from __future__ import annotations

import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin

from modelpool.actors.request.image_decoding import UprightImage, image_of_bytes, plain_pixels, upright_image
from modelpool.actors.request.image_fields import checked_image
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import UserError
from tests.actors.http.random_images import SHOWN, chunk, exif_of, png, turned_images

_XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
RAMP = np.arange(65536, dtype=np.uint16).reshape(256, 256)
ROUNDED = np.round(RAMP / 257).astype(np.uint8)


def read(content: bytes) -> UprightImage:
    return upright_image("image", image_of_bytes("image", content))


def saved(image: Image.Image, file_format: str = "PNG", **options: Any) -> bytes:
    content = BytesIO()
    image.save(content, file_format, **options)
    return content.getvalue()


def stored() -> Any:
    return np.random.default_rng(1).integers(0, 256, (3, 5, 3)).astype(np.uint8)


def test_every_format_and_orientation_is_upright_once() -> None:
    wrong = []
    for image in turned_images(7):
        found = read(image.content)
        if np.abs(np.asarray(found.colours, np.float64) - image.colours).max(initial=0) > image.tolerance + 1:
            wrong.append(image.label)
        again = upright_image("image", found.colours)
        if again.colours != found.colours or found.colours.info or found.colours.getexif():
            wrong.append(f"{image.label}: metadata are left")
    assert wrong == []


def test_the_orientation_may_be_in_xmp() -> None:
    texts = PngImagePlugin.PngInfo()
    texts.add_itxt("XML:com.adobe.xmp", _XMP)
    for content in (
        saved(Image.fromarray(stored()), pnginfo=texts),
        saved(Image.fromarray(stored()), "WEBP", xmp=_XMP.encode(), lossless=True),
    ):
        assert np.array_equal(np.asarray(read(content).colours), SHOWN[6](stored()))


@pytest.mark.parametrize("exif", [b"Exif\0\0nonsense", b"Exif\0\0II*\0\xff\xff\xff\x7f", exif_of(0), exif_of(9)])
def test_an_image_with_damaged_metadata_is_shown_as_it_is_stored(exif: bytes) -> None:
    assert np.array_equal(np.asarray(read(saved(Image.fromarray(stored()), exif=exif)).colours), stored())


def test_16_bit_values_are_rounded_and_not_clipped() -> None:
    """All 65,536 of them, from every file and form that has them. PIL's own conversion clips them to 255."""
    big_endian = Image.frombytes("I;16B", (256, 256), RAMP.astype(">u2").tobytes())
    forms = {
        "PNG": image_of_bytes("image", png(RAMP[..., None], 16, exif_of(1))),
        "TIFF": image_of_bytes("image", saved(Image.fromarray(RAMP), "TIFF")),
        "big-endian TIFF": image_of_bytes("image", saved(big_endian, "TIFF")),
        "PGM": image_of_bytes("image", b"P5 256 256 65535\n" + RAMP.astype(">u2").tobytes()),
        "in memory": Image.fromarray(RAMP),
        "in memory, big-endian": big_endian,
        "in memory, 32 bits": Image.fromarray(RAMP.astype(np.int32)),
    }
    wrong = [name for name, image in forms.items() if not np.array_equal(plain_pixels("image", image, True), ROUNDED)]
    assert wrong == []


def test_a_tiff_whose_white_is_zero_is_inverted() -> None:
    content = saved(Image.fromarray(RAMP), "TIFF", tiffinfo={262: 0})
    assert np.array_equal(plain_pixels("image", image_of_bytes("image", content), True), 255 - ROUNDED)


@pytest.mark.parametrize(
    ("image", "found"),
    [
        (Image.new("F", (2, 2)), "mode F"),
        (Image.new("LAB", (2, 2)), "mode LAB"),
        (Image.new("I", (2, 2), 65536), "mode I with values from 65536 to 65536"),
        (Image.new("I", (2, 2), -1), "mode I with values from -1 to -1"),
        (Image.new("I", (2, 2), 200), "mode I with values from 200 to 200"),  # of 255 or of 65535?
    ],
)
def test_what_has_no_8_bit_meaning_is_refused_by_its_mode(image: Image.Image, found: str) -> None:
    with pytest.raises(UserError, match=rf"^reference: found 'an image of {found}', expected 8 bits per channel"):
        GenerateRequest(model="m", prompt="", reference=image)
    with pytest.raises(UserError, match=rf"^image: found 'an image of {found}'"):
        read(saved(image, "TIFF"))


def test_a_tiff_of_12_bits_is_refused() -> None:
    entries = [(256, 3, 1, 2), (257, 3, 1, 1), (258, 3, 1, 12), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    entries += [(277, 3, 1, 1), (278, 3, 1, 1), (279, 4, 1, 3)]
    table = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    content = b"II*\0" + struct.pack("<I", 12) + b"\xff\xf0\x00\0" + table + bytes(4)
    with pytest.raises(UserError, match="image: found 'an image of 12 bits per channel'"):
        read(content)


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, np.float32])
def test_arrays_and_tensors_of_other_types_are_refused_by_name(dtype: Any) -> None:
    for name, shape in (("image", (8, 8, 3)), ("reference", (8, 8, 3)), ("video", (1, 8, 8, 3))):
        fields: dict[str, Any] = {name: np.zeros(shape, dtype)}
        with pytest.raises(UserError, match=rf"{name}: found 'an array .* of {np.dtype(dtype)}'"):
            GenerateRequest(model="m", prompt="", **fields)
    with pytest.raises(UserError, match=rf"mask: found 'an array .* of {np.dtype(dtype)}'"):
        checked_image("mask", np.zeros((8, 8), dtype), is_mask=True)
    with pytest.raises(UserError, match="image: found 'Tensor', expected the path of an image"):
        checked_image("image", torch.zeros(3, 8, 8))


def test_one_transparent_grey_value_of_few_or_many_bits() -> None:
    """A PNG names it before it is scaled to 8 bits."""

    def of(depth: int, samples: bytes, key: int, width: int) -> bytes:
        header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, 0, 0, 0, 0))
        data = header + chunk(b"tRNS", struct.pack(">H", key)) + chunk(b"IDAT", zlib.compress(b"\0" + samples))
        return b"\x89PNG\r\n\x1a\n" + data + chunk(b"IEND", b"")

    cases = {
        1: (of(1, b"\x80", 1, 2), [255, 0], [0, 255]),
        2: (of(2, b"\x1b", 2, 4), [0, 85, 170, 255], [255, 255, 0, 255]),
        4: (of(4, b"\x3f", 3, 2), [51, 255], [0, 255]),
        8: (of(8, b"\x05\xc8", 5, 2), [5, 200], [0, 255]),
        16: (of(16, b"\0\x05\0\x06", 5, 2), [0, 0], [0, 255]),
    }
    wrong = {}
    for depth, (content, grey, alpha) in cases.items():
        image = read(content)
        assert image.alpha is not None, depth
        found = np.asarray(image.colours)[0, :, 0].tolist(), np.asarray(image.alpha)[0].tolist()
        if found != (grey, alpha):
            wrong[depth] = found
    assert wrong == {}


def test_a_transparent_colour_of_16_bits_is_refused() -> None:
    content = png(np.zeros((1, 1, 3)), 16, exif_of(1), chunk(b"tRNS", bytes(6)))
    with pytest.raises(UserError, match="image: found 'an image with 16 bits per channel and a transparent colour'"):
        read(content)


def test_every_mode_with_transparency_keeps_the_colours_apart() -> None:
    clear = Image.new("RGBA", (4, 4), (200, 100, 50, 128))
    grey = Image.new("LA", (4, 4), (200, 128))
    palette = Image.new("PA", (4, 4), (1, 128))
    palette.putpalette([0, 0, 0, 9, 99, 199])
    modes = {
        "RGBA": (clear, (200, 100, 50)),
        "RGBa": (clear.convert("RGBa"), (200, 100, 50)),
        "LA": (grey, (200, 200, 200)),
        "La": (grey.convert("La"), (200, 200, 200)),
        "PA": (palette, (9, 99, 199)),
    }
    for mode, (image, colour) in modes.items():
        assert image.mode == mode
        found = upright_image("image", image)
        assert found.alpha is not None
        assert np.abs(np.subtract(found.colours.getpixel((1, 1)), colour)).max() <= 1, mode
        assert (found.alpha.getpixel((1, 1)), image.mode) == (128, mode)
