"""A tokenizer is found where people put it, another's is passed over, and a missing one says what to put where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models

from modelpool.pool.models.text.text_tokenizer import (
    KINDS,
    TOKENIZER_FACTS,
    TextTokenizer,
    TokenizerMissing,
    tokenizer_kind,
)
from modelpool.pool.models.text.tokenizer_files import find_tokenizer
from modelpool.pool.values.core.errors import CorruptFile
from tests.pool.models.text.tiny_tokenizers import PROMPTS, tiny
from tests.pool.models.text.vocabulary_files import byte_pair_file, tekken_file, unigram_file

T5_TOKENS = tiny("t5").get_vocab_size()


def same(found: TextTokenizer, kind: str) -> bool:
    return all(list(found.encode(p).ids) == tiny(kind).encode(p, add_special_tokens=False).ids for p in PROMPTS)


@pytest.mark.parametrize(
    "place",
    [
        "encoder.tokenizer.json",
        "tokenizer.json",
        "tokenizer/tokenizer.json",
        "tokenizer_2/tokenizer.json",
        "encoder/tokenizer.json",
    ],
)
def test_it_is_found_beside_the_weights(tmp_path: Path, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.write_text(tiny("t5").to_str())
    found = find_tokenizer("t5", T5_TOKENS, weights=tmp_path / "encoder.safetensors")
    assert same(found, "t5")
    assert found.source == str(path)


def test_a_model_folder_has_several_and_the_encoder_finds_its_own(tmp_path: Path) -> None:
    """text_encoder_2 reads with tokenizer_2, though tokenizer has all its special tokens too."""
    for name, text in (("tokenizer", tiny("bert")), ("tokenizer_2", tiny("t5")), ("text_encoder_2", None)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "tokenizer.json").write_text(text.to_str())
    weights = tmp_path / "text_encoder_2" / "model.safetensors"
    assert same(find_tokenizer("t5", T5_TOKENS, weights=weights), "t5")
    assert same(find_tokenizer("bert", tiny("bert").get_vocab_size(), weights=weights), "bert")


def test_a_vocabulary_of_another_size_is_anothers(tmp_path: Path) -> None:
    """T5 and UMT5 have the same special tokens."""
    (tmp_path / "tokenizer.json").write_text(tiny("t5").to_str())
    with pytest.raises(TokenizerMissing, match=rf"found {T5_TOKENS} tokens, expected about the encoder's 256384"):
        find_tokenizer("umt5", 256384, weights=tmp_path / "umt5.safetensors")
    with pytest.raises(TokenizerMissing, match="expected about the encoder's 9"):
        find_tokenizer("t5", 9, weights=tmp_path / "t5.safetensors")


@pytest.mark.parametrize(
    ("kind", "name", "data", "tokens"),
    [
        ("t5", "spiece_model", unigram_file(), T5_TOKENS),
        ("gemma", "spiece_model", byte_pair_file(), tiny("gemma").get_vocab_size() + 256),
        ("mistral", "tekken_model", tekken_file(), tiny("mistral").get_vocab_size() + 1000),
        ("qwen", "tokenizer_json", tiny("qwen").to_str().encode(), tiny("qwen").get_vocab_size()),
    ],
)
def test_it_is_found_inside_the_weights(kind: str, name: str, data: bytes, tokens: int) -> None:
    tensors = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8), "x": torch.ones(1)}
    found = find_tokenizer(kind, tokens, tensors=tensors)
    assert found.source == f"tensor '{name}'"
    assert found.encode("a red cat").ids


def test_a_named_folder_is_the_only_place(tmp_path: Path) -> None:
    named, beside = tmp_path / "named", tmp_path / "beside"
    for folder in (named, beside):
        folder.mkdir()
    (beside / "spiece.model").write_bytes(unigram_file())
    weights = beside / "t5.safetensors"
    with pytest.raises(TokenizerMissing, match=rf"Put tokenizer\.json or spiece\.model of google/t5\S+ into {named}"):
        find_tokenizer("t5", T5_TOKENS, folder=named, weights=weights)
    (named / "spiece.model").write_bytes(unigram_file())
    assert find_tokenizer("t5", T5_TOKENS, folder=named).source == str(named / "spiece.model")


def test_a_damaged_file_in_a_named_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFile, match=r"tokenizer\.json: found no tokenizer"):
        find_tokenizer("t5", T5_TOKENS, folder=tmp_path)


def test_a_missing_one_says_what_to_put_where(tmp_path: Path) -> None:
    weights = tmp_path / "t5xxl_fp8.safetensors"
    with pytest.raises(TokenizerMissing) as raised:
        find_tokenizer("t5", 32128, weights=weights)
    assert str(raised.value) == (
        "tokenizer of T5: found none. Put tokenizer.json or spiece.model of google/t5-v1_1-xxl into "
        f"{tmp_path / 'tokenizer'}, or next to the weights as t5xxl_fp8.tokenizer.json"
    )


def _write_qwen(folder: Path, *, added: dict[str, int] | None) -> None:
    model = json.loads(tiny("qwen").to_str())["model"]
    special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"}
    own = {token: i - 3 for token, i in model["vocab"].items() if token not in special}
    (folder / "vocab.json").write_text(json.dumps(own))
    lines = [" ".join(pair) for pair in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *lines, ""]))
    if added is not None:
        (folder / "added_tokens.json").write_text(json.dumps(added))


def test_qwens_two_files_are_a_tokenizer(tmp_path: Path) -> None:
    model = json.loads(tiny("qwen").to_str())["model"]
    count = len(model["vocab"]) - 3
    added = {"<|endoftext|>": count, "<|im_start|>": count + 1, "<|im_end|>": count + 2}
    _write_qwen(tmp_path, added=added)
    found = find_tokenizer("qwen", count + 3, folder=tmp_path)
    assert found.pad_id == count
    text = "<|im_start|>a red cat<|im_end|>"
    # the training put the special tokens first, the files last
    expected = [i - 3 if i >= 3 else i + count for i in tiny("qwen").encode(text).ids]
    assert list(found.encode(text).ids) == expected
    _write_qwen(tmp_path, added={**added, "<|im_end|>": count + 7})
    with pytest.raises(CorruptFile, match=rf"'<\|im_end\|>' gets the id {count + 2}, expected {count + 7}"):
        find_tokenizer("qwen", count + 3, folder=tmp_path)


def test_berts_list_is_a_tokenizer(tmp_path: Path) -> None:
    ids = tiny("bert").get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.__getitem__)))
    found = find_tokenizer("bert", len(ids), folder=tmp_path)
    assert same(found, "bert")
    assert (found.begin, found.end) == ((ids["[CLS]"],), (ids["[SEP]"],))


def test_lengths_that_a_file_asks_for_do_not_count(tmp_path: Path) -> None:
    """Published files of T5 cut texts at 512 tokens and fill them up; that is the reading's business."""
    own = Tokenizer.from_str(tiny("t5").to_str())
    own.enable_truncation(4)
    own.enable_padding(length=4)
    (tmp_path / "tokenizer.json").write_text(own.to_str())
    assert same(find_tokenizer("t5", T5_TOKENS, folder=tmp_path), "t5")


def test_a_vocabulary_with_a_token_beyond_the_encoders_table_is_anothers(tmp_path: Path) -> None:
    """There are few enough tokens, but one has a number that the encoder has no row for."""
    said = json.loads(tiny("gemma").to_str())
    vocabulary = said["model"]["vocab"]
    size = tiny("gemma").get_vocab_size()
    beyond = next(token for token, number in vocabulary.items() if number == size - 1)
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    assert find_tokenizer("gemma", size + 5, folder=tmp_path).last_id == size - 1
    vocabulary[beyond] = size + 5
    (tmp_path / "tokenizer.json").write_text(json.dumps(said))
    assert find_tokenizer("gemma", size + 6, folder=tmp_path).last_id == size + 5
    with pytest.raises(TokenizerMissing, match=rf"found the token id {size + 5}, expected ids below {size + 5}"):
        find_tokenizer("gemma", size + 5, folder=tmp_path)


@pytest.mark.parametrize("model", ["WordLevel", "Unigram", "WordPiece"])
def test_a_tokenizer_that_cannot_read_every_text_is_refused_when_it_is_found(tmp_path: Path, model: str) -> None:
    """It has no token for what it does not know, and raises at the first prompt that has a strange sign."""
    tokens = ["<pad>", "</s>", *(letter for letter in " ,abcdefghijklmnopqrstuvwxyz0123456789")]
    ids = {token: number for number, token in enumerate(tokens)}
    unsure = {
        "WordLevel": lambda: models.WordLevel(ids, unk_token="<unk>"),
        "Unigram": lambda: models.Unigram([(token, -1.0) for token in tokens]),
        "WordPiece": lambda: models.WordPiece(ids, unk_token="<unk>"),
    }[model]()
    (tmp_path / "tokenizer.json").write_text(Tokenizer(unsure).to_str())
    with pytest.raises(CorruptFile, match=r"tokenizer\.json: found a tokenizer that cannot read every text"):
        find_tokenizer("t5", len(tokens), folder=tmp_path)
    with pytest.raises(TokenizerMissing, match="cannot read every text"):
        find_tokenizer("t5", len(tokens), weights=tmp_path / "t5.safetensors")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": "a"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": {}}}),
        ("added_tokens.json", {"a": None}),
        ("added_tokens.json", {"a": 1e400}),
    ],
)
def test_added_tokens_that_are_none_are_refused_by_file(tmp_path: Path, name: str, said: object) -> None:
    _write_qwen(tmp_path, added=None)
    (tmp_path / name).write_text(json.dumps(said))
    with pytest.raises(CorruptFile, match=rf"{name}: found no list of added tokens: "):
        find_tokenizer("qwen", tiny("qwen").get_vocab_size(), folder=tmp_path)


def test_kinds_are_those_of_the_published_encoders() -> None:
    assert set(KINDS.values()) | {"mt5", "pile_t5"} == set(TOKENIZER_FACTS)
    assert tokenizer_kind("t5xl", 250112, "t5") == "mt5"
    assert tokenizer_kind("t5xl", 32128, "umt5") == "pile_t5"
    assert tokenizer_kind("t5xl", 32128, "t5") == "t5"
    assert tokenizer_kind("qwen3_4b") == "qwen"


def test_a_tokenizer_without_the_special_tokens_of_its_kind_is_refused() -> None:
    with pytest.raises(TokenizerMissing, match=r"the vocabulary lacks '\[CLS\]', expected the tokenizer of BERT"):
        TextTokenizer(tiny("t5"), "bert")
