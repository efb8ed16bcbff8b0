"""Chunks hold every token of a prompt once, in order, 77 at a time, and cut words only where they must."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.models.text.chunks import (
    CHUNK_TOKENS,
    CONTENT_TOKENS,
    LONG_WORD_TOKENS,
    Chunk,
    empty_chunk,
    split_prompt,
)
from modelpool.pool.models.text.clip_tokenizer import BEGIN_ID, END_ID, ClipTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> ClipTokenizer:
    return ClipTokenizer.load()


def content(chunk: Chunk) -> list[int]:
    """The tokens of the text. The prompts of these tests hold no end token of their own."""
    return list(chunk.token_ids[1 : chunk.token_ids.index(END_ID)])


plain = st.text(st.characters(exclude_characters="()\\<|>"), max_size=300)


@settings(deadline=None)
@given(text=plain)
def test_chunks_hold_the_tokens_of_the_whole_text(tokenizer: ClipTokenizer, text: str) -> None:
    chunks = split_prompt(tokenizer, text)
    assert [token for chunk in chunks for token in content(chunk)] == tokenizer.encode(text)


@settings(deadline=None)
@given(text=st.text(max_size=300))
def test_every_chunk_is_well_formed(tokenizer: ClipTokenizer, text: str) -> None:
    chunks = split_prompt(tokenizer, text)
    assert chunks
    for chunk in chunks:
        assert len(chunk.token_ids) == len(chunk.weights) == CHUNK_TOKENS
        assert (chunk.token_ids[0], chunk.token_ids[-1]) == (BEGIN_ID, END_ID)
        assert (chunk.weights[0], chunk.weights[-1]) == (1.0, 1.0)


def test_an_empty_prompt_is_one_empty_chunk(tokenizer: ClipTokenizer) -> None:
    expected = Chunk((BEGIN_ID, *(END_ID,) * 76), (1.0,) * 77, 2)
    assert split_prompt(tokenizer, "") == split_prompt(tokenizer, " \n") == (expected,) == (empty_chunk(),)


def test_75_tokens_fit_and_the_76th_begins_a_chunk(tokenizer: ClipTokenizer) -> None:
    (full,) = split_prompt(tokenizer, "cat " * CONTENT_TOKENS)
    assert full.token_ids == (BEGIN_ID, *(2368,) * 75, END_ID)
    first, second = split_prompt(tokenizer, "cat " * CONTENT_TOKENS + "dog")
    assert first == full
    assert content(second) == [1929]


def test_a_word_that_does_not_fit_moves_to_the_next_chunk_whole(tokenizer: ClipTokenizer) -> None:
    word = "cat,cat"
    ids = tokenizer.encode(word)
    assert 1 < len(ids) < LONG_WORD_TOKENS
    first, second = split_prompt(tokenizer, "dog " * (CONTENT_TOKENS - 1) + word)
    assert content(first) == [1929] * (CONTENT_TOKENS - 1)
    assert content(second) == ids


def test_a_long_word_is_cut_where_the_chunk_ends(tokenizer: ClipTokenizer) -> None:
    word = ",".join("cat" for _ in range(6))
    assert len(tokenizer.encode(word)) >= LONG_WORD_TOKENS
    first, second = split_prompt(tokenizer, "dog " * (CONTENT_TOKENS - 1) + word)
    assert content(first)[-1] == tokenizer.encode(word)[0]
    assert content(second) == tokenizer.encode(word)[1:]


def test_a_word_longer_than_chunks_fills_them(tokenizer: ClipTokenizer) -> None:
    chunks = split_prompt(tokenizer, "dog " + "1" * 200)
    assert [len(content(chunk)) for chunk in chunks] == [75, 75, 51]


def test_weights_follow_their_tokens(tokenizer: ClipTokenizer) -> None:
    (chunk,) = split_prompt(tokenizer, "a (red:1.5) cat")
    assert chunk.token_ids[:5] == (BEGIN_ID, 320, 736, 2368, END_ID)
    assert chunk.weights == (1.0, 1.0, 1.5, 1.0, *(1.0,) * 73)
    assert chunk.is_weighted
    assert not split_prompt(tokenizer, "a (red:1.0) cat")[0].is_weighted


def test_weights_follow_their_tokens_across_chunks(tokenizer: ClipTokenizer) -> None:
    first, second = split_prompt(tokenizer, "cat " * 74 + "(dog dog:0.5)")
    assert (first.weights[74:77], second.weights[:3]) == ((1.0, 0.5, 1.0), (1.0, 0.5, 1.0))
