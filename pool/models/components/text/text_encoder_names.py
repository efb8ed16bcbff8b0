"""Convert the names of text encoder tensors in files to names of transformers' modules.

Converters for `pool.weights.keymaps.key_map.discover` rename, and drop tensors that are no weights of the text model
(position tables, training heads, vision towers, tokenizers). Reads no files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor

from modelpool.pool.models.components.common.open_clip_names import OPEN_CLIP_TEXT

T = TypeVar("T")

#: prefixes of the language part of a multimodal model, in files of different versions
_LANGUAGE_LEVELS = ("model.language_model.", "language_model.model.", "language_model.")
#: parts of CLIP's text model
_CLIP_PARTS = ("embeddings.", "encoder.", "final_layer_norm.")
_CLIP_LEVEL, _PROJECTION = "text_model.", "text_projection.weight"
_MODULE_LEVEL, _TURNED_PROJECTION = "transformer.", "text_projection"
#: parts of a language model
_DECODER_PARTS = ("embed_tokens.", "layers.", "norm.")
#: predicts tokens
_HEAD = "lm_head.weight"
#: tables that older files carry and modules compute
_TABLES = (".position_ids", ".rotary_emb.inv_freq", ".token_type_ids")
#: T5's token embedding, by both of its names; the first is the module's
_T5_TOKENS = ("shared.weight", "encoder.embed_tokens.weight")


def in_known_naming(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return `tensors` of a multimodal model, or of a model without a head as in folders, with the names of a language
    model with a head."""
    if "embed_tokens.weight" in tensors:
        return {"model." + key if key.startswith(_DECODER_PARTS) else key: value for key, value in tensors.items()}
    renamed = {}
    for key, value in tensors.items():
        level = next((level for level in _LANGUAGE_LEVELS if key.startswith(level)), None)
        renamed["model." + key.removeprefix(level) if level else key] = value
    return renamed


def convert_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert CLIP's text model in the naming of transformers, with or without its `text_model` level, or below the
    level under which ComfyUI stores it, where the projection is transposed."""
    bare = {key.removeprefix(_MODULE_LEVEL).removeprefix(_CLIP_LEVEL): value for key, value in tensors.items()}
    if _TURNED_PROJECTION in bare:
        bare[_PROJECTION] = bare.pop(_TURNED_PROJECTION).T
    return _with_projection({key: value for key, value in bare.items() if _is_part(key, _CLIP_PARTS)}, bare)


def convert_open_clip(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert CLIP's text model in the naming of open_clip."""
    bare = {key.removeprefix(_CLIP_LEVEL): value for key, value in OPEN_CLIP_TEXT.convert(tensors).items()}
    return _with_projection({key: value for key, value in bare.items() if key != _PROJECTION}, bare)


def convert_t5(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the encoder of T5 and UMT5; files have its token embedding under one of two names, or both."""
    table = next((key for key in _T5_TOKENS if key in tensors), None)
    parts = {key: x for key, x in tensors.items() if key.startswith("encoder.") and key not in _T5_TOKENS}
    return parts if table is None else {_T5_TOKENS[0]: tensors[table], **parts}


def convert_bert(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert BERT without its heads and its pooled state."""
    bare = {key.removeprefix("bert."): value for key, value in tensors.items()}
    return {key: value for key, value in bare.items() if _is_part(key, ("embeddings.", "encoder."))}


def convert_decoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a language model without its head and its vision part."""
    known = in_known_naming(tensors)
    bare = {key.removeprefix("model."): value for key, value in known.items() if key.startswith("model.")}
    return {key: value for key, value in bare.items() if _is_part(key, _DECODER_PARTS)}


def convert_writer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a language model with the head that predicts tokens of images, without its vision part."""
    return {**convert_decoder(tensors), **{key: value for key, value in tensors.items() if key == _HEAD}}


def convert_t5gemma(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the encoder of T5Gemma, also of a complete model."""
    bare = {key.removeprefix("model."): value for key, value in tensors.items()}
    return {key: value for key, value in bare.items() if _is_part(key, ("encoder.",))}


def convert_without_norm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert the first layers of a language model, without a norm for the last state."""
    return {key: value for key, value in convert_decoder(tensors).items() if not key.startswith("norm.")}


def convert_words(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a table of words, which is named by its prefix."""
    return {f"embed_tokens.{key}": value for key, value in tensors.items()}


#: by architecture and layout, as `pool.families.detection.text_encoders` names them
CONVERTERS: Mapping[tuple[str, str], Callable[[Mapping[str, Tensor]], dict[str, Tensor]]] = {
    ("clip", "transformers"): convert_clip,
    ("clip", "open_clip"): convert_open_clip,
    ("t5", "transformers"): convert_t5,
    ("umt5", "transformers"): convert_t5,
    ("bert", "transformers"): convert_bert,
    ("glm_image", "transformers"): convert_writer,
    ("words", "transformers"): convert_words,
    ("t5gemma", "transformers"): convert_t5gemma,
    **{
        (kind, "transformers"): convert_decoder
        for kind in ("llama", "mistral", "ministral3", "qwen2", "qwen3", "qwen3_vl", "glm", "gemma2", "gemma3")
    },
}  # fmt: skip


def _with_projection(text_model: dict[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the `text_model` level if there is a projection, as the module expects."""
    if _PROJECTION not in tensors:
        return text_model
    lower = {_CLIP_LEVEL + key: value for key, value in text_model.items()}
    return {**lower, _PROJECTION: tensors[_PROJECTION]}


def _is_part(key: str, parts: tuple[str, ...]) -> bool:
    return key.startswith(parts) and not key.endswith(_TABLES)
