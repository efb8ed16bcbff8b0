"""The layout of the contact sheet: full rows, proportions kept, labels that fit."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont

from modelpool.actors.outputs.contact_sheet import (
    MOST_IMAGES,
    LabelledImage,
    columns_for,
    fitted_size,
    make_contact_sheet,
    wrapped,
)
from tests.actors.outputs.test_image_file import RECIPE

FONT = ImageFont.load_default(14)


@given(st.integers(0, 2000))
def test_the_sheet_is_neither_a_ribbon_nor_a_tower(count: int) -> None:
    columns = columns_for(count)
    assert 1 <= columns <= 12
    if 4 < count <= 144:
        assert math.ceil(count / columns) <= columns + 2


@pytest.mark.parametrize(("count", "columns"), [(0, 1), (1, 1), (3, 3), (8, 4), (12, 4), (24, 6), (20, 5)])
def test_rows_are_full_where_they_can_be(count: int, columns: int) -> None:
    assert columns_for(count) == columns


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_image_fits_its_cell_with_its_sides_in_proportion(width: int, height: int) -> None:
    fitted = fitted_size(width, height, 192)
    assert max(fitted) == 192
    assert min(fitted) >= 1
    assert abs(fitted[0] * height - fitted[1] * width) <= max(width, height)


@given(st.text(max_size=200), st.integers(1, 3))
def test_labels_stay_in_their_width_and_lines(text: str, most_lines: int) -> None:
    lines = wrapped(text, 192, most_lines, FONT)
    assert len(lines) <= most_lines
    assert all(FONT.getlength(line) <= 192 for line in lines)
    if not any(line.endswith("...") for line in lines):
        assert " ".join(lines).split() == text.split(), "nothing is left out without three dots"


def test_a_label_too_long_keeps_as_much_as_fits() -> None:
    [line] = wrapped("seed 18446744073709551615, light 0.8, outline 1", 192, 1, FONT)
    assert line.startswith("seed 184467440737095")
    assert line.endswith("...")


def test_a_long_label_is_measured_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was measured once for each character that did not fit: a sheet of long prompts took seconds for its texts."""
    measured, measure = [], ImageFont.FreeTypeFont.getlength

    def counted(self: ImageFont.FreeTypeFont, text: str) -> float:
        measured.append(text)
        return measure(self, text)

    monkeypatch.setattr(ImageFont.FreeTypeFont, "getlength", counted)
    wrapped("a red circle on a table, " * 200, 192, 2, FONT)
    assert len(measured) < 40


def test_a_sheet_of_too_many_images_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "p.png"
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    full = [LabelledImage(path, RECIPE)] * MOST_IMAGES
    plain = Image.open(io.BytesIO(make_contact_sheet(full)))
    noted = Image.open(io.BytesIO(make_contact_sheet([*full, full[0]])))
    assert noted.width == plain.width
    assert plain.height < noted.height < plain.height + 60, "a line of text, not a row of images"
