"""Token ids equal transformers' CLIPTokenizer's for every text, from the vendored vocabulary alone."""

from __future__ import annotations

import hashlib
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CLIPTokenizer

from modelpool.pool.models.text.clip_tokenizer import VOCABULARY_FILE, ClipTokenizer, build_vocabulary, read_merges
from tests.tiers import examples


@pytest.fixture(scope="module")
def tokenizer() -> ClipTokenizer:
    return ClipTokenizer.load()


@pytest.fixture(scope="module")
def reference() -> CLIPTokenizer:
    merges = read_merges()
    return CLIPTokenizer(vocab=build_vocabulary(merges), merges=merges)


#: ids of the published CLIP vocabulary, from the model cards and the tests of CLIP's own repository
GOLDEN = {
    "": [],
    "a photo of a cat": [320, 1125, 539, 320, 2368],
    "A PHOTO  of\n\ta Cat": [320, 1125, 539, 320, 2368],
    "hello world!": [3306, 1002, 256],
    "an astronaut riding a horse": [550, 18376, 6765, 320, 4558],
    "<|startoftext|><|endoftext|>": [49406, 49407],
}


@pytest.mark.parametrize("text", GOLDEN)
def test_known_texts_have_known_ids(tokenizer: ClipTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == GOLDEN[text]


words = st.sampled_from(
    [
        "cat",
        "Don't",
        "we'll",
        "3.14",
        "2024",
        "<|endoftext|>",
        "<|startoftext|>",
        "<|END",
        "(a:1.2)",
        "\u00e9",
        "e\u0301",
    ]
)
texts = st.one_of(
    st.text(), st.lists(st.one_of(words, st.text(max_size=4))).map(" ".join), st.lists(words).map("".join)
)


@settings(max_examples=examples(1000), deadline=None)
@given(text=texts)
def test_ids_are_those_of_transformers(tokenizer: ClipTokenizer, reference: CLIPTokenizer, text: str) -> None:
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False)["input_ids"]


def test_half_of_a_surrogate_pair_counts_as_a_question_mark(tokenizer: ClipTokenizer) -> None:
    """Found by a random prompt: the tokenizer library refuses such a string with a TypeError."""
    assert tokenizer.encode("a \ud800 cat") == tokenizer.encode("a ? cat")


def test_a_long_text_is_not_cut(tokenizer: ClipTokenizer) -> None:
    assert len(tokenizer.encode("cat " * 1000)) == 1000


def test_the_vocabulary_is_the_published_file() -> None:
    """Source: the hash that OpenAI's CLIP repository's file has."""
    data = resources.files("modelpool.pool.models.text").joinpath(VOCABULARY_FILE).read_bytes()
    assert hashlib.sha256(data).hexdigest() == "924691ac288e54409236115652ad4aa250f48203de50a9e4722a6ecd48d6804a"


def test_the_vocabulary_has_the_ids_of_clip() -> None:
    vocabulary = build_vocabulary(read_merges())
    assert (vocabulary["!"], vocabulary["!</w>"], vocabulary["<|startoftext|>"]) == (0, 256, 49406)
    assert sorted(vocabulary.values()) == list(range(49408))
