"""Vocabularies in the form of SentencePiece (spiece.model, tokenizer.model) as tokenizers. Torch-free.

The file is a message of protocol buffers, of which the few fields that are needed are read here, without trusting any
of its lengths. Unigram models (T5, UMT5) and byte-pair ones (Gemma, Pile-T5) become `tokenizers.Tokenizer`s that give
the same ids. Source of the numbers of fields: sentencepiece_model.proto of google/sentencepiece.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from pool.errors import CorruptFile
from pool.text.merges import ways_to_make
from pool.text.tokenizer_faults import faults_become

#: what stands for a space
SPACE = "\u2581"
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_PIECE, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARACTERS, _DUMMY_PREFIX = 2, 3
#: bytes of a piece; pieces are short, and a longer one is none
_LONGEST_PIECE = 1 << 12
#: bytes of all pieces; UMT5's have 2.5 million
_MOST_PIECE_BYTES = 1 << 23


class _Type(IntEnum):
    """What a piece is."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class _Model(IntEnum):
    """How text is cut into pieces."""

    UNIGRAM = 1
    BPE = 2


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What such a file says."""

    pieces: tuple[_Piece, ...]
    model: int
    byte_fallback: bool
    characters: bytes
    dummy_prefix: bool


def sentencepiece_tokenizer(data: bytes, source: str) -> Tokenizer:
    """The tokenizer of a SentencePiece file's bytes; `source` names them in messages. Raises CorruptFile."""
    found = _read(data, source)
    with faults_become(lambda said: CorruptFile(f"{source}: found no usable SentencePiece vocabulary: {said}")):
        match found.model:
            case _Model.UNIGRAM:
                tokenizer = _unigram(found, source)
            case _Model.BPE:
                tokenizer = _byte_pairs(found)
            case _:
                raise CorruptFile(f"{source}: found SentencePiece of type {found.model}, expected Unigram or BPE")
        special = (_Type.CONTROL, _Type.UNKNOWN)
        tokenizer.add_special_tokens([AddedToken(p.text, normalized=False) for p in found.pieces if p.type in special])
        own = [AddedToken(p.text, normalized=False) for p in found.pieces if p.type == _Type.USER_DEFINED]
        tokenizer.add_tokens(own)
    return tokenizer


def _unigram(found: _Vocabulary, source: str) -> Tokenizer:
    unknown = [i for i, piece in enumerate(found.pieces) if piece.type == _Type.UNKNOWN]
    if len(unknown) != 1:
        raise CorruptFile(f"{source}: found {len(unknown)} pieces for the unknown, expected one")
    tokenizer = Tokenizer(
        models.Unigram([(p.text, p.score) for p in found.pieces], unknown[0], byte_fallback=found.byte_fallback)
    )
    if found.characters:
        tokenizer.normalizer = normalizers.Precompiled(found.characters)
    spaces = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always" if found.dummy_prefix else "never")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), spaces])
    return tokenizer


def _byte_pairs(found: _Vocabulary) -> Tokenizer:
    ids = {piece.text: i for i, piece in enumerate(found.pieces)}
    unknown = next((piece.text for piece in found.pieces if piece.type == _Type.UNKNOWN), None)
    scores = {piece.text: piece.score for piece in found.pieces if piece.type in (_Type.NORMAL, _Type.USER_DEFINED)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(scores, ids),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=found.byte_fallback,
        )
    )
    steps = [normalizers.Prepend(SPACE)] if found.dummy_prefix else []
    characters = [normalizers.Precompiled(found.characters)] if found.characters else []
    tokenizer.normalizer = normalizers.Sequence([*characters, *steps, normalizers.Replace(Regex(" "), SPACE)])
    return tokenizer


def _merges(scores: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """All ways in which two pieces make a third, that of the best score first."""
    ways = [
        (-scores[text], cut, len(text) - cut, ids[text[:cut]], ids[text[cut:]])
        for text, cut in ways_to_make(scores, scores)
    ]
    by_id = {number: text for text, number in ids.items()}
    return [(by_id[first], by_id[second]) for *_, first, second in sorted(ways)]


def _read(data: bytes, source: str) -> _Vocabulary:
    pieces: list[_Piece] = []
    model, byte_fallback, characters, dummy_prefix = int(_Model.UNIGRAM), False, b"", True
    piece_bytes = 0
    try:
        for field, value in _fields(data):
            if field == _PIECES and isinstance(value, bytes):
                pieces.append(_piece(value))
                piece_bytes += len(value)
                if piece_bytes > _MOST_PIECE_BYTES:
                    raise ValueError(f"more than {_MOST_PIECE_BYTES} bytes of pieces")
            elif field == _TRAINER and isinstance(value, bytes):
                trainer = dict(_fields(value))
                model = _number(trainer.get(_MODEL_TYPE, model))
                byte_fallback = bool(trainer.get(_BYTE_FALLBACK, byte_fallback))
            elif field == _NORMALIZER and isinstance(value, bytes):
                normalizer = dict(_fields(value))
                found = normalizer.get(_CHARACTERS, b"")
                characters = found if isinstance(found, bytes) else b""
                dummy_prefix = bool(normalizer.get(_DUMMY_PREFIX, dummy_prefix))
    except (IndexError, UnicodeDecodeError, struct.error, ValueError) as error:
        raise CorruptFile(f"{source}: found no SentencePiece model, expected one: {error}") from error
    if not pieces:
        raise CorruptFile(f"{source}: found a SentencePiece model without pieces, expected some")
    return _Vocabulary(tuple(pieces), model, byte_fallback, characters, dummy_prefix)


def _piece(data: bytes) -> _Piece:
    fields = dict(_fields(data))
    text, score, kind = fields.get(_PIECE, b""), fields.get(_SCORE, b"\0\0\0\0"), fields.get(_TYPE, int(_Type.NORMAL))
    if not isinstance(text, bytes) or not isinstance(score, bytes) or len(text) > _LONGEST_PIECE:
        raise ValueError("a piece is no text with a score")
    (number,) = struct.unpack("<f", score)
    if not math.isfinite(number):
        raise ValueError(f"a piece has the score {number}")
    return _Piece(text.decode("utf-8"), number, _number(kind))


def _number(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("found a text, expected a number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message of protocol buffers: number and value. Raises ValueError and IndexError."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        match tag & 7:
            case 0:
                value: int | bytes
                value, place = _varint(data, place)
            case 1:
                value, place = _taken(data, place, 8)
            case 2:
                length, place = _varint(data, place)
                value, place = _taken(data, place, length)
            case 5:
                value, place = _taken(data, place, 4)
            case kind:
                raise ValueError(f"a field of type {kind} at byte {place}")
        yield tag >> 3, value


def _taken(data: bytes, place: int, length: int) -> tuple[bytes, int]:
    if length > len(data) - place:
        raise ValueError(f"a field of {length} bytes at byte {place} of {len(data)}")
    return data[place : place + length], place + length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place += 1
        if byte < 0x80:
            return number, place
    raise ValueError(f"a number without end at byte {place}")
