"""Vocabularies in the forms of SentencePiece and tekken give the ids that transformers gives, or a typed error."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex as Pattern
from tokenizers import Tokenizer, pre_tokenizers
from transformers import GemmaTokenizer
from transformers.convert_slow_tokenizer import generate_merges

from modelpool.pool.models.text.sentencepiece_file import sentencepiece_tokenizer
from modelpool.pool.models.text.tekken_file import tekken_tokenizer
from modelpool.pool.models.text.text_tokenizer import TextTokenizer
from modelpool.pool.values.core.errors import CorruptFile, UnusableField
from tests.each_case import each_case
from tests.pool.models.text.tiny_tokenizers import SENTENCES, tiny
from tests.pool.models.text.vocabulary_files import (
    TEKKEN_PATTERN,
    byte_pair_file,
    byte_pair_pieces,
    piece_file,
    tekken_file,
    unigram_file,
)
from tests.tiers import examples

words = st.lists(st.sampled_from(" ".join(SENTENCES).split()), max_size=12).map(" ".join)
texts = st.one_of(words, st.text(st.characters(exclude_characters="<>", exclude_categories=("Cs",)), max_size=40))


@settings(deadline=None, max_examples=examples(60))
@given(text=texts)
def test_a_unigram_file_gives_the_ids_of_its_tokenizer(text: str) -> None:
    mine = sentencepiece_tokenizer(unigram_file(), "a file")
    theirs = tiny("t5")
    assert mine.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids


def gemma() -> GemmaTokenizer:
    pieces = byte_pair_pieces()
    ids = {text: i for i, (text, _) in enumerate(pieces)}
    own = {text: score for text, score in pieces if not text.startswith("<")}
    return GemmaTokenizer(vocab=ids, merges=generate_merges(ids, own))


GEMMA = gemma()
BYTE_PAIRS = sentencepiece_tokenizer(byte_pair_file(), "a file")


@settings(deadline=None, max_examples=examples(60))
@given(text=texts)
def test_a_file_of_byte_pairs_gives_the_ids_of_gemma(text: str) -> None:
    assert BYTE_PAIRS.encode(text, add_special_tokens=False).ids == GEMMA.encode(text, add_special_tokens=False)


@settings(deadline=None, max_examples=examples(60))
@given(text=texts)
def test_a_tekken_file_gives_the_tokens_of_its_merges_after_the_special_ones(text: str) -> None:
    mine = TextTokenizer(tekken_tokenizer(tekken_file(), "a file"), "mistral")
    listed = json.loads(tekken_file())["vocab"]
    reference = Tokenizer.from_str(tiny("mistral").to_str())
    reference.normalizer = None
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Pattern(TEKKEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    expected = reference.encode(text, add_special_tokens=False).tokens
    found = mine.encode(text).ids
    assert len(found) == len(expected)
    assert all(1000 <= number < 1000 + len(listed) for number in found)
    assert [mine._tokenizer.id_to_token(number) for number in found] == expected


def test_special_tokens_of_a_template_are_one_token_each() -> None:
    mine = TextTokenizer(tekken_tokenizer(tekken_file(), "a file"), "mistral")
    ids = mine.encode("[SYSTEM_PROMPT]a[/SYSTEM_PROMPT][INST]cat[/INST]").ids
    special = [i for i in ids if i < 1000]
    assert special == [mine.id_of(t) for t in ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]")]


@settings(deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_a_damaged_file_is_refused_by_name_or_read(data: st.DataObject) -> None:
    """Cut short, or with bytes changed: never anything but CorruptFile."""
    read, whole = data.draw(
        st.sampled_from(
            [
                (sentencepiece_tokenizer, unigram_file()),
                (sentencepiece_tokenizer, byte_pair_file()),
                (tekken_tokenizer, tekken_file()[:3000]),
            ]
        )
    )
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))][:4000])
    for _ in range(data.draw(st.integers(0, 4))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    refusal = "the file: "
    try:
        read(bytes(damaged), "the file")
    except CorruptFile as error:
        refusal = str(error)
    assert refusal.startswith("the file: ")


@settings(deadline=None, max_examples=examples(100))
@given(characters=st.binary(min_size=1, max_size=60), length=st.sampled_from([None, 0, 4, 8, 1 << 31]))
def test_a_damaged_table_of_signs_is_refused_by_name_or_read(characters: bytes, length: int | None) -> None:
    """The library panics at some; no text that is read makes it give up in another way either."""
    table = characters if length is None else length.to_bytes(4, "little") + characters
    refusal = "the file: "
    try:
        vocabulary = piece_file(["a", "<pad>", "</s>"], table)
        TextTokenizer(sentencepiece_tokenizer(vocabulary, "the file"), "t5").encode("hello \u00e9 w\u00f6rld a")
    except (CorruptFile, UnusableField) as error:
        refusal = str(error)
    assert refusal.startswith(("the file: ", "prompt: "))


def test_a_score_that_is_no_number_is_refused() -> None:
    with pytest.raises(CorruptFile, match="a piece has the score nan"):
        sentencepiece_tokenizer(piece_file(["a"], scores=math.nan), "a file")


@each_case("number", [1e400, 10**400, -1, 1.5, "7", None, True, 1 << 40])
@each_case("place", ["default_vocab_size", "default_num_special_tokens", "vocab", "special_tokens"])
def test_a_number_of_a_tekken_file_that_cannot_be_is_refused(place: str, number: object) -> None:
    """A rank below 0 would be a special token's number, one beyond the vocabulary no row of an encoder's."""
    said = json.loads(tekken_file())
    if place in said:
        said[place][5]["rank"] = number
    else:
        said["config"][place] = number
    with pytest.raises(CorruptFile, match=r"a file: not a tekken vocabulary.*expected a whole number from 0 to"):
        tekken_tokenizer(json.dumps(said).encode(), "a file")


def test_a_length_beyond_the_file_is_refused_at_once() -> None:
    with pytest.raises(CorruptFile, match="not a SentencePiece model"):
        sentencepiece_tokenizer(b"\x0a\xff\xff\xff\xff\x7f", "a file")
