"""`TextTokenizer`: the tokenizer of a text encoder that is no CLIP, with what its kind puts around a text.

Knows which special tokens each kind has; the vocabulary comes from somewhere else (`pool.text.tokenizer_files`).
Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from modelpool.pool.core.errors import UnusableField, UserError
from modelpool.pool.formats.strict_json import brief
from modelpool.pool.text.clip_tokenizer import letters_of_bytes
from modelpool.pool.text.tokenizer_errors import faults_become


class TokenizerMissing(UserError):
    """A text encoder whose tokenizer is nowhere, or is another's. The message says which file to put where."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a kind of tokenizer puts around a text.

    title       for human readers
    begin, end  the tokens before and after it; empty for none
    pads        the token that fills a text up: the first of these that the vocabulary has
    published   where the tokenizer of a published model is found, for people who miss it
    """

    title: str
    begin: str = ""
    end: str = ""
    pads: tuple[str, ...] = ("<pad>",)
    published: str = ""


_T5_FILES = "tokenizer.json or spiece.model"
_QWEN_FILES = "tokenizer.json, or vocab.json and merges.txt,"
#: by kind. Source: tokenizer_config.json of each model
TOKENIZER_FACTS: Mapping[str, TokenizerFacts] = {
    "t5": TokenizerFacts("T5", end="</s>", published=f"{_T5_FILES} of google/t5-v1_1-xxl"),
    "mt5": TokenizerFacts("multilingual T5", end="</s>", published=f"{_T5_FILES} of google/mt5-xl"),
    "umt5": TokenizerFacts("UMT5", end="</s>", published=f"{_T5_FILES} of google/umt5-xxl"),
    "byt5": TokenizerFacts("ByT5", end="</s>"),
    "pile_t5": TokenizerFacts(
        "Pile-T5", end="</s>", pads=("<pad>", "<s>"),
        published="tokenizer.json or tokenizer.model of EleutherAI/pile-t5-xl",
    ),
    "bert": TokenizerFacts(
        "BERT", "[CLS]", "[SEP]", ("[PAD]",), "tokenizer.json or vocab.txt of Tencent-Hunyuan/HunyuanDiT-Diffusers"
    ),
    "llama3": TokenizerFacts(
        "Llama 3", "<|begin_of_text|>", pads=("<pad>", "<|finetune_right_pad_id|>", "<|end_of_text|>", "<|eot_id|>"),
        published="tokenizer.json of meta-llama/Llama-3.1-8B-Instruct",
    ),
    "mistral": TokenizerFacts(
        "Mistral Small 3", "<s>", published="tokenizer.json or tekken.json of mistralai/Mistral-Small-3.2-24B-Instruct"
    ),
    "gemma": TokenizerFacts("Gemma", "<bos>", published="tokenizer.json or tokenizer.model of google/gemma-2-2b"),
    "qwen": TokenizerFacts(
        "Qwen", pads=("<|endoftext|>",), published=f"{_QWEN_FILES} of Qwen/Qwen2.5-VL-7B-Instruct or Qwen/Qwen3-4B"
    ),
}  # fmt: skip
#: tokens that only some tokenizers of a kind have, and a published one that does
_PUBLISHED_WITH: Mapping[str, str] = {
    "<image>": "the tokenizer.json of xtuner/llava-llama-3-8b-v1_1-transformers, which has a token for an image",
}
#: the kind of tokenizer of each text encoder, by the name that recognition gives
KINDS: Mapping[str, str] = {
    "t5xxl": "t5", "t5xxl_old": "t5", "t5_base": "t5", "t5xl": "t5", "umt5_xxl": "umt5", "hydit_bert": "bert",
    "byt5_small_glyph": "byt5",
    "llama3_8b": "llama3", "mistral3_24b": "mistral", "mistral3_24b_pruned": "mistral", "gemma2_2b": "gemma",
    "gemma3_4b": "gemma", "qwen25_3b": "qwen", "qwen25_7b": "qwen", "qwen3_2b": "qwen", "qwen3_4b": "qwen",
    "qwen3_8b": "qwen",
}  # fmt: skip
#: the kind whose tokens are bytes
_BYTES = "byt5"
#: rows of the tables of tokens that tell multilingual T5, and Pile-T5 has positions in each layer as UMT5 has
_MT5_VOCABULARY = 200_000


def tokenizer_kind(encoder: str, vocabulary: int = 0, architecture: str = "") -> str:
    """The kind of tokenizer of the text encoder `encoder`, whose table has so many tokens.

    T5-XL is read by three: HunyuanDiT's is multilingual, AuraFlow's is Pile-T5.
    Raises KeyError for an encoder without one here, such as CLIP.
    """
    if encoder == "t5xl" and vocabulary >= _MT5_VOCABULARY:
        return "mt5"
    if encoder == "t5xl" and architecture == "umt5":
        return "pile_t5"
    return KINDS[encoder]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as tokens: their ids, and for each the number of characters of the text up to its end, spaces at its end
    left out unless it is nothing else."""

    ids: tuple[int, ...]
    ends: tuple[int, ...]


def byte_tokenizer() -> Tokenizer:
    """ByT5's, whose tokens are bytes and need no file: after three special tokens, each byte in its order."""
    special = ("<pad>", "</s>", "<unk>")
    letters = letters_of_bytes()
    ids = {token: i for i, token in enumerate((*special, *(letters[byte] for byte in range(256))))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


class TextTokenizer:
    """A vocabulary, and the special tokens of its kind."""

    def __init__(self, tokenizer: Tokenizer, kind: str, source: str = "a tokenizer") -> None:
        """`source` says where it is from, for messages. Raises TokenizerMissing when the special tokens of `kind` are
        not in its vocabulary: it is another's."""
        self.kind = kind
        self.facts = TOKENIZER_FACTS[kind]
        self.source = source
        self._tokenizer = tokenizer
        self.begin = tuple(self.id_of(token) for token in (self.facts.begin,) if token)
        self.end = tuple(self.id_of(token) for token in (self.facts.end,) if token)
        pads = [found for token in self.facts.pads if (found := tokenizer.token_to_id(token)) is not None]
        if not pads:
            raise self._missing(self.facts.pads[0])
        self.pad_id = pads[0]

    @property
    def is_of_bytes(self) -> bool:
        """Whether its tokens are bytes, which no file says."""
        return self.kind == _BYTES

    @property
    def size(self) -> int:
        """How many tokens the vocabulary has."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def last_id(self) -> int:
        """The largest number that a token has: an encoder's table has a row for it."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def id_of(self, token: str) -> int:
        """The id of a token of the vocabulary. Raises TokenizerMissing when it has none such."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise self._missing(token)
        return found

    def encode(self, text: str) -> Tokens:
        """The tokens of `text`, without those around it, of any length.

        Half of a surrogate pair, which no encoding of Unicode can hold, counts as a question mark.
        Raises UnusableField for a text that the tokenizer gives up on.
        """
        whole = text.encode("utf-8", "replace").decode("utf-8")

        def refused(said: str) -> UnusableField:
            wanted = f"a text that the tokenizer of {self.facts.title} can read"
            return UnusableField(f"prompt: found {brief(whole)}, expected {wanted} ({self.source}: {said})")

        with faults_become(refused):
            found = self._tokenizer.encode(whole, add_special_tokens=False)
        ends = (
            start + len(whole[start:end].rstrip()) if whole[start:end].strip() else end for start, end in found.offsets
        )
        return Tokens(tuple(found.ids), tuple(ends))

    def as_json(self) -> str:
        """The tokenizer as `tokenizers` writes it into tokenizer.json, with what its kind puts around a text."""
        own = Tokenizer.from_str(self._tokenizer.to_str())
        around = " ".join(token for token in (self.facts.begin, "$A", self.facts.end) if token)
        special = [(token, self.id_of(token)) for token in (self.facts.begin, self.facts.end) if token]
        if special:
            own.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
        return own.to_str()

    @property
    def pad(self) -> str:
        """The token that fills a text up."""
        return str(self._tokenizer.id_to_token(self.pad_id))

    def _missing(self, token: str) -> TokenizerMissing:
        wanted = _PUBLISHED_WITH.get(token, f"the tokenizer of {self.facts.title}")
        return TokenizerMissing(f"{self.source}: found a vocabulary without {token!r}, expected {wanted}")
