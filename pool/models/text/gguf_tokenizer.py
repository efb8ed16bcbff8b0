"""Builds the tokenizer of a text encoder from the vocabulary of its GGUF file. Torch-free.

The file has tokens, their types and merges; the word pattern, normalization and special tokens follow from the kind.
Source of Gemma's spaces and of the order of its merges: transformers 5.23, with which the tests compare. Its own
converter gives equal ids for tiny tokenizers of the five kinds, in 2 to 8 ms of CPU time against 1 to 3 ms here. It
checks neither sizes nor that a vocabulary fits the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from modelpool.pool.files.formats.gguf_vocabulary import GgufVocabulary, read_gguf_vocabulary
from modelpool.pool.models.text.sentencepiece_file import (
    SPACE,
    Piece,
    PieceType,
    Vocabulary,
    VocabularyModel,
    tokenizer_of_pieces,
    whole_tokens,
)
from modelpool.pool.models.text.tokenizer_errors import convert_errors
from modelpool.pool.models.text.word_patterns import LLAMA_WORDS, MISTRAL_WORDS, QWEN_WORDS
from modelpool.pool.values.core.errors import CorruptFile, counted


@dataclass(frozen=True, slots=True)
class _Words:
    """The way in which a byte-level BPE kind splits a text.

    pattern        pattern of a word
    whole_first    a word that is a token is not merged from parts
    is_normalized  composed letters are normalised first (NFC)
    """

    pattern: str
    whole_first: bool = True
    is_normalized: bool = False


#: by the kinds of `pool.models.text.text_tokenizer`
_WORDS: Mapping[str, _Words] = {
    "llama3": _Words(LLAMA_WORDS),
    "mistral": _Words(MISTRAL_WORDS),
    "qwen": _Words(QWEN_WORDS, whole_first=False, is_normalized=True),
    "qwen_embedding": _Words(QWEN_WORDS, whole_first=False, is_normalized=True),
}
_SENTENCEPIECE: Mapping[str, VocabularyModel] = {"llama": VocabularyModel.BPE, "t5": VocabularyModel.UNIGRAM}
#: kinds that put no space before a text, regardless of the file's settings
_WITHOUT_SPACE_BEFORE = ("gemma",)


def gguf_tokenizer(path: str, kind: str, source: str) -> Tokenizer:
    """Return the tokenizer of the text encoder of `kind` in the GGUF file at `path`; `source` names it in messages.

    Raises CorruptFile if the file has none, or none for a text encoder of `kind`.
    """
    found = read_gguf_vocabulary(path)
    if not found.tokens:
        raise CorruptFile(f"{source}: found no tokens, expected a vocabulary")
    if not found.types:
        raise CorruptFile(f"{source}: found no token types, which separate special tokens from text")
    if found.model in _SENTENCEPIECE:
        return tokenizer_of_pieces(_pieces(found, kind, source), source)
    if found.model != "gpt2" or kind not in _WORDS:
        expected = ", ".join((*_SENTENCEPIECE, *(["gpt2"] if kind in _WORDS else [])))
        raise CorruptFile(f"{source}: found a vocabulary of the model {found.model!r}, expected {expected}")
    with convert_errors(lambda problem: CorruptFile(f"{source}: found no usable vocabulary: {problem}")):
        return _byte_pairs(found, _WORDS[kind])


def _byte_pairs(found: GgufVocabulary, words: _Words) -> Tokenizer:
    ids = {token: number for number, token in enumerate(found.tokens)}
    if len(ids) != len(found.tokens):
        raise ValueError("a token occurs twice")
    parts = (merge.partition(" ") for merge in found.merges)
    pairs = [(first, second) for first, _, second in parts]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=words.whole_first))
    if words.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(words.pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    special = (PieceType.CONTROL, PieceType.USER_DEFINED)
    named = zip(found.tokens, found.types, strict=True)
    tokenizer.add_special_tokens(whole_tokens(token for token, type_ in named if type_ in special))
    return tokenizer


def _pieces(found: GgufVocabulary, kind: str, source: str) -> Vocabulary:
    """Return the vocabulary in SentencePiece form. For BPE, the order of the tokens is the order of the merges: files
    give tokens that were added later, such as Gemma's spaces, a single score."""
    model = _SENTENCEPIECE[found.model]
    if model is VocabularyModel.BPE:
        scores = tuple(-float(number) for number in range(len(found.tokens)))
    else:
        scores = found.scores
    if len(scores) != len(found.tokens) or not all(map(math.isfinite, scores)):
        raise CorruptFile(
            f"{source}: found {counted(len(scores), 'score')} for {counted(len(found.tokens), 'token')}, "
            f"expected one each, all finite"
        )
    texts = (SPACE * len(token) if token and not token.strip(" ") else token for token in found.tokens)
    pieces = tuple(Piece(*each) for each in zip(texts, scores, found.types, strict=True))
    by_bytes = any(piece.type == PieceType.BYTE for piece in pieces)
    return Vocabulary(
        pieces, int(model), by_bytes, found.characters, found.space_prefix and kind not in _WITHOUT_SPACE_BEFORE
    )
