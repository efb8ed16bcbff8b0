"""`TextTokenizer`: the tokenizer of a text encoder other than CLIP, with the special tokens of its kind.

The vocabulary comes from elsewhere (`pool.models.text.tokenizer_files`). Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from modelpool.pool.families.detection.text_encoders import INSIDE, SIGNATURES
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.models.text.clip_tokenizer import letters_of_bytes
from modelpool.pool.models.text.tokenizer_errors import convert_errors
from modelpool.pool.values.core.errors import UnusableField, UserError
from modelpool.pool.values.core.prompt_tokens import Tokens


class TokenizerMissing(UserError):
    """A missing tokenizer, or one of another text encoder. The message states which file to put where."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The special tokens of a kind of tokenizer.

    title       for display
    begin, end  tokens before and after a text, with spaces between several; empty for none
    pads        padding token: the first of these that the vocabulary has
    published   where to find the tokenizer of a published model, for error messages
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
        " or mistralai/Ministral-3-3B-Instruct-2512",
    ),
    "gemma": TokenizerFacts("Gemma", "<bos>", published="tokenizer.json or tokenizer.model of google/gemma-2-2b"),
    "t5gemma": TokenizerFacts("T5Gemma", published="tokenizer.json or tokenizer.model of google/t5gemma-b-b-ul2"),
    "glm": TokenizerFacts(
        "GLM 4", "[gMASK] <sop>", pads=("<|endoftext|>",), published="tokenizer.json of THUDM/CogView4-6B"
    ),
    "glm_image": TokenizerFacts(
        "GLM-Image", pads=("<|dit_token_16385|>",), published="tokenizer.json of the processor of zai-org/GLM-Image"
    ),
    "phi3": TokenizerFacts(
        "Phi 3", "<s>", pads=("<|endoftext|>",), published="tokenizer.json of Shitao/OmniGen-v1-diffusers"
    ),
    "qwen": TokenizerFacts(
        "Qwen", pads=("<|endoftext|>",), published=f"{_QWEN_FILES} of Qwen/Qwen2.5-VL-7B-Instruct or Qwen/Qwen3-4B"
    ),
    "qwen_embedding": TokenizerFacts(
        "Qwen 3 Embedding", end="<|endoftext|>", pads=("<|endoftext|>",),
        published=f"{_QWEN_FILES} of Qwen/Qwen3-Embedding-0.6B",
    ),
}  # fmt: skip
#: tokens that only some tokenizers of a kind have, and a published one that has it
_PUBLISHED_WITH: Mapping[str, str] = {
    "<image>": "the tokenizer.json of xtuner/llava-llama-3-8b-v1_1-transformers, which has a token for an image",
}
#: the kind of tokenizer by the architecture of a text encoder; CLIP has a tokenizer of its own
_OF_ARCHITECTURES: Mapping[str, str] = {
    "t5": "t5", "umt5": "umt5", "bert": "bert", "llama": "llama3", "mistral": "mistral", "ministral3": "mistral",
    "gemma2": "gemma", "gemma3": "gemma", "t5gemma": "t5gemma", "qwen2": "qwen", "qwen3": "qwen", "qwen3_vl": "qwen",
    "glm": "glm", "glm_image": "glm_image", "words": "phi3",
}  # fmt: skip
#: text encoders with another one
_OF_ENCODERS: Mapping[str, str] = {"byt5_small_glyph": "byt5", "qwen3_06b": "qwen_embedding"}
#: the kind of tokenizer of each text encoder, by its name in detection
KINDS: Mapping[str, str] = {
    facts.name: _OF_ENCODERS.get(facts.name, _OF_ARCHITECTURES[facts.architecture])
    for facts in (*(signature.facts for signature in SIGNATURES), *INSIDE)
    if facts.architecture in _OF_ARCHITECTURES
}
#: the kind with bytes as tokens
_BYTES = "byt5"
#: vocabulary sizes from here on are multilingual T5's; Pile-T5 has positions in each layer, like UMT5
_MT5_VOCABULARY = 200_000


def tokenizer_kind(encoder: str, vocabulary: int = 0, architecture: str = "") -> str:
    """Return the kind of tokenizer of the text encoder `encoder` with `vocabulary` tokens in its embedding table.

    Three kinds share the sizes of T5-XL: HunyuanDiT's is multilingual, AuraFlow's is Pile-T5.
    Raises KeyError for an encoder without one here, such as CLIP.
    """
    if encoder == "t5xl" and vocabulary >= _MT5_VOCABULARY:
        return "mt5"
    if encoder == "t5xl" and architecture == "umt5":
        return "pile_t5"
    return KINDS[encoder]


def byte_tokenizer() -> Tokenizer:
    """Return ByT5's tokenizer, which has bytes as tokens and needs no file: three special tokens, then the bytes in
    order."""
    special = ("<pad>", "</s>", "<unk>")
    letters = letters_of_bytes()
    ids = {token: i for i, token in enumerate((*special, *(letters[byte] for byte in range(256))))}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


class TextTokenizer:
    """A vocabulary, and the special tokens of its kind."""

    def __init__(self, tokenizer: Tokenizer, kind: str, source: str = "a tokenizer") -> None:
        """`source` names the origin in messages. Raises TokenizerMissing if the vocabulary lacks the special tokens of
        `kind`: it belongs to another encoder."""
        self.kind = kind
        self.facts = TOKENIZER_FACTS[kind]
        self.source = source
        self._tokenizer = tokenizer
        self.begin = tuple(self.id_of(token) for token in self.facts.begin.split())
        self.end = tuple(self.id_of(token) for token in (self.facts.end,) if token)
        pads = [found for token in self.facts.pads if (found := tokenizer.token_to_id(token)) is not None]
        if not pads:
            raise self._missing(self.facts.pads[0])
        self.pad_id = pads[0]

    @property
    def is_of_bytes(self) -> bool:
        """Whether its tokens are bytes, so that it has no file."""
        return self.kind == _BYTES

    @property
    def size(self) -> int:
        """The number of tokens of the vocabulary."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def last_id(self) -> int:
        """The largest token id; the encoder's table needs a row for it."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def id_of(self, token: str) -> int:
        """Return the id of a token of the vocabulary. Raises TokenizerMissing if it is missing."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise self._missing(token)
        return found

    def encode(self, text: str) -> Tokens:
        """Return the tokens of `text`, without special tokens, of any length.

        An unpaired surrogate, which has no UTF-8 encoding, is read as a question mark.
        Raises UnusableField for a text on which the tokenizer fails.
        """
        whole = text.encode("utf-8", "replace").decode("utf-8")

        def refused(problem: str) -> UnusableField:
            wanted = f"a text that the tokenizer of {self.facts.title} can read"
            return UnusableField(f"prompt: found {brief(whole)}, expected {wanted} ({self.source}: {problem})")

        with convert_errors(refused):
            found = self._tokenizer.encode(whole, add_special_tokens=False)
        ends = (
            start + len(whole[start:end].rstrip()) if whole[start:end].strip() else end for start, end in found.offsets
        )
        return Tokens(tuple(found.ids), tuple(ends))

    def as_json(self) -> str:
        """Return the content of tokenizer.json, as `tokenizers` writes it, including the special tokens of its kind."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        around = " ".join(token for token in (self.facts.begin, "$A", self.facts.end) if token)
        special = [(token, self.id_of(token)) for token in (*self.facts.begin.split(), *self.facts.end.split())]
        if special:
            copy.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
        return copy.to_str()

    @property
    def pad(self) -> str:
        """The padding token."""
        return str(self._tokenizer.id_to_token(self.pad_id))

    def _missing(self, token: str) -> TokenizerMissing:
        wanted = _PUBLISHED_WITH.get(token, f"the tokenizer of {self.facts.title}")
        return TokenizerMissing(f"{self.source}: the vocabulary lacks {token!r}, expected {wanted}")
