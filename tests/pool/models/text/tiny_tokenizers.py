"""Tokenizers of every kind with a few hundred tokens, trained on a few sentences, as `tokenizers` has them."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from modelpool.pool.families.parts.text_reading import IMAGE_TOKEN
from modelpool.pool.families.text_readings import READINGS

SENTENCES = (
    "a small red cat sits beside a large blue dog on the table",
    "an astronaut rides a horse over the moon, painted in oil colours",
    "the quick brown fox jumps over 12 lazy dogs; it isn't tired!",
    "You are an assistant designed to generate superior images based on textual prompts or user prompts.",
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships.",
    "ein Haus am See, une maison au bord du lac, \u4e00\u53ea\u732b",
)
#: so that templates are about as many tokens as in the published vocabularies
TRAINING = (*SENTENCES, *(reading.template for row in READINGS.values() for reading in row))
#: without the sign that CLIP-G's tokenizer in transformers fills up with, and so takes for no text; open_clip, which
#: CLIP-G was trained with, and this project take it for text
PROMPTS = ("a red cat on the moon", "", "The Quick brown fox, 12 dogs & a horse?")

_CHATS = {
    "llama3": (
        *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<image>",
    ),
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", IMAGE_TOKEN),
    "qwen_embedding": ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "glm": ("<|endoftext|>", "[gMASK]", "<sop>"),
    # tokens of images have the lowest ids
    "glm_image": (
        *(f"<|dit_token_{number}|>" for number in range(32)),
        *("<|dit_token_16384|>", "<|dit_token_16385|>", "<|image|>", "<sop>", "<eop>"),
    ),
    "phi3": (
        *("<unk>", "<s>", "</s>", "<|endoftext|>", "<|user|>", "<|end|>", "<|assistant|>", "<|diffusion|>"),
        *("<img>", "</img>"),
    ),
    "mistral": ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
}


@cache
def tiny(kind: str) -> Tokenizer:
    """The tokenizer of a kind of `pool.models.text.text_tokenizer.TOKENIZER_FACTS`."""
    match kind:
        case "t5" | "umt5" | "mt5":
            return _t5()
        case "bert":
            return _bert()
        case "gemma":
            return _gemma()
        case "t5gemma":
            tokenizer = Tokenizer.from_str(_gemma().to_str())
            tokenizer.post_processor = processors.TemplateProcessing(single="$A")
            return tokenizer
        case _:
            return _byte_level(kind)


def _t5() -> Tokenizer:
    """Unigram, spaces as a sign, no normalization but that."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TRAINING, trainer)
    end = tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    return tokenizer


def _bert() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    )
    around = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    return tokenizer


def _gemma() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    # for the training alone: no token has words of two
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=900, special_tokens=special[:4], show_progress=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")  # as Gemma's, where no space is left
    begin = tokenizer.token_to_id("<bos>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", begin)])
    return tokenizer


def _byte_level(kind: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=list(_CHATS[kind]), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TRAINING, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _CHATS[kind]])
    begin = {"llama3": "<|begin_of_text|>", "mistral": "<s>", "phi3": "<s>"}.get(kind)
    if kind == "glm":
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[gMASK] <sop> $A",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in _CHATS[kind][1:]],
        )
    if kind == "qwen_embedding":
        end = "<|endoftext|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, tokenizer.token_to_id(end))]
        )
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    return tokenizer


def for_transformers(kind: str, **more: object) -> PreTrainedTokenizerFast:
    """The same tokenizer as pipelines of diffusers take it."""
    ends = dict.fromkeys(("qwen", "qwen_embedding", "glm", "phi3"), "<|endoftext|>")
    pads = {"bert": "[PAD]", "llama3": "<|end_of_text|>", **ends}
    own = Tokenizer.from_str(tiny(kind).to_str())  # pipelines set lengths and sides on theirs
    return PreTrainedTokenizerFast(tokenizer_object=own, **{"pad_token": pads.get(kind, "<pad>"), **more})
