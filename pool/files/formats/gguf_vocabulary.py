"""Reads the vocabulary in the GGUF file of a text encoder. Torch-free.

Knows llama.cpp's names of its parts, and that the first part of a split file contains them; not how a text is tokenized
(`pool.models.text.gguf_tokenizer`).
Source: the GGUF specification (ggml, docs/gguf.md), and the keys of the `gguf` package 0.19.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelpool.pool.files.formats.gguf_entries import GgufEntries, GgufReader, MalformedGguf, read_entries
from modelpool.pool.files.formats.gguf_parts import parts_of
from modelpool.pool.files.formats.regular_file import open_regular
from modelpool.pool.values.core.errors import counted

_KEY = "tokenizer.ggml."
#: upper limits of array lengths, beyond any published vocabulary; of the character map in bytes
_MOST: Mapping[str, int] = {
    "tokens": 1 << 20, "scores": 1 << 20, "token_type": 1 << 20, "merges": 1 << 20, "precompiled_charsmap": 1 << 20,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokenizer data of a file.

    model         "gpt2" for byte-pair encoding, "llama" for SentencePiece's pairs, "t5" for its unigrams; "" for none
    tokens        by token id
    scores        of each token; empty where the file has none
    types         SentencePiece's type number of each token; empty where the file has none
    merges        pairs to merge, in order of priority, each separated by a space
    characters    SentencePiece's table of character replacements
    space_prefix  whether a space is prepended to a text
    """

    model: str
    tokens: tuple[str, ...]
    scores: tuple[float, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    characters: bytes
    space_prefix: bool


def read_gguf_vocabulary(path: str) -> GgufVocabulary:
    """Read the vocabulary of the GGUF file at `path`, or of the first part if it is a part of a split model.

    Raises CorruptFile for a damaged file or an inconsistent vocabulary.
    """
    first = parts_of(path)[0]
    with open_regular(first, "a GGUF file") as (file, file_bytes):
        try:
            return _vocabulary(read_entries(GgufReader(file, file_bytes), _most_values))
        except MalformedGguf as error:
            raise error.for_file(first) from None


def _most_values(name: str) -> int:
    return _MOST.get(name.removeprefix(_KEY), 0) if name.startswith(_KEY) else 0


def _vocabulary(found: GgufEntries) -> GgufVocabulary:
    tokens, scores, types = _texts(found, "tokens"), _numbers(found, "scores"), _whole_numbers(found, "token_type")
    for name, values in (("scores", scores), ("token_type", types)):
        if values and len(values) != len(tokens):
            raise MalformedGguf(
                f"entry '{_KEY}{name}': found {counted(len(values), 'value')} for {counted(len(tokens), 'token')}"
            )
    # bytes, which some writers store as signed numbers
    characters = bytes(number & 0xFF for number in _whole_numbers(found, "precompiled_charsmap"))
    return GgufVocabulary(
        model=found.metadata.get(f"{_KEY}model", ""),
        tokens=tokens,
        scores=tuple(map(float, scores)),
        types=types,
        merges=_texts(found, "merges"),
        characters=characters,
        space_prefix=found.metadata.get(f"{_KEY}add_space_prefix", "True") == "True",
    )


def _texts(found: GgufEntries, name: str) -> tuple[str, ...]:
    values = found.arrays.get(_KEY + name, ())
    texts = tuple(value for value in values if isinstance(value, str))
    if len(texts) != len(values):
        raise MalformedGguf(f"entry '{_KEY}{name}': found numbers, expected texts")
    return texts


def _numbers(found: GgufEntries, name: str) -> tuple[int | float, ...]:
    values = found.arrays.get(_KEY + name, ())
    numbers = tuple(value for value in values if not isinstance(value, str))
    if len(numbers) != len(values):
        raise MalformedGguf(f"entry '{_KEY}{name}': found texts, expected numbers")
    return numbers


def _whole_numbers(found: GgufEntries, name: str) -> tuple[int, ...]:
    values = _numbers(found, name)
    numbers = tuple(value for value in values if isinstance(value, int))
    if len(numbers) != len(values):
        raise MalformedGguf(f"entry '{_KEY}{name}': found fractions, expected whole numbers")
    return numbers
