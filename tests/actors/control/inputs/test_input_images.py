"""Images that requests name: checked at the door, brought once, at the size that they are used in, as a hash."""

from __future__ import annotations

import io
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, features
from PIL.PngImagePlugin import PngImageFile

from modelpool.actors.control.inputs import input_images as given_images
from modelpool.actors.control.inputs.input_images import InputImages, wanted_size
from modelpool.actors.graph.common.input_ids import input_image_id
from modelpool.actors.request.field_table import SIZE_STEP
from modelpool.actors.request.image_decoding import MAX_PIXELS, MAX_SIDE
from modelpool.actors.request.image_fields import InputImage, Pixels, skipped_steps
from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.inference.pixels.image_ops import covering, pasted
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.stage_params import ImagePixels, Mask, Result
from tests.each_case import each_case

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (40, 64, 3), np.uint8)
MASK = np.zeros((40, 64), np.uint8)
MASK[10:20, 8:40] = 255


def request(**fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"model": "shapes", "prompt": "p", "seed": 1, **fields})


def bring(**fields: Any) -> tuple[GenerateRequest, list[Result]]:
    """A request as it is sent, and the results that were put where workers find them."""
    put: list[Result] = []
    sent, refs = InputImages(lambda result: put.append(result) or len(put) - 1).bring(request(**fields))
    assert list(refs.values()) == list(range(len(put)))
    return sent, put


@pytest.mark.parametrize("kind", ["file", "path", "pillow", "array"])
def test_a_image_comes_in_every_form(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    forms = {"file": str(path), "path": path, "pillow": Image.fromarray(PIXELS), "array": PIXELS}
    sent, (image,) = bring(image=forms[kind])
    assert isinstance(image, ImagePixels)
    assert (image.pixels_HWC == PIXELS).all()
    other, _ = bring(image=PIXELS)
    assert isinstance(sent.image, InputImage)
    assert sent.image.sha256 == other.image.sha256
    assert sent.image.file == ("a.png" if kind in ("file", "path") else "")
    assert (sent.image.width, sent.image.height) == (64, 40)
    assert (sent.width, sent.height) == (None, None)


def test_what_is_sent_is_a_hash_and_no_image() -> None:
    large = RNG.integers(0, 256, (512, 512, 3), np.uint8)
    sent, _ = bring(image=large, mask=large[:, :, 0] > 10)
    assert len(pickle.dumps(sent)) < 4096


def test_what_is_changed_after_the_request_was_made_changes_nothing() -> None:
    pixels = PIXELS.copy()
    asked = request(image=pixels)
    pixels[:] = 0
    assert isinstance(asked.image, Pixels)
    assert (asked.image.pixels == PIXELS).all()
    assert asked == request(image=PIXELS)
    assert pickle.loads(pickle.dumps(asked)) == asked


def test_a_mask_is_scaled_with_its_image() -> None:
    """And the same pixels in another size are another image."""
    sent, (image, mask) = bring(image=PIXELS, mask=MASK, width=48)
    assert isinstance(image, ImagePixels)
    assert isinstance(mask, Mask)
    assert image.pixels_HWC.shape == (32, 48, 3)
    assert mask.values_HW.shape == (32, 48)
    whole, _ = bring(image=PIXELS, mask=MASK == 255)
    assert sent.image.sha256 != whole.image.sha256
    assert input_image_id(sent.mask, is_mask=True) != input_image_id(whole.mask, is_mask=True)


@given(st.integers(1, 5000), st.integers(1, 5000), st.none() | st.integers(1, 64), st.none() | st.integers(1, 64))
def test_sizes_are_whole_steps_and_what_is_said_holds(own_width, own_height, width, height) -> None:
    said = [None if n is None else n * SIZE_STEP for n in (width, height)]
    try:
        found = wanted_size(*said, (own_width, own_height))
    except UnusableField as refused:
        assert None in said and said != [None, None]  # noqa: PT018
        assert str(refused).startswith("width" if said[0] is None else "height")  # noqa: PT017
        side = next(n for n in said if n is not None)
        other = side * own_width / own_height if said[0] is None else side * own_height / own_width
        assert other > MAX_SIDE - SIZE_STEP or other * side > MAX_PIXELS - side * SIZE_STEP
        return
    assert max(found) <= MAX_SIDE
    assert found[0] * found[1] <= MAX_PIXELS
    for side, asked, own in zip(found, said, (own_width, own_height), strict=True):
        assert side % SIZE_STEP == 0
        assert side > 0
        if asked is not None:
            assert side == asked
        elif said == [None, None] and own >= SIZE_STEP:
            assert own - SIZE_STEP < side <= own


def test_a_image_covers_its_size_and_is_cropped_about_its_centre() -> None:
    wide = np.zeros((20, 60, 3), np.uint8)
    wide[:, 20:40] = 255
    assert (covering(wide, 20, 20) == 255).all()
    assert covering(wide, 60, 20) is wide
    assert covering(wide, 30, 40).shape == (40, 30, 3)


@given(st.integers(0, 255))
def test_what_a_mask_keeps_is_kept_to_the_bit(value: int) -> None:
    new, kept = RNG.integers(0, 256, (2, 5, 7, 3), np.uint8)
    mask = np.full((5, 7), value, np.uint8)
    mixed = pasted(new, kept, mask)
    low, high = np.minimum(new, kept), np.maximum(new, kept)
    assert ((low <= mixed) & (mixed <= high)).all()
    if value in (0, 255):
        assert (mixed == (new if value else kept)).all()


def test_a_image_is_read_once_for_all_requests_that_use_it_in_one_size(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    put: list[Result] = []
    images = InputImages(lambda result: put.append(result) or len(put))
    for seed in range(3):
        images.bring(request(image=path, seed=seed))
    assert len(put) == 1
    images.bring(request(image=path, width=32))
    Image.fromarray(PIXELS[:32]).save(path)
    changed, _ = images.bring(request(image=path))
    assert len(put) == 3
    assert changed.image.height == 32


def test_images_are_upright_opaque_and_of_three_colours(tmp_path: Path) -> None:
    turned = Image.fromarray(PIXELS)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert bring(image=tmp_path / "turned.jpg")[0].image.height == 64
    clear = Image.fromarray(np.dstack([PIXELS, np.zeros((40, 64), np.uint8)]))
    assert (bring(image=clear)[1][0].pixels_HWC == 255).all()
    grey = Image.fromarray(PIXELS[:, :, 0])
    assert (bring(image=grey)[1][0].pixels_HWC == PIXELS[:, :, :1]).all()


@each_case(
    ("fields", "message"),
    [
        ({"image": "nowhere.png"}, r"image: found 'nowhere.png', expected an existing file"),
        ({"image": 7}, r"image: found 'int', expected the path of an image"),
        ({"image": PIXELS.astype(float)}, r"image: found 'an array \[40, 64, 3\] of float64'"),
        ({"image": PIXELS[:, :, 0]}, r"image: found 'an array \[40, 64\] of uint8'"),
        ({"image": np.zeros((0, 5, 3), np.uint8)}, r"image: found 'an image of 5x0 pixels'"),
        ({"image": Image.new("F", (8, 8))}, r"image: found 'an image of mode F', expected 8 bits per channel"),
        ({"image": PIXELS, "mask": PIXELS}, r"mask: found 'an array \[40, 64, 3\] of uint8'"),
        ({"mask": MASK}, r"mask requires image"),
        ({"strength": 0.5}, r"strength requires image"),
        ({"image": PIXELS, "strength": 0.0}, r"strength: found 0.0, expected a number above 0"),
        ({"image": PIXELS, "strength": 1.5}, r"strength: found 1.5"),
        ({"image": PIXELS, "mask": MASK, "hires": 2}, r"hires cannot be combined with mask"),
        ({"controls": ["canny:0.5"]}, r"controls.image: missing; set it to the path .* the field image"),
        ({"controls": ["canny=nowhere.png:1"]}, r"controls.image: found 'nowhere.png', expected an existing file"),
        ({"controls": [{"model": "canny", "image": None}]}, r"controls.image: missing"),
        (
            {"image": PIXELS, "controls": [{"model": "c", "mask": PIXELS}]},
            r"controls.mask: found 'an array \[40, 64, 3\]",
        ),
        ({"controls": [{"model": "canny", "image": PIXELS, "strength": -1}]}, r"controls.strength: found -1"),
        ({"controls": [{"model": "canny", "image": PIXELS, "mode": -1}]}, r"controls.mode: found -1, expected"),
        ({"controls": [{"model": "canny", "image": PIXELS, "mode": 1.5}]}, r"controls.mode: found 1.5"),
        (
            {"controls": [{"model": "canny", "image": PIXELS, "end": 0}]},
            r"controls.start, controls.end: found '0 to 0'",
        ),
        ({"regions": ["0,0,8=x"]}, r"regions: found '0,0,8=x', expected X,Y,WIDTH,HEIGHT=TEXT"),
        ({"regions": [{"prompt": "x"}]}, r"regions: found 'neither', expected either a box or a mask for 'x'"),
        ({"regions": [{"prompt": "x", "mask": MASK, "box": (0, 0, 8, 8)}]}, r"regions: found 'both'"),
        ({"regions": [{"prompt": "x", "box": (0, 0, 0, 8)}]}, r"regions.box: found \(0, 0, 0, 8\)"),
        ({"regions": [{"prompt": "x", "box": (0, 0, 8, 8), "strength": -1}]}, r"regions.strength: found -1"),
        ({"hires": 9}, r"hires.scale: found 9.0, expected a number above 1 up to 8"),
        ({"hires": "2:0"}, r"hires.strength: found 0.0"),
        ({"hires": "1:2:3:4"}, r"hires: found '1:2:3:4', expected SCALE"),
        ({"hires": {"scale": 2, "by": 3}}, r"unknown field of Hires 'by'"),
        ({"hires": {"via": "magic"}}, r"via: found 'magic'"),
        ({"regions": ["0,0,8,8=x"] * 17}, r"regions: found '17 entries', expected up to 16: each is computed"),
        ({"controls": ["canny=nowhere.png"] * 17}, r"controls: found '17 entries', expected up to 16"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        request(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask": MASK[:, :32]}, r"mask: found '32x40', expected 64x40 pixels, the size of the image"),
        ({"mask": MASK * 0}, r"mask: found 'a black mask'"),
        (
            {"mask": MASK // 255},
            r"mask: found 'a mask whose brightest pixel is 1 of 255', expected white \(255\).*bool",
        ),
        ({"mask": MASK // 2}, r"mask: found 'a mask whose brightest pixel is 127 of 255'"),
        ({"controls": [{"model": "c", "mask": MASK[:8]}]}, r"controls.mask: found '64x8', expected 64x40 pixels"),
        (
            {"controls": [{"model": "c", "image": PIXELS[:8], "mask": MASK}]},
            r"controls.mask: found '64x40', expected 64x8 pixels",
        ),
        ({"controls": [{"model": "c", "mask": MASK // 255}]}, r"controls.mask: found 'a mask whose .* is 1 of 255'"),
        ({"regions": [{"prompt": "x", "mask": MASK // 255}]}, r"regions.mask: found 'a mask whose .* is 1 of 255'"),
    ],
)
def test_images_that_do_not_go_together_are_refused_when_they_are_brought(fields, message) -> None:
    with pytest.raises(UnusableField, match=message):
        bring(image=PIXELS, **fields)


@pytest.mark.parametrize(
    ("shape", "said", "message"),
    [
        ((4000, 100), {"width": 1024}, r"height: found '1024x40960, in proportion to an image of 100x4000', expected"),
        ((16384, 1), {"width": 512}, r"height: found '512x8388608, in proportion"),
        ((8, 16384), {"height": 16384}, r"width: found '33554432x16384, in proportion"),
        ((1000, 900), {"height": 8192 + 512}, r"width: found '7832x8704, in proportion.* and 67108864 pixels in total"),
        ((40, 64), {"height": 8200, "width": 8200}, r"width, height: found '8200x8200', expected"),
    ],
)
def test_sizes_in_which_a_image_would_be_too_large_are_refused_before_it_is_scaled(
    shape: tuple[int, int], said: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given_images, "covering", lambda *_: pytest.fail("it is scaled"))
    with pytest.raises(UnusableField, match=message):
        bring(image=np.zeros((*shape, 3), np.uint8), **said)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes have names on POSIX alone")
@pytest.mark.parametrize("field", ["image", "mask", "reference", "controls.image", "regions.mask"])
def test_a_pipe_is_no_image_and_nobody_waits_for_it(field: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    fields: dict[str, Any] = {
        "image": {"image": pipe},
        "mask": {"image": PIXELS, "mask": pipe},
        "reference": {"reference": pipe},
        "controls.image": {"controls": [f"canny={pipe}"]},
        "regions.mask": {"regions": [{"prompt": "x", "mask": pipe}]},
    }[field]
    with pytest.raises(UserError, match=rf"^{field}: .*pipe\.png: not a regular file, expected an image"):
        request(**fields)
    with pytest.raises(UserError, match=r"^image: .*: a folder, expected an image"):
        request(image=tmp_path)


def test_a_file_that_became_a_pipe_meanwhile_is_refused_when_it_is_brought(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    asked = request(image=path)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"^image: .*a\.png: a folder"):
        InputImages(lambda result: result).bring(asked)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "AVIF", "JPEG2000", "GIF", "BMP", "TIFF", "PPM", "TGA", "QOI"])
def test_images_are_read_in_the_formats_of_pixels(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    Image.init()
    if kind not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {kind}")
    Image.fromarray(PIXELS).save(path, kind)
    assert bring(image=path)[1][0].pixels_HWC.shape == (40, 64, 3)


def test_what_another_program_would_draw_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.eps"
    Image.fromarray(PIXELS).save(path)
    with pytest.raises(UserError, match=r"image: .*a\.eps cannot be read as an image, expected one of PNG, JPEG"):
        request(image=path)


@pytest.mark.parametrize("at_opening", [True, False])
@pytest.mark.parametrize("error", [RuntimeError("Failed to decode frame"), EOFError(), KeyError(7), struct.error("x")])
def test_whatever_a_decoder_raises_over_a_damaged_file_names_the_field(
    error: Exception, at_opening: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(PIXELS).save(path)
    asked = request(image=path)

    def damaged(*args: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(*((Image, "open") if at_opening else (PngImageFile, "load")), damaged)
    with pytest.raises(UserError, match=r"^image: .*cannot be read"):
        InputImages(lambda result: result).bring(asked)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_damaged_avif_is_refused_by_name(tmp_path: Path) -> None:
    """Of each place where a byte is wrong, nothing but a UserError comes; decoders raise RuntimeError among others."""
    whole = io.BytesIO()
    Image.fromarray(PIXELS).save(whole, "AVIF")
    path, refused = tmp_path / "a.avif", 0
    for place in range(0, len(whole.getvalue()), 7):
        damaged = bytearray(whole.getvalue())
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            bring(image=path)
        except UserError as problem:
            assert str(problem).startswith("image: ")  # noqa: PT017
            refused += 1
    assert refused


def test_files_that_are_no_images_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"image: .*a\.png cannot be read as an image"):
        request(image=path)
    Image.fromarray(PIXELS).save(path)
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(UserError, match=r"image: .*a\.png: the image cannot be read"):
        bring(image=path)


@given(st.integers(1, 999), st.floats(0.001, 1))
def test_a_part_of_the_steps_is_made_as_diffusers_counts_them(steps: int, strength: float) -> None:
    made = min(int(steps * strength), steps)
    if made:
        assert steps - skipped_steps("strength", strength, steps) == made
    else:
        with pytest.raises(UnusableField, match="strength"):
            skipped_steps("strength", strength, steps)


@given(st.integers(1, 999), st.floats(0.001, 1))
def test_flows_make_the_whole_of_a_step_that_is_made_in_part(steps: int, strength: float) -> None:
    """As diffusers' pipelines of flows count them."""
    begins = int(max(steps - min(steps * strength, steps), 0))
    assert skipped_steps("strength", strength, steps, rounds_up=True) == begins
    assert 0 <= begins < steps


def test_a_strength_that_is_lost_among_the_steps_is_refused() -> None:
    with pytest.raises(UnusableField, match=r"strength: found 1e-20, expected at least 0.25: with 4 steps"):
        skipped_steps("strength", 1e-20, 4, rounds_up=True)


@pytest.mark.parametrize(
    ("ending", "numbers"),
    [("", (1, 0, 1)), (":0.8", (0.8, 0, 1)), (":0.8:0.1", (0.8, 0.1, 1)), (":1:0:0.5", (1, 0, 0.5))],
)
def test_controlnets_have_short_forms(ending: str, numbers: tuple[float, ...], tmp_path: Path) -> None:
    path = tmp_path / "a:1.5.png"  # with a name that has a number after a colon
    Image.fromarray(PIXELS).save(path)
    (control,) = request(controls=[f"canny={path}{ending}"]).controls
    assert (control.model, control.image) == ("canny", str(path))
    assert (control.strength, control.start, control.end) == numbers
    (without,) = request(image=PIXELS, controls=[f"union@tile{ending}"]).controls
    assert (without.model, without.mode, without.image) == ("union", "tile", None)
    assert (without.strength, without.start, without.end) == numbers


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("union@canny", ("union", "canny")),
        ("union@2", ("union", 2)),
        ("a/union@old@depth", ("a/union@old", "depth")),
        ("union", ("union", None)),
        ("@canny", ("@canny", None)),
        ("me@home/union", ("me@home/union", None)),
        ("org/union@" + "1f" * 20, ("org/union@" + "1f" * 20, None)),
        ("org/union@" + "1f" * 20 + "@2", ("org/union@" + "1f" * 20, 2)),
        ("a/union@2.safetensors", ("a/union@2.safetensors", None)),
        ("union@2.safetensors@2", ("union@2.safetensors", 2)),
        pytest.param("union@" + "9" * 5000, ("union", "9" * 5000), id="no number"),
    ],
)
def test_short_forms_of_controlnets_say_a_mode(name: str, found: tuple[str, str | int | None], tmp_path: Path) -> None:
    path = tmp_path / "a@b.png"
    Image.fromarray(PIXELS).save(path)
    (control,) = request(controls=[f"{name}={path}:0.5"]).controls
    assert (control.model, control.mode, control.strength) == (*found, 0.5)


def test_the_image_and_the_mask_of_a_controlnet_are_brought_at_their_own_size() -> None:
    """Each once, however many read it; one that has none reads the request's."""
    other = {"model": "a", "image": PIXELS[:24], "mask": MASK[:24]}
    sent, put = bring(image=PIXELS, width=32, controls=[other, {**other, "model": "b"}, {"model": "c"}])
    whole, mask, image = put
    assert isinstance(mask, Mask)
    assert isinstance(whole, ImagePixels)
    assert isinstance(image, ImagePixels)
    assert (whole.pixels_HWC.shape, mask.values_HW.shape) == ((16, 32, 3), (24, 64))
    assert (image.pixels_HWC == PIXELS[:24]).all()
    one, two, none = sent.controls
    assert (one.image, one.mask) == (two.image, two.mask)
    assert isinstance(one.mask, InputImage)
    assert (none.image, none.mask) == (None, None)


def test_what_is_not_said_of_a_controlnet_changes_no_seed_of_a_job_file() -> None:
    (control,) = request(controls=[{"model": "canny", "image": PIXELS}]).controls
    assert list(control.model_dump()) == ["model", "image", "strength", "start", "end", "mode"]
    (control,) = request(controls=[{"model": "canny", "image": PIXELS, "mask": MASK}]).controls
    assert "mask" in control.model_dump()


def test_regions_have_short_forms() -> None:
    plain, strong = request(regions=["0, 8,16,24=a=b", "0,8,16,24:1.5=x: y"]).regions
    assert (plain.prompt, plain.box, plain.strength) == ("a=b", (0, 8, 16, 24), 1.0)
    assert (strong.prompt, strong.strength) == ("x: y", 1.5)


def test_a_image_is_made_anew_by_a_part_and_what_a_mask_shows_all() -> None:
    assert request(image=PIXELS).first_step() == 8
    assert request(image=PIXELS, mask=MASK).first_step() == 0
    assert request().first_step() == 0


@pytest.mark.parametrize("fields", [{"image": PIXELS, "strength": 0.04}, {"hires": "2:0.04"}])
def test_a_strength_is_held_against_steps_by_the_model_alone(fields: dict[str, Any]) -> None:
    """Its own may be more, and a part of one may be one to it: it is told where the request is cut."""
    request(**fields)
    request(**fields, steps=20)
