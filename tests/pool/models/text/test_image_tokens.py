"""Images among the words of a text: the places of their tokens are the tokens of transformers, and their states are the
states of a whole Qwen 2.5 VL."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.families.parts.text_reading import IMAGE_TOKEN, Reading
from modelpool.pool.models.components.text.vision_prompt import reading_with_images
from modelpool.pool.models.text.chunks import Chunk
from modelpool.pool.models.text.image_tokens import ImageStates, places, with_images
from tests.pool.families.tiny_qwen_edit import seeing_encoder
from tests.pool.models.text.tiny_tokenizers import tiny

IMAGE = 7
GRIDS = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3)


def text(images: int, words: int) -> Chunk:
    """Some words, the images with a word after each, and more words."""
    ids = (1, 2, *((IMAGE, 3) * images), *range(10, 10 + words))
    return Chunk(ids, tuple(1.0 + i / 8 for i in range(len(ids))), len(ids))


@given(GRIDS, st.integers(1, 6))
def test_the_places_of_tokens_are_those_of_transformers(grids: list[tuple[int, int]], words: int) -> None:

    row = with_images(text(len(grids), words), IMAGE, [rows * columns for rows, columns in grids])
    seen = [ImageStates(torch.zeros(rows * columns, 1), rows, columns) for rows, columns in grids]
    ids = torch.tensor([row.token_ids])
    expected, _ = encoder().model.get_rope_index(
        ids,
        (ids == IMAGE).int(),
        image_grid_thw=torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids]),
    )
    torch.testing.assert_close(places(row, seen), expected[:, 0])


@cache
def encoder() -> Any:
    """A tiny one, whole."""
    return seeing_encoder()


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 6))
def test_a_image_takes_its_tokens_and_no_others(counts: list[int], words: int) -> None:
    """A token like it in the prompt, behind those of the template, stays one; words keep their weights."""
    plain = text(len(counts), words)
    said = Chunk((*plain.token_ids, IMAGE), (*plain.weights, 1.5), plain.tokens + 1)
    row = with_images(said, IMAGE, counts)
    assert len(row.token_ids) == len(row.weights) == row.tokens == said.tokens + sum(counts) - len(counts)
    assert row.token_ids[-1] == IMAGE
    for start, count in zip(row.images, counts, strict=True):
        assert row.token_ids[start : start + count] == (IMAGE,) * count
        assert row.weights[start : start + count] == (1.0,) * count
    kept = [(i, w) for i, w in zip(row.token_ids, row.weights, strict=True) if i != IMAGE]
    assert kept == [(i, w) for i, w in zip(said.token_ids, said.weights, strict=True) if i != IMAGE]
    assert with_images(said, IMAGE, []) is said


@pytest.mark.parametrize(("images", "numbered"), [(1, False), (1, True), (2, True)])
def test_a_template_has_a_place_for_each_image(images: int, numbered: bool) -> None:
    plain = Reading("qwen25_7b", template="{}", most_tokens=12)
    reading = reading_with_images(plain, images, numbered)
    before, after = reading.around()
    assert before.count(IMAGE_TOKEN) == images
    assert [f"Picture {n}: " in before for n in (1, 2)] == [numbered, images == 2]
    assert IMAGE_TOKEN not in after
    assert reading.most_tokens == 0
    assert reading_with_images(plain, 0, numbered) is plain
    assert (
        tiny("qwen").encode(before, add_special_tokens=False).ids.count(tiny("qwen").token_to_id(IMAGE_TOKEN)) == images
    )
