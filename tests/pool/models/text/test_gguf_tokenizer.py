"""The vocabulary in a GGUF file is the tokenizer that it was made from, and transformers' of the same file; one that
does not fit is passed over, and says so."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from modelpool.pool.files.formats.gguf_vocabulary import read_gguf_vocabulary
from modelpool.pool.models.text.gguf_tokenizer import gguf_tokenizer
from modelpool.pool.models.text.text_tokenizer import TokenizerMissing
from modelpool.pool.models.text.tokenizer_files import find_tokenizer
from modelpool.pool.models.text.word_patterns import LLAMA_WORDS, MISTRAL_WORDS, QWEN_WORDS
from modelpool.pool.values.core.errors import CorruptFile
from tests.pool.files.formats.gguf_files import write_gguf
from tests.pool.models.text.gguf_vocabularies import USER_DEFINED, entries_of
from tests.pool.models.text.tiny_tokenizers import PROMPTS, SENTENCES, tiny

ARCHITECTURES = {"t5": "t5encoder", "gemma": "gemma2", "llama3": "llama", "mistral": "llama", "qwen": "qwen3"}
PRE = {"llama3": "llama-bpe", "mistral": "tekken", "qwen": "qwen2"}
KIND = pytest.mark.parametrize("kind", ARCHITECTURES)
TEXTS = (
    *PROMPTS,
    *SENTENCES,
    "a  b   c",
    "1234 5678",
    "It's CamelCase\n\n  and\ttabs",
    "na\u00efve caf\u00e9",
    "\U0001f600",
)


def write(path: Path, kind: str, **changed: Any) -> Path:
    """A file with the tokenizer of `kind`, some of its entries `changed`, None for one that is left out."""
    said = entries_of(tiny(kind))
    if kind in PRE:
        said["tokenizer.ggml.pre"] = PRE[kind]
    said |= {f"tokenizer.ggml.{name}": value for name, value in changed.items()}
    entries = {key: value for key, value in said.items() if value is not None}
    write_gguf(path, {"a": torch.ones(3)}, architecture=ARCHITECTURES[kind], entries=entries)
    return path


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def cut_as_published(kind: str) -> Tokenizer:
    """The tiny tokenizer of `kind`, with the words of the published one, which it was not trained with."""
    tokenizer = Tokenizer.from_str(tiny(kind).to_str())
    pattern = {"llama3": LLAMA_WORDS, "mistral": MISTRAL_WORDS, "qwen": QWEN_WORDS}.get(kind)
    if pattern is not None:
        model: Any = tokenizer.model
        assert isinstance(model, models.BPE)
        if kind != "qwen":
            model.ignore_merges = True
            tokenizer.normalizer = normalizers.Sequence([])
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_])
    return tokenizer


@KIND
def test_it_reads_texts_as_the_tokenizer_that_it_was_made_from(kind: str, tmp_path: Path) -> None:
    ours = gguf_tokenizer(str(write(tmp_path / "a.gguf", kind)), kind, "a.gguf")
    theirs = cut_as_published(kind)
    special = next(iter(tiny(kind).get_added_tokens_decoder().values())).content
    for text in (*TEXTS, f"a{special}b"):
        assert ids_of(ours, text) == ids_of(theirs, text), text


@pytest.mark.parametrize("kind", ["gemma", "llama3", "mistral", "qwen"])
def test_it_reads_texts_as_transformers_does_from_the_same_file(kind: str, tmp_path: Path) -> None:
    """Transformers' T5 has a form of its own for spaces, and is left out."""
    path = str(write(tmp_path / "a.gguf", kind))
    architecture, said, _ = get_gguf_tokenizer(path)
    theirs, _ = convert_gguf_tokenizer(architecture, said)
    ours = gguf_tokenizer(path, kind, "a.gguf")
    for text in TEXTS:
        assert ids_of(ours, text) == ids_of(theirs, text), text


def test_runs_of_spaces_are_joined_in_the_order_of_the_tokens(tmp_path: Path) -> None:
    """Files write them with spaces, and give all that was added to SentencePiece's own one score, the least."""
    said = {key.removeprefix("tokenizer.ggml."): value for key, value in entries_of(tiny("gemma")).items()}
    place = next(i for i, token in enumerate(said["tokens"]) if len(token) == 2 and token.startswith("\u2581"))
    for name, added in (("tokens", ["  ", "   "]), ("scores", [-1000.0] * 2), ("token_type", [USER_DEFINED] * 2)):
        said[name] = [*said[name][:place], *added, *said[name][place:]]
    path = str(write(tmp_path / "a.gguf", "gemma", **said))
    text = f"a   {said['tokens'][place + 2][1]}"
    found = ids_of(gguf_tokenizer(path, "gemma", "a.gguf"), text)
    assert found[1] == place + 1, "not two spaces, and one with what follows"
    assert len(found) == 3
    architecture, theirs, _ = get_gguf_tokenizer(path)
    assert found == ids_of(convert_gguf_tokenizer(architecture, theirs)[0], text)


@KIND
def test_it_is_found_in_the_file_of_weights(kind: str, tmp_path: Path) -> None:
    """Behind a file that a person put beside it for it, and before others in the folder."""
    path, size = write(tmp_path / "text.gguf", kind), tiny(kind).get_vocab_size() + 8
    other = "qwen" if kind != "qwen" else "llama3"
    tiny(other).save(str(tmp_path / "tokenizer.json"))
    found = find_tokenizer(kind, size, weights=path)
    assert found.source == f"entries of {path}"
    assert found.encode("a red cat").ids == tuple(ids_of(cut_as_published(kind), "a red cat"))
    tiny(kind).save(str(tmp_path / "text.tokenizer.json"))
    assert find_tokenizer(kind, size, weights=path).source.endswith("text.tokenizer.json")


def test_no_space_is_put_before_a_text_of_gemma_where_the_file_does_not_say(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.gguf", "gemma", add_space_prefix=None))
    architecture, said, _ = get_gguf_tokenizer(path)
    theirs, _ = convert_gguf_tokenizer(architecture, said)
    ours = gguf_tokenizer(path, "gemma", "a.gguf")
    for text in TEXTS:
        assert ids_of(ours, text) == ids_of(theirs, text), text


HOSTILE: dict[str, tuple[str, dict[str, Any], str]] = {
    # each would be a table of all bytes of all of them
    "special pairs": (
        "qwen",
        {"tokens": [f"{i}" * 900 for i in range(100, 300)], "token_type": [3] * 200, "merges": None},
        "bytes of special tokens, expected at most",
    ),
    "special pieces": (
        "gemma",
        {"tokens": [f"{i}" * 900 for i in range(100, 300)], "scores": None, "token_type": [3] * 200},
        "bytes of special tokens, expected at most",
    ),
    "own pieces": (
        "gemma",
        {"tokens": [f"{i}" * 40 for i in range(1000, 3000)], "scores": None, "token_type": [4] * 2000},
        "bytes of special tokens, expected at most",
    ),
    # each would be a node for each of its bytes
    "long pieces": (
        "t5",
        {"tokens": [f"{i}" * 1000 for i in range(1000, 2200)], "scores": [0.0] * 1200, "token_type": [2] + [1] * 1199},
        "found pieces of 4800000 bytes",
    ),
    "a large table of characters": (
        "t5",
        {"precompiled_charsmap": [1.5] * ((1 << 20) + 1)},
        r"charsmap': found 1048577 values, expected at most",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_vocabulary_that_would_cost_too_much_is_refused_at_once(case: str, tmp_path: Path) -> None:
    """Found: 8 MB of special tokens took 12 seconds."""
    kind, changed, message = HOSTILE[case]
    path = write(tmp_path / "a.gguf", kind, **changed)
    begun = time.process_time()
    with pytest.raises(CorruptFile, match=message):
        gguf_tokenizer(str(path), kind, "a.gguf")
    assert time.process_time() - begun < 1.0


def test_what_a_person_puts_beside_a_split_file_has_the_name_of_the_model(tmp_path: Path) -> None:
    """As a name of its parts would be of none of them."""
    tensors = {name: torch.ones(3) for name in "abc"}
    write_gguf(tmp_path / "t.gguf", tensors, architecture="llama", part_tensors=1)
    part = tmp_path / "t-00002-of-00003.gguf"
    with pytest.raises(TokenizerMissing, match=r"or next to the weights as t\.tokenizer\.json"):
        find_tokenizer("llama3", 200, weights=part)
    tiny("llama3").save(str(tmp_path / "t.tokenizer.json"))
    assert find_tokenizer("llama3", tiny("llama3").get_vocab_size(), weights=part).source.endswith("t.tokenizer.json")


def test_it_is_found_in_the_first_part_of_a_split_file(tmp_path: Path) -> None:
    tensors = {name: torch.ones(3) for name in "abc"}
    write_gguf(tmp_path / "t.gguf", tensors, architecture="llama", entries=entries_of(tiny("llama3")), part_tensors=1)
    part = tmp_path / "t-00003-of-00003.gguf"
    found = find_tokenizer("llama3", tiny("llama3").get_vocab_size(), weights=part)
    assert found.size == tiny("llama3").get_vocab_size()


FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no tokens": ("qwen", {"tokens": None, "token_type": None}, "found no tokens"),
    "another model": ("qwen", {"model": "rwkv"}, "the model 'rwkv', expected llama, t5, gpt2"),
    "too few types": ("qwen", {"token_type": [1, 1]}, "token_type': found 2 values for"),
    "no scores": ("t5", {"scores": None}, "found 0 scores for"),
    "a score that is none": ("t5", {"scores": [float("nan")] * 150}, "scores"),
    "numbers for tokens": ("qwen", {"tokens": [1, 2], "token_type": None}, "found numbers, expected texts"),
    "texts for scores": ("t5", {"scores": ["a"]}, "found texts, expected numbers"),
    "a pair without halves": ("qwen", {"merges": ["nothing known"]}, "found no usable vocabulary"),
    "a token twice": ("qwen", {"tokens": ["a", "a"], "token_type": [1, 1]}, "a token occurs twice"),
    "no types": ("qwen", {"token_type": None}, "found no token types"),
    "no types of pieces": ("gemma", {"token_type": None}, "found no token types"),
    "types that are no numbers": ("t5", {"token_type": [float("nan")] * 150}, "token_type': found fractions, expected"),
    "a table of no bytes": ("t5", {"precompiled_charsmap": [float("nan")]}, "charsmap': found fractions, expected"),
    "a token without an end": (
        "gemma",
        {"tokens": ["a" * 5000], "scores": [0.0], "token_type": [1]},
        "found pieces of",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_vocabulary_that_does_not_fit_is_refused_and_what_to_put_where_is_said(fault: str, tmp_path: Path) -> None:
    kind, changed, message = FAULTS[fault]
    path = write(tmp_path / "a.gguf", kind, **changed)
    with pytest.raises(CorruptFile, match=message):
        gguf_tokenizer(str(path), kind, str(path))
    with pytest.raises(TokenizerMissing, match=rf"{message}.*Put .* into .*tokenizer, or next to the weights"):
        find_tokenizer(kind, 200, weights=path)


def test_the_vocabulary_of_another_kind_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "qwen")
    with pytest.raises(TokenizerMissing, match=r"lacks '<\|begin_of_text\|>', expected the tokenizer of Llama 3"):
        find_tokenizer("llama3", tiny("qwen").get_vocab_size(), weights=path)
    with pytest.raises(TokenizerMissing, match="the model 'gpt2', expected llama, t5"):
        find_tokenizer("gemma", tiny("qwen").get_vocab_size(), weights=path)


def test_texts_of_any_length_are_read_whole(tmp_path: Path) -> None:
    """Shorter and longer than one read, and across its ends."""
    tokens = [chr(97 + i % 26) * (i * 37 % 5000) for i in range(400)] + ["\u2581" * 200_000, "", "end"]
    path = write(tmp_path / "a.gguf", "qwen", tokens=tokens, token_type=None)
    found = read_gguf_vocabulary(str(path))
    assert list(found.tokens) == tokens
    assert len(found.merges) > 100, "what follows is found"


def test_a_cut_file_is_a_typed_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "gemma")
    whole = path.read_bytes()
    for size in range(4, len(whole) - 200, 997):
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match="expected a complete GGUF file"):
            read_gguf_vocabulary(str(path))


@pytest.mark.parametrize("kind", ["gemma", "qwen", "t5"])
def test_a_damaged_vocabulary_is_a_typed_error_or_a_tokenizer(kind: str, tmp_path: Path) -> None:
    path, random, built = write(tmp_path / "a.gguf", kind), Random(8), 0
    whole = path.read_bytes()
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(random.randint(1, 3)):
            data[random.randrange(4, len(whole) - 64)] = random.choice((0, 1, 2, 32, 255, random.randrange(256)))
        path.write_bytes(data)
        try:
            gguf_tokenizer(str(path), kind, "a.gguf")
        except CorruptFile:
            continue
        built += 1
    assert 5 < built < 145, "both happen"
