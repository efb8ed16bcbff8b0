"""An image file carries its pixels (a PNG exactly), the known `parameters` text, and a recipe that reads back equal."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from modelpool.actors.graph.features.recipe import Recipe, RecipeLora
from modelpool.actors.outputs.image_file import (
    encode_image,
    encode_png,
    encode_thumbnail,
    parameters_text,
    parse_parameters,
    read_parameters,
    read_recipe,
)
from modelpool.actors.outputs.image_metadata import is_image
from modelpool.actors.outputs.recipe_json import recipe_from_json
from modelpool.pool.values.core.errors import UserError

LIGHT = RecipeLora(name="light", sha256="0123456789abcdef" * 4, strength=0.8)
RECIPE = Recipe(
    model="shapes",
    model_sha256="fedcba9876543210" * 4,
    prompt="a red circle",
    negative="blurry",
    loras=(LIGHT,),
    steps=20,
    cfg=4.0,
    sampler="euler",
    schedule="karras",
    width=64,
    height=64,
    seed=7,
    versions={"modelpool": "0.1.0"},
)


def pixels(height: int = 8, width: int = 16) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, size=(height, width, 3), dtype=np.uint8)


def test_the_parameters_text_is_exactly_in_the_known_form() -> None:
    """Golden value: the form that A1111 writes and viewers read."""
    assert parameters_text(RECIPE) == (
        "a red circle <lora:light:0.8>\n"
        "Negative prompt: blurry\n"
        "Steps: 20, Sampler: Euler, Schedule type: Karras, CFG scale: 4, Seed: 7, Size: 64x64, "
        'Model hash: fedcba9876, Model: shapes, Lora hashes: "light: 0123456789ab", Version: modelpool 0.1.0'
    )


def test_no_negative_prompt_and_no_lora_leave_no_trace() -> None:
    plain = dataclasses.replace(RECIPE, negative="", loras=())
    assert parameters_text(plain) == (
        "a red circle\n"
        "Steps: 20, Sampler: Euler, Schedule type: Karras, CFG scale: 4, Seed: 7, Size: 64x64, "
        "Model hash: fedcba9876, Model: shapes, Version: modelpool 0.1.0"
    )


def test_two_loras_stand_in_the_prompt_and_in_one_quoted_value() -> None:
    two = dataclasses.replace(RECIPE, loras=(LIGHT, RecipeLora("outline", "aa" * 32, 1.0)))
    text = parameters_text(two)
    assert text.startswith("a red circle <lora:light:0.8> <lora:outline:1>\n")
    assert 'Lora hashes: "light: 0123456789ab, outline: aaaaaaaaaaaa"' in text


@given(
    prompt=st.text(st.characters(codec="utf-8", exclude_characters="\n\r")).filter(lambda t: not t.startswith("Neg")),
    negative=st.text(st.characters(codec="utf-8", exclude_characters="\n\r")),
    model=st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda t: t == t.strip() and t[0] != '"'),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_parser_of_the_form_gets_back_what_went_in(prompt: str, negative: str, model: str, seed: int) -> None:
    """Whatever the names and prompts hold: commas, colons, quotes, line ends in the model's name."""
    recipe = dataclasses.replace(RECIPE, prompt=prompt, negative=negative, model=model, seed=seed, loras=())
    parsed = parse_parameters(parameters_text(recipe))
    assert parsed.prompt == prompt
    assert parsed.negative == negative
    assert parsed.values["Model"] == model
    assert parsed.values["Seed"] == str(seed)
    assert parsed.values["Size"] == "64x64"


def test_text_without_a_line_of_pairs_is_all_prompt() -> None:
    parsed = parse_parameters("a hill: green, tall\nat dawn")
    assert (parsed.prompt, parsed.negative, dict(parsed.values)) == ("a hill: green, tall\nat dawn", "", {})


def test_a_prompt_of_several_lines_reads_back() -> None:
    recipe = dataclasses.replace(RECIPE, prompt="a hill\nat dawn", negative="fog\nrain", loras=())
    parsed = parse_parameters(parameters_text(recipe))
    assert (parsed.prompt, parsed.negative) == ("a hill\nat dawn", "fog\nrain")


@settings(max_examples=30)
@given(st.text(st.characters(codec="utf-8"), max_size=40), st.integers(1, 24), st.integers(1, 24))
def test_a_png_holds_exactly_its_pixels_and_its_recipe(tmp_path_factory, prompt: str, height: int, width: int) -> None:
    recipe = dataclasses.replace(RECIPE, prompt=prompt)
    path = tmp_path_factory.mktemp("png") / "p.png"
    path.write_bytes(encode_png(pixels(height, width), recipe))
    with Image.open(path) as opened:
        assert opened.mode == "RGB"
        assert np.asarray(opened).tobytes() == pixels(height, width).tobytes()
    assert read_recipe(path) == recipe
    assert read_recipe(path).digest == recipe.digest


def test_the_same_image_is_the_same_file() -> None:
    """No clock, no random order: the bytes of the file are a function of pixels and recipe."""
    assert encode_png(pixels(), RECIPE) == encode_png(pixels(), RECIPE)


def test_a_image_of_another_program_says_that_it_has_no_recipe(tmp_path: Path) -> None:
    path = tmp_path / "other.png"
    Image.fromarray(pixels()).save(path)
    with pytest.raises(UserError, match=r"other\.png: no 'modelpool' text"):
        read_recipe(path)
    with pytest.raises(UserError, match="no 'parameters' text"):
        read_parameters(path)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", "half"])
def test_what_is_no_image_is_refused_by_name(tmp_path: Path, content: bytes | str) -> None:
    whole = encode_png(pixels(), RECIPE)
    path = tmp_path / "broken.png"
    path.write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    with pytest.raises(UserError, match=r"broken\.png: cannot be read as an image"):
        read_recipe(path)


def test_other_formats_and_a_missing_file_are_distinguished(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    Image.fromarray(pixels()).save(buffer, format="BMP")
    (tmp_path / "p.png").write_bytes(buffer.getvalue())
    with pytest.raises(UserError, match="found a BMP file, expected PNG, WEBP, JPEG, AVIF"):
        read_recipe(tmp_path / "p.png")
    with pytest.raises(UserError, match="no such file"):
        read_recipe(tmp_path / "missing.png")


def test_a_recipe_with_a_strange_field_is_refused_with_the_nearest_name() -> None:
    fields = RECIPE.as_json()
    assert recipe_from_json(fields) == RECIPE
    fields["negativ"] = fields.pop("negative")
    with pytest.raises(ValueError, match=re.escape("unknown field of a recipe 'negativ'; did you mean 'negative'?")):
        recipe_from_json(fields)


@pytest.mark.parametrize("ending", ["webp", "jpg", "avif"])
def test_every_format_carries_both_texts_and_nearly_its_pixels(ending: str, tmp_path: Path) -> None:
    """Equal recipes give equal bytes, the recipe reads back equal, and viewers find `parameters` in the EXIF."""
    recipe = dataclasses.replace(RECIPE, format=ending, quality=90, prompt='\u00e9 <b> & "q" \U0001f600')
    smooth = np.linspace(0, 255, 32 * 48 * 3).reshape(32, 48, 3).astype(np.uint8)
    content = encode_image(smooth, recipe)
    assert content == encode_image(smooth, recipe)
    path = tmp_path / f"image.{ending}"
    path.write_bytes(content)
    assert read_recipe(path) == recipe
    assert is_image(content[:16])
    assert read_parameters(path) == parse_parameters(parameters_text(recipe))
    with Image.open(path) as image:
        comment = image.getexif().get_ifd(0x8769)[0x9286]
        assert comment[:8] == b"UNICODE\0"
        assert comment[8:].decode("utf-16-be") == parameters_text(recipe)
        distance = np.abs(np.array(image.convert("RGB")).astype(int) - smooth)
    assert distance.mean() < 3


@pytest.mark.parametrize("ending", ["webp", "jpg", "avif"])
def test_quality_determines_the_size(ending: str) -> None:
    low, high = (
        len(encode_image(pixels(64, 64), dataclasses.replace(RECIPE, format=ending, quality=q))) for q in (20, 95)
    )
    assert low < 0.8 * high


def test_webp_of_the_best_quality_is_lossless() -> None:
    content = encode_image(pixels(), dataclasses.replace(RECIPE, format="webp", quality=100))
    with Image.open(io.BytesIO(content)) as image:
        assert np.array_equal(np.array(image.convert("RGB")), pixels())


def test_a_recipe_that_is_too_long_for_a_jpeg_is_refused_with_other_formats() -> None:
    long = dataclasses.replace(RECIPE, format="jpg", prompt="x" * 70_000)
    with pytest.raises(UserError, match=r"^format: found 'jpg', expected png, webp or avif"):
        encode_image(pixels(), long)
    assert encode_image(pixels(), dataclasses.replace(long, format="webp"))


def test_a_thumbnail_is_as_long_as_asked_and_no_longer() -> None:
    for shape, expected in (((512, 256), (128, 256)), ((100, 50), (50, 100))):
        with Image.open(io.BytesIO(encode_thumbnail(pixels(*shape), 256))) as image:
            assert image.size == expected
