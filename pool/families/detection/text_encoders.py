"""Recognise text encoders in files, and the set of them that a family of models reads. Torch-free.

`recognise_text_encoder` uses a table of signatures; `route` a table of the sets that each kind of model reads. Keys
have no component prefix. Builds nothing and knows no tokenizer's vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from modelpool.pool.families.definitions import all_definitions
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.values.core.errors import UnknownArchitecture, counted

Shapes = Mapping[str, Shape]
#: a required size: tensor, dimension, value
Size = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class TextEncoderFacts:
    """One text encoder in a file.

    name          short and stable, "clip_l"
    title         for human readers
    architecture  kind of network: "clip", "t5", "umt5", "bert", "llama", "mistral", "ministral3", "gemma2", "gemma3",
                  "qwen2", "qwen3", "qwen3_vl", "glm", "glm_image"; "words" for a table of words alone
    layout        "transformers", or "open_clip" for CLIP in the naming of its training code
    width         width of each token's state; 0 if the file does not tell
    layers        number of layers in the file
    vocabulary    number of tokens; 0 if the file has no token embedding
    """

    name: str
    title: str
    architecture: str
    layout: str = "transformers"
    width: int = 0
    layers: int = 0
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class TextEncoderSignature:
    """A text encoder, identified by all of `keys`, none of `without`, and `sizes`."""

    facts: TextEncoderFacts
    keys: tuple[str, ...]
    without: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = ()


_NOT_CLIP = ("head.weight", "embeddings.patch_embedding.weight")


def _clip(name: str, title: str, deepest: int, **more: str) -> tuple[TextEncoderSignature, ...]:
    """Return the signatures of a CLIP text model with a layer `deepest`, in either naming."""
    facts = TextEncoderFacts(name, title, "clip")
    open_clip = f"transformer.resblocks.{deepest}.mlp.c_fc.weight"
    return (
        TextEncoderSignature(
            facts, (f"text_model.encoder.layers.{deepest}.mlp.fc1.weight",), ("text_model.head.weight",)
        ),
        TextEncoderSignature(facts, (f"encoder.layers.{deepest}.mlp.fc1.weight",), _NOT_CLIP),
        TextEncoderSignature(replace(facts, layout="open_clip"), (open_clip,)),
    )


_T5_GATE = "encoder.block.23.layer.1.DenseReluDense.wi_1.weight"
_T5_PLAIN = "encoder.block.23.layer.1.DenseReluDense.wi.weight"
_T5_KEYS = "encoder.block.0.layer.0.SelfAttention.k.weight"
#: UMT5 has positions in every layer, T5 in the first
_UMT5_POSITIONS = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
#: of T5Gemma's encoder
_NORM_BEFORE_ATTENTION = "encoder.layers.0.pre_self_attn_layernorm.weight"
_NORM_AFTER_FEED = "model.layers.0.post_feedforward_layernorm.weight"
_NORM_AFTER_ATTENTION = "model.layers.0.post_attention_layernorm.weight"
_QUERY_NORM = "model.layers.0.self_attn.q_norm.weight"
_KEY_BIAS = "model.layers.0.self_attn.k_proj.bias"
_KEY_WEIGHT = "model.layers.0.self_attn.k_proj.weight"
_GLM_NORM = "post_self_attn_layernorm.weight"
_QUERY_WEIGHT = "model.layers.0.self_attn.q_proj.weight"
_LAYER_39 = "model.layers.39.post_attention_layernorm.weight"


def _facts(name: str, title: str, architecture: str) -> TextEncoderFacts:
    return TextEncoderFacts(name, title, architecture)


#: the first match wins
SIGNATURES: tuple[TextEncoderSignature, ...] = (
    *_clip("clip_g", "CLIP-G", 30),
    *_clip("clip_h", "CLIP-H", 22),
    *_clip("clip_l", "CLIP-L", 0),
    TextEncoderSignature(
        _facts("umt5_xxl", "UMT5-XXL", "umt5"), (_T5_GATE, _UMT5_POSITIONS), sizes=((_T5_GATE, 1, 4096),)
    ),
    TextEncoderSignature(_facts("t5xxl", "T5-XXL", "t5"), (_T5_GATE,), sizes=((_T5_GATE, 1, 4096),)),
    TextEncoderSignature(_facts("t5xl", "T5-XL", "t5"), (_T5_GATE,), sizes=((_T5_GATE, 1, 2048),)),
    TextEncoderSignature(_facts("t5xxl_old", "T5-11B of the first version", "t5"), (_T5_PLAIN,)),
    TextEncoderSignature(
        _facts("byt5_small_glyph", "ByT5-small for glyphs", "t5"), (_T5_KEYS,), sizes=((_T5_KEYS, 0, 384),)
    ),
    TextEncoderSignature(_facts("t5_base", "T5-base", "t5"), (_T5_KEYS,), without=(_T5_GATE, _T5_PLAIN)),
    TextEncoderSignature(
        _facts("gemma3_12b", "Gemma 3 12B", "gemma3"), (_NORM_AFTER_FEED, _QUERY_NORM),
        sizes=((_NORM_AFTER_ATTENTION, 0, 3840),),
    ),
    *(
        TextEncoderSignature(_facts("t5gemma_b", "T5Gemma B", "t5gemma"), (f"{level}{_NORM_BEFORE_ATTENTION}",))
        for level in ("model.", "")
    ),
    TextEncoderSignature(_facts("gemma3_4b", "Gemma 3 4B", "gemma3"), (_NORM_AFTER_FEED, _QUERY_NORM)),
    TextEncoderSignature(_facts("gemma2_2b", "Gemma 2 2B", "gemma2"), (_NORM_AFTER_FEED,)),
    *(
        TextEncoderSignature(_facts("glm_image_9b", "GLM-Image 9B", "glm_image"), (layers + _GLM_NORM, codes))
        for layers in ("model.layers.0.", "model.language_model.layers.0.", "language_model.layers.0.")
        for codes in ("model.vqmodel.quantize.embedding.weight", "vqmodel.quantize.embedding.weight")
    ),
    TextEncoderSignature(_facts("glm4_9b", "GLM 4 9B", "glm"), (_KEY_BIAS, "model.layers.0.mlp.gate_up_proj.weight")),
    TextEncoderSignature(
        _facts("qwen25_3b", "Qwen 2.5 3B", "qwen2"), (_KEY_BIAS, _KEY_WEIGHT), sizes=((_KEY_WEIGHT, 0, 256),)
    ),
    TextEncoderSignature(
        _facts("qwen25_7b", "Qwen 2.5 7B", "qwen2"), (_KEY_BIAS, _KEY_WEIGHT), sizes=((_KEY_WEIGHT, 0, 512),)
    ),
    *(
        TextEncoderSignature(
            _facts(name, title, "qwen3_vl"), (_QUERY_NORM, tower), sizes=((_NORM_AFTER_ATTENTION, 0, width),)
        )
        for name, title, width in (("qwen3vl_4b", "Qwen 3 VL 4B", 2560), ("qwen3vl_8b", "Qwen 3 VL 8B", 4096))
        for tower in ("visual.patch_embed.proj.weight", "model.visual.patch_embed.proj.weight")
    ),
    TextEncoderSignature(
        _facts("qwen3_4b", "Qwen 3 4B", "qwen3"), (_QUERY_NORM,), sizes=((_NORM_AFTER_ATTENTION, 0, 2560),)
    ),
    TextEncoderSignature(
        _facts("qwen3_2b", "Qwen 3 2B", "qwen3"), (_QUERY_NORM,), sizes=((_NORM_AFTER_ATTENTION, 0, 2048),)
    ),
    TextEncoderSignature(
        _facts("qwen3_06b", "Qwen 3 0.6B", "qwen3"), (_QUERY_NORM,), sizes=((_NORM_AFTER_ATTENTION, 0, 1024),)
    ),
    TextEncoderSignature(
        _facts("qwen3_8b", "Qwen 3 8B", "qwen3"), (_QUERY_NORM,), sizes=((_NORM_AFTER_ATTENTION, 0, 4096),)
    ),
    TextEncoderSignature(
        _facts("mistral3_24b", "Mistral 3 24B", "mistral"), (_LAYER_39,), sizes=((_NORM_AFTER_ATTENTION, 0, 5120),)
    ),
    TextEncoderSignature(
        _facts("mistral3_24b_pruned", "Mistral 3 24B, its first layers as Flux 2 uses them", "mistral"),
        (_NORM_AFTER_ATTENTION,), sizes=((_NORM_AFTER_ATTENTION, 0, 5120),),
    ),
    TextEncoderSignature(
        _facts("ministral3_3b", "Ministral 3 3B", "ministral3"),
        (_KEY_WEIGHT,), without=(_KEY_BIAS, _QUERY_NORM),
        # Llama 3.2 3B has the same width and keys, and 24 heads instead of 32
        sizes=((_NORM_AFTER_ATTENTION, 0, 3072), (_KEY_WEIGHT, 0, 1024), (_QUERY_WEIGHT, 0, 4096)),
    ),
    TextEncoderSignature(
        _facts("llama3_8b", "Llama 3 8B", "llama"),
        (_KEY_WEIGHT,), without=(_KEY_BIAS,), sizes=((_NORM_AFTER_ATTENTION, 0, 4096), (_KEY_WEIGHT, 0, 1024)),
    ),
    TextEncoderSignature(
        _facts("hydit_bert", "BERT of HunyuanDiT", "bert"), ("bert.encoder.layer.0.attention.self.query.weight",)
    ),
)  # fmt: skip

#: text encoders that are parts of a diffusion model: no file has one alone
INSIDE: tuple[TextEncoderFacts, ...] = (_facts("omnigen_words", "the words of OmniGen", "words"),)

_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers?|resblocks|block)\.(\d+)\.")
_TOKEN_TABLES = (
    "text_model.embeddings.token_embedding.weight", "embeddings.token_embedding.weight", "token_embedding.weight",
    "shared.weight", "encoder.embed_tokens.weight", "model.embed_tokens.weight",
    "bert.embeddings.word_embeddings.weight",
)  # fmt: skip
#: tensors, and the dimension with the encoder's width
_WIDTHS = (
    (_T5_GATE, 1), (_T5_KEYS, 1), (_NORM_AFTER_ATTENTION, 0),
    ("text_model.encoder.layers.0.mlp.fc1.weight", 1), ("encoder.layers.0.mlp.fc1.weight", 1),
    ("transformer.resblocks.0.mlp.c_fc.weight", 1),
)  # fmt: skip

#: prefix of a CLIP in the naming of transformers in files of text encoder sets, next to its projection
_LEVEL = "transformer."
#: parts of a language model that is published without its head, as embedding models are, and so without this level
_HEADLESS, _HEADLESS_LEVEL = ("embed_tokens.", "layers.", "norm."), "model."


def recognise_text_encoder(shapes: Shapes) -> TextEncoderFacts | None:
    """Return the text encoder with tensors of `shapes` (keys without prefix), or None."""
    if any(key.startswith(_LEVEL + "text_model.") for key in shapes):
        shapes = {key.removeprefix(_LEVEL): shape for key, shape in shapes.items()}
    if "embed_tokens.weight" in shapes:
        shapes = {_HEADLESS_LEVEL * key.startswith(_HEADLESS) + key: shape for key, shape in shapes.items()}
    for signature in SIGNATURES:
        if _fits(signature, shapes):
            tables = [shapes[key] for key in _TOKEN_TABLES if len(shapes.get(key, ())) == 2]
            widths = [shapes[key][i] for key, i in _WIDTHS if len(shapes.get(key, ())) > i]
            vocabulary, width = tables[0] if tables else (0, next(iter(widths), 0))
            return replace(signature.facts, width=width, layers=_layers(shapes), vocabulary=vocabulary)
    return None


def _fits(signature: TextEncoderSignature, shapes: Shapes) -> bool:
    return (
        all(key in shapes for key in signature.keys)
        and not any(key in shapes for key in signature.without)
        and all(len(shapes.get(key, ())) > i and shapes[key][i] == size for key, i, size in signature.sizes)
    )


def _layers(shapes: Shapes) -> int:
    """Return the layers of the text model; vision towers are ignored."""
    numbers = {
        int(match[1])
        for key in shapes
        if not key.startswith(("visual.", "vision_", "model.visual.")) and (match := _LAYER_NUMBER.search(key))
    }
    return max(numbers, default=-1) + 1


class ClipType(StrEnum):
    """Kind of model that text encoders are loaded for, if the user specifies it."""

    STABLE_DIFFUSION = "stable_diffusion"
    STABLE_CASCADE = "stable_cascade"
    SD3 = "sd3"
    STABLE_AUDIO = "stable_audio"
    HUNYUAN_DIT = "hunyuan_dit"
    FLUX = "flux"
    MOCHI = "mochi"
    LTXV = "ltxv"
    HUNYUAN_VIDEO = "hunyuan_video"
    PIXART = "pixart"
    COSMOS = "cosmos"
    LUMINA2 = "lumina2"
    WAN = "wan"
    HIDREAM = "hidream"
    CHROMA = "chroma"
    ACE = "ace"
    OMNIGEN2 = "omnigen2"
    QWEN_IMAGE = "qwen_image"
    HUNYUAN_IMAGE = "hunyuan_image"
    HUNYUAN_VIDEO_15 = "hunyuan_video_15"
    OVIS = "ovis"
    KANDINSKY5 = "kandinsky5"
    KANDINSKY5_IMAGE = "kandinsky5_image"


@dataclass(frozen=True, slots=True)
class TextEncoderSet:
    """The text encoders that one kind of model reads.

    name      short and stable, "sdxl"; sets that differ in their prompt templates have different names
    members   the names of its encoders
    missing   members that were not among the files
    unplaced  files, by position, that are no member
    guessed   whether no rule covers these files, so that the default set was chosen
    """

    name: str
    members: tuple[str, ...]
    missing: tuple[str, ...] = field(default=())
    unplaced: tuple[int, ...] = field(default=())
    guessed: bool = False


#: the members of each set
MEMBERS: Mapping[str, tuple[str, ...]] = {
    **{
        family.readings_name: tuple(text.encoder for text in family.text.readings)
        for family in all_definitions()
        if family.text.readings
    },
    "newbie": ("gemma3_4b",),
    "ace_step": ("t5_base",),
    "kandinsky5": ("clip_l", "qwen25_7b"),
    "kandinsky5_image": ("clip_l", "qwen25_7b"),
}
#: encoders that can replace a member of another name
_STANDS_FOR: Mapping[str, tuple[str, ...]] = {
    # UMT5 has T5's layout; a partial key list may not distinguish them
    "t5xxl": ("umt5_xxl",),
    "umt5_xxl": ("t5xxl",),
    "mistral3_24b_pruned": ("mistral3_24b",),
}

_ANY_OF_SD3 = {ClipType.SD3: "sd3", ClipType.HIDREAM: "hidream"}
#: one file: by its encoder, the default set, and the sets for some kinds of model
ONE_FILE: Mapping[str, tuple[str, Mapping[ClipType, str]]] = {
    "clip_l": ("sd1", _ANY_OF_SD3),
    "clip_h": ("sd2", {}),
    "clip_g": ("sdxl_refiner", {ClipType.STABLE_CASCADE: "stable_cascade", **_ANY_OF_SD3}),
    "t5xxl": (
        "mochi",
        {
            ClipType.LTXV: "ltxv", ClipType.PIXART: "pixart", ClipType.CHROMA: "pixart", ClipType.WAN: "wan",
            **_ANY_OF_SD3,
        },
    ),
    "umt5_xxl": ("wan", {}),
    "t5xl": ("aura_flow", {}),
    "t5xxl_old": ("cosmos", {}),
    "t5_base": ("stable_audio", {ClipType.ACE: "ace_step"}),
    "gemma2_2b": ("lumina2", {}),
    "t5gemma_b": ("stable_audio_3", {}),
    "gemma3_4b": ("newbie", {}),
    "gemma3_12b": ("ltx2", {}),
    "qwen25_3b": ("omnigen2", {}),
    "qwen25_7b": ("qwen_image", {ClipType.HUNYUAN_IMAGE: "hunyuan_image"}),
    "qwen3_4b": ("z_image", {}),
    "qwen3vl_4b": ("krea2", {}),
    "qwen3vl_8b": ("qwen_image_21", {}),
    "glm4_9b": ("cogview4", {}),
    "glm_image_9b": ("glm_image", {}),
    "qwen3_2b": ("ovis", {}),
    "qwen3_06b": ("ace_step_15", {}),
    "mistral3_24b": ("flux2", {}),
    "mistral3_24b_pruned": ("flux2", {}),
    "ministral3_3b": ("ernie_image", {}),
    "llama3_8b": ("hidream", {}),
}  # fmt: skip
#: any other single file
_ONE_OTHER_FILE: tuple[str, Mapping[ClipType, str]] = ("sd1", _ANY_OF_SD3)
#: two files: by the kind of model alone
TWO_FILES: Mapping[ClipType, str] = {
    ClipType.STABLE_DIFFUSION: "sdxl",
    ClipType.SD3: "sd3",
    ClipType.HUNYUAN_DIT: "hunyuan_dit",
    ClipType.FLUX: "flux",
    ClipType.HUNYUAN_VIDEO: "hunyuan_video",
    ClipType.HIDREAM: "hidream",
    ClipType.HUNYUAN_IMAGE: "hunyuan_image",
    ClipType.HUNYUAN_VIDEO_15: "hunyuan_video_15",
    ClipType.KANDINSKY5: "kandinsky5",
    ClipType.KANDINSKY5_IMAGE: "kandinsky5_image",
}
#: sets that run with any of their members
_ANY_MEMBER = frozenset({"sd3", "hidream"})


def route(clip_type: ClipType | str, encoders: Sequence[TextEncoderFacts | None]) -> TextEncoderSet:
    """Return the set that `encoders`, one per file (None: not recognised), form for a model of `clip_type`.

    Missing members and unused files are reported, not rejected: the caller decides.

    Raises UnknownArchitecture for no file, for more than four, and for an encoder outside of all sets.
    """
    kind = ClipType(clip_type)
    names = [encoder.name if encoder else "" for encoder in encoders]
    match len(names):
        case 1:
            if encoders[0] is not None and names[0] not in ONE_FILE and names[0] not in _in_sets():
                raise UnknownArchitecture(
                    f"text encoder {encoders[0].title}: no model reads it, expected one of {_readable()}"
                )
            usual, otherwise = ONE_FILE.get(names[0], _ONE_OTHER_FILE)
            return _set_of(otherwise.get(kind, usual), names)
        case 2:
            return _set_of(TWO_FILES.get(kind, "sdxl"), names)
        case 3:
            return _set_of("sd3", names)
        case 4:
            return _set_of("hidream", names)
        case count:
            raise UnknownArchitecture(f"text encoders: found {counted(count, 'file')}, expected one to four")


def _set_of(name: str, encoders: Sequence[str]) -> TextEncoderSet:
    members = MEMBERS[name]
    placed: dict[str, int] = {}
    for position, encoder in enumerate(encoders):
        for member in (encoder, *_STANDS_FOR.get(encoder, ())):
            if member in members and member not in placed:
                placed[member] = position
                break
    unplaced = tuple(i for i in range(len(encoders)) if i not in placed.values())
    missing = () if name in _ANY_MEMBER and placed else tuple(m for m in members if m not in placed)
    return TextEncoderSet(name, members, missing, unplaced, guessed=bool(unplaced))


def stands_for(encoder: str) -> tuple[str, ...]:
    """Return the members of sets that the text encoder `encoder` can replace, except the one of its name."""
    return _STANDS_FOR.get(encoder, ())


def _in_sets() -> frozenset[str]:
    return frozenset(member for members in MEMBERS.values() for member in members)


def _readable() -> str:
    return ", ".join(sorted(ONE_FILE))
