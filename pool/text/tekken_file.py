"""Vocabularies in the form of Mistral's tekken.json as tokenizers. Torch-free.

Its tokens are bytes with ranks, after special ones with numbers of their own; two tokens are joined where what they
make is a token, the lowest rank first. Source of the form: mistral-common, and the file of
mistralai/Mistral-Small-3.2-24B-Instruct-2506.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from pool.errors import CorruptFile
from pool.text.tokenizer import letters_of_bytes

#: special tokens of files that do not list theirs, by number
_OLD_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
#: a pattern longer than this cuts no text into words
_LONGEST_PATTERN = 4096
_MOST_TOKENS = 1 << 20


def tekken_tokenizer(data: bytes, source: str) -> Tokenizer:
    """The tokenizer of a tekken.json's bytes; `source` names them in messages. Raises CorruptFile."""
    try:
        found = json.loads(data)
        return _tokenizer(found["config"], found["vocab"], found.get("special_tokens") or [])
    except CorruptFile:
        raise
    except (
        AttributeError, LookupError, RecursionError, TypeError, UnicodeDecodeError, ValueError, binascii.Error,
    ) as error:  # fmt: skip
        raise CorruptFile(f"{source}: found no vocabulary of tekken, expected one: {error!r}") from error


def _tokenizer(config: dict[str, Any], vocabulary: list[dict[str, Any]], special: list[dict[str, Any]]) -> Tokenizer:
    first, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
    pattern = str(config["pattern"])
    if not 0 <= first <= size <= _MOST_TOKENS or len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"{size} tokens, {first} of them special, and a pattern of {len(pattern)} signs")
    letters = letters_of_bytes()
    ranks: dict[str, int] = {}
    for entry in vocabulary[: size - first]:
        token = "".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"], validate=True))
        ranks[token] = int(entry["rank"])
    named = {int(entry["rank"]): str(entry["token_str"]) for entry in special} or dict(enumerate(_OLD_SPECIAL))
    own = [named.get(number, f"<SPECIAL_{number}>") for number in range(first)]
    ids = {token: number for number, token in enumerate(own)} | {t: rank + first for t, rank in ranks.items()}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_merges(ranks), ignore_merges=True))
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    except Exception as error:  # tokenizers raises nothing narrower
        raise ValueError(str(error)) from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in own])
    return tokenizer


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """All ways in which two tokens make a third, that of the lowest rank first."""
    ways = [
        (rank, ranks[token[:cut]], ranks[token[cut:]], token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    return [(first, second) for *_, first, second in sorted(ways)]
