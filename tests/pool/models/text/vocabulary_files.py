"""The tiny tokenizers in the forms in which vocabularies are published."""

from __future__ import annotations

import base64
import json
from functools import cache

from transformers.utils import sentencepiece_model_pb2_new as sentencepiece

from modelpool.pool.models.text.clip_tokenizer import letters_of_bytes
from tests.pool.models.text.tiny_tokenizers import tiny

_CONTROL = {"<pad>", "</s>", "<eos>", "<bos>"}
#: what tekken takes for a word, shortened
TEKKEN_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _model(pieces: list[tuple[str, float]], **trainer: object) -> sentencepiece.ModelProto:
    types = sentencepiece.ModelProto.SentencePiece
    proto = sentencepiece.ModelProto()
    for text, score in pieces:
        kind = types.CONTROL if text in _CONTROL else types.UNKNOWN if text == "<unk>" else types.NORMAL
        kind = types.BYTE if text.startswith("<0x") else kind
        proto.pieces.add(piece=text, score=score, type=kind)
    for name, value in trainer.items():
        setattr(proto.trainer_spec, name, value)
    return proto


@cache
def unigram_file() -> bytes:
    """The tiny T5's vocabulary as a spiece.model."""
    vocabulary = json.loads(tiny("t5").to_str())["model"]["vocab"]
    proto = _model([(text, score) for text, score in vocabulary], model_type=sentencepiece.TrainerSpec.UNIGRAM)
    return bytes(proto.SerializeToString())


def piece_file(pieces: list[str], characters: bytes = b"", *, scores: float | None = None) -> bytes:
    """A model of byte pairs with these pieces, each worse than the one before unless `scores` says what all have; with
    `characters` as the table of what signs become."""
    listed = [("<unk>", 0.0), *((text, -float(i) if scores is None else scores) for i, text in enumerate(pieces))]
    proto = _model(listed, model_type=sentencepiece.TrainerSpec.BPE)
    if characters:
        proto.normalizer_spec.precompiled_charsmap = characters
    return bytes(proto.SerializeToString())


@cache
def byte_pair_pieces() -> tuple[tuple[str, float], ...]:
    """Pieces and scores after the tiny Gemma's, those that end words with a space left out."""
    model = json.loads(tiny("gemma").to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    scores = {text: -float(i) for i, text in enumerate(dict.fromkeys(merged))}
    bytes_ = [(f"<0x{byte:02X}>", 0.0) for byte in range(256)]
    rest = [(text, scores.get(text, -1e6)) for text in model["vocab"] if not text.startswith("<")]
    return (("<pad>", 0.0), ("<eos>", 0.0), ("<bos>", 0.0), ("<unk>", 0.0), *bytes_, *rest)


@cache
def byte_pair_file() -> bytes:
    """Those as a tokenizer.model of Gemma."""
    proto = _model(list(byte_pair_pieces()), model_type=sentencepiece.TrainerSpec.BPE, byte_fallback=True)
    proto.normalizer_spec.add_dummy_prefix = False
    return bytes(proto.SerializeToString())


@cache
def tekken_file() -> bytes:
    """The tiny Mistral's vocabulary as a tekken.json, its special tokens first."""
    model = json.loads(tiny("mistral").to_str())["model"]
    bytes_of = {letter: byte for byte, letter in letters_of_bytes().items()}
    special = [token["content"] for token in json.loads(tiny("mistral").to_str())["added_tokens"]]
    ordered = [*letters_of_bytes().values(), *("".join(pair) for pair in model["merges"])]
    tokens = list(dict.fromkeys(ordered))
    return json.dumps(
        {
            "config": {
                "pattern": TEKKEN_PATTERN,
                "num_vocab_tokens": len(tokens),
                "default_vocab_size": len(tokens) + 1000,
                "default_num_special_tokens": 1000,
                "version": "v11",
            },
            "vocab": [
                {
                    "rank": i,
                    "token_bytes": base64.b64encode(bytes(bytes_of[x] for x in token)).decode(),
                    "token_str": None,
                }
                for i, token in enumerate(tokens)
            ],
            "special_tokens": [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(special)],
        }
    ).encode()
