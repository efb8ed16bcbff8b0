"""The CLIP tokenizer of the Stable Diffusion family.

Contains the vocabulary (`clip_bpe_vocab.txt.gz`, vendored; see NOTICE) and its rules. Does not know prompt weights or
chunks. The rules are as in `transformers.CLIPTokenizer`; the ids are equal for every text.
"""

from __future__ import annotations

import gzip
from importlib import resources

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from modelpool.pool.values.core.errors import counted

VOCABULARY_FILE = "clip_bpe_vocab.txt.gz"
VOCABULARY_SIZE = 49408
BEGIN_TOKEN = "<|startoftext|>"
END_TOKEN = "<|endoftext|>"
BEGIN_ID = 49406
END_ID = 49407
END_OF_WORD = "</w>"

#: merges of the vocabulary that CLIP uses: all tokens except bytes (with and without end of word) and special tokens
MERGES = VOCABULARY_SIZE - 2 * 256 - 2

#: CLIP's words: a special token, an English suffix, letters, one digit, or a run of other characters
WORD_PATTERN = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class ClipTokenizer:
    """Byte-pair encoding with CLIP's vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls) -> ClipTokenizer:
        """Build the tokenizer from the vendored vocabulary. Takes a fraction of a second; keep the result."""
        merges = read_merges()
        tokenizer = Tokenizer(
            models.BPE(
                vocab=build_vocabulary(merges),
                merges=merges,
                end_of_word_suffix=END_OF_WORD,
                unk_token=END_TOKEN,
            )
        )
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="removed", invert=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.add_special_tokens([BEGIN_TOKEN, END_TOKEN])
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without begin and end tokens, of any length.

        An unpaired surrogate, which has no UTF-8 encoding, is read as a question mark.
        """
        whole = text.encode("utf-8", "replace").decode("utf-8")
        return list(self._tokenizer.encode(whole, add_special_tokens=False).ids)


def read_merges() -> list[tuple[str, str]]:
    """Return the merges that CLIP uses, the highest priority first."""
    data = resources.files("modelpool.pool.models.text").joinpath(VOCABULARY_FILE).read_bytes()
    lines = gzip.decompress(data).decode("utf-8").split("\n")
    # the first line names the file's version; the file has more merges than CLIP uses
    pairs = (line.split(" ") for line in lines[1 : MERGES + 1])
    return [(first, second) for first, second in pairs]


def build_vocabulary(merges: list[tuple[str, str]]) -> dict[str, int]:
    """Return token to id: bytes, bytes that end a word, merges, then the special tokens."""
    letters = byte_letters()
    tokens = [
        *letters,
        *(letter + END_OF_WORD for letter in letters),
        *(first + second for first, second in merges),
        BEGIN_TOKEN,
        END_TOKEN,
    ]
    assert len(set(tokens)) == VOCABULARY_SIZE, f"{counted(len(set(tokens)), 'token')}, expected {VOCABULARY_SIZE}"
    return {token: i for i, token in enumerate(tokens)}


def byte_letters() -> list[str]:
    """Return a printable character for each of the 256 bytes, in the order of CLIP's ids.

    Printable bytes come first and stand for themselves; the others get the characters from U+0100 on.
    Source: byte-level BPE as introduced by GPT-2.
    """
    return list(letters_of_bytes().values())


def letters_of_bytes() -> dict[int, str]:
    """Return the same characters by byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
