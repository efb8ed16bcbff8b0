"""Vocabularies in the form of Mistral's tekken.json as tokenizers. Torch-free.

Its tokens are bytes with ranks, after special ones with numbers of their own; two tokens are joined where what they
make is a token, the lowest rank first. Source of the form: mistral-common, and the file of
mistralai/Mistral-Small-3.2-24B-Instruct-2506.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from modelpool.pool.core.errors import CorruptFile
from modelpool.pool.formats.strict_json import brief
from modelpool.pool.text.clip_tokenizer import letters_of_bytes
from modelpool.pool.text.merges import ways_to_make
from modelpool.pool.text.tokenizer_errors import faults_become

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
    # whatever a file that is no such object leads to
    with faults_become(lambda said: CorruptFile(f"{source}: found no vocabulary of tekken, expected one: {said}")):
        found = json.loads(data)
        return _tokenizer(found["config"], found["vocab"], found.get("special_tokens") or [])


def _tokenizer(config: dict[str, Any], vocabulary: list[dict[str, Any]], special: list[dict[str, Any]]) -> Tokenizer:
    size = _number(config, "default_vocab_size", _MOST_TOKENS + 1)
    first = _number(config, "default_num_special_tokens", size + 1)
    pattern = str(config["pattern"])
    if len(pattern) > _LONGEST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} signs")
    letters = letters_of_bytes()
    ranks: dict[str, int] = {}
    for entry in vocabulary[: size - first]:
        token = "".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"], validate=True))
        ranks[token] = _number(entry, "rank", size - first)
    named = {_number(entry, "rank", size): str(entry["token_str"]) for entry in special} or dict(
        enumerate(_OLD_SPECIAL)
    )
    own = [named.get(number, f"<SPECIAL_{number}>") for number in range(first)]
    ids = {token: number for number, token in enumerate(own)} | {t: rank + first for t, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_merges(ranks), ignore_merges=True))
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in own])
    return tokenizer


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """All ways in which two tokens make a third, that of the lowest rank first."""
    ways = [
        (ranks[token], ranks[token[:cut]], ranks[token[cut:]], token, cut) for token, cut in ways_to_make(ranks, ranks)
    ]
    return [(token[:cut], token[cut:]) for *_, token, cut in sorted(ways)]


def _number(said: dict[str, Any], key: str, below: int) -> int:
    found = said[key]
    if type(found) is not int or not 0 <= found < below:
        raise ValueError(f"{key}: {brief(found)}, expected a whole number from 0 to {below - 1}")
    return found
