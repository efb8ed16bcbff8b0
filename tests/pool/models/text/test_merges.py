"""All ways to make a token of two are found, and no file makes the search take more than a real one does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.models.text import merges
from modelpool.pool.models.text.merges import MAX_TOKEN_LENGTH, find_merges
from modelpool.pool.models.text.sentencepiece_file import sentencepiece_tokenizer
from modelpool.pool.values.core.errors import CorruptFile
from tests.pool.models.text.vocabulary_files import piece_file


@given(st.sets(st.text("ab", min_size=1, max_size=5)))
def test_every_way_is_found_once(tokens: set[str]) -> None:
    found = list(find_merges(tokens, tokens))
    every = {(a + b, len(a)) for a in tokens for b in tokens if a + b in tokens}
    assert set(found) == every
    assert len(found) == len(every)


def test_a_token_longer_than_real_ones_is_refused() -> None:
    assert list(find_merges(["a" * MAX_TOKEN_LENGTH], ())) == []
    with pytest.raises(ValueError, match=f"found a token of {MAX_TOKEN_LENGTH + 1} characters"):
        list(find_merges(["a" * (MAX_TOKEN_LENGTH + 1)], ()))


@pytest.mark.parametrize(("limit", "said"), [("MAX_SEARCH_COST", "search cost"), ("MAX_MERGES", "merges")])
def test_more_than_a_real_vocabulary_has_is_refused(monkeypatch: pytest.MonkeyPatch, limit: str, said: str) -> None:
    tokens = ["a" * length for length in range(1, 60)]
    assert list(find_merges(tokens, tokens))
    monkeypatch.setattr(merges, limit, 1000)
    with pytest.raises(ValueError, match=said):
        list(find_merges(tokens, tokens))


def test_a_small_file_that_asks_for_all_ways_is_refused_by_name() -> None:
    """A thousand pieces, each a sign longer than the one before, are half a million ways in half a megabyte."""
    with pytest.raises(CorruptFile, match="the file: found no usable SentencePiece vocabulary: found a token of"):
        sentencepiece_tokenizer(piece_file(["a" * length for length in range(1, 1000)]), "the file")
