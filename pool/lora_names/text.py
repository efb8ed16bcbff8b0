"""The names that LoRA files use for the weights of a model's text encoders. Torch-free at run time.

Text encoders have one spelling, that of transformers; which one of several a name means is told by a number, and the
numbers depend on the company: kohya counts the encoders that there are, diffusers counts the pipeline's slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.lora_names.naming import Ranges

if TYPE_CHECKING:
    from modelpool.pool.keymaps.key_map import KeyMap

#: between the name of an encoder and the names of its module's weights, in the keys of a set of text encoders
MODULE = ".transformer."
CLIP_L, CLIP_G, CLIP_H, BERT, MT5 = "clip_l", "clip_g", "clip_h", "hydit_clip", "mt5xl"
T5 = ("t5xxl", "t5xl", "t5base")
_PROJECTION, _LEVEL = "text_projection", "text_model."


def text_encoder_names(shapes: Mapping[str, Shape]) -> dict[str, Ranges]:
    """Every base name that a LoRA may use for a weight of a set of text encoders, and the rows that it means.

    Keys of `shapes` are an encoder's name ("clip_l", "clip_g", "clip_h", "t5xxl", "hydit_clip", ...), ".transformer."
    and transformers' name of the tensor ("text_model.encoder.layers.0.mlp.fc1.weight"); others are passed over.
    """
    from modelpool.pool.keymaps.key_map import key_map_of  # torch takes its time

    key_map = key_map_of(shapes, {})
    encoders: dict[str, dict[str, Ranges]] = {}
    for key in shapes:
        encoder, found, name = key.partition(MODULE)
        if found and name.endswith(".weight"):
            encoders.setdefault(encoder, {})[name.removesuffix(".weight")] = key_map.whole_source(key)
    return names_of_encoders(encoders)


def lora_encoder(encoder: str, family: str) -> str:
    """What the conventions call the text encoder `encoder` (a name of recognition) of a model of `family`."""
    if encoder == "t5xl" and family.startswith("hunyuan_dit"):
        return MT5
    return {"hydit_bert": BERT, "t5_base": "t5base", "t5xxl_old": "t5xxl"}.get(encoder, encoder)


def names_of_module(encoder: str, key_map: KeyMap, company: Iterable[str] = ()) -> dict[str, Ranges]:
    """The names for the weights of a built text module; `company` are the text encoders of its model."""
    # a module of CLIP may have no text_model level, the conventions are older and have it
    level = _LEVEL if encoder in (CLIP_L, CLIP_G, CLIP_H) else ""
    weights = {
        key if key.startswith((_PROJECTION, _LEVEL)) else level + key: (key_map.parameter_range(key),)
        for key in key_map.origins
        if key.endswith(".weight")
    }
    named = {key.removesuffix(".weight"): ranges for key, ranges in weights.items()}
    return names_of_encoders({encoder: named}, company)


def names_of_encoders(encoders: Mapping[str, Mapping[str, Ranges]], company: Iterable[str] = ()) -> dict[str, Ranges]:
    """The names for the weights of `encoders`: for each encoder its weights' base names and the rows that they are.
    `company` are other text encoders of the model, which change the numbers."""
    names: dict[str, Ranges] = {}
    together = frozenset((*encoders, *company))
    for encoder, weights in encoders.items():
        for base, ranges in weights.items():
            for name in _names(encoder, base, together):
                names.setdefault(name, ranges)
    return names


def _names(encoder: str, base: str, company: Iterable[str]) -> Iterator[str]:
    yield f"text_encoders.{encoder}{MODULE}{base}"
    beginnings, dotted = _beginnings(encoder, frozenset(company))
    if base == _PROJECTION:
        yield from (f"{beginning}{_PROJECTION}" for beginning in _projection_beginnings(encoder))
        yield from (f"{beginning}{_PROJECTION}" for beginning in dotted if beginning)
        return
    bare = base.removeprefix("bert.")
    yield from (beginning + bare.replace(".", "_") for beginning in beginnings)
    for beginning in dotted:
        yield beginning + bare
        if bare.startswith("text_model.") and beginning.startswith("text_encoder"):
            yield beginning + bare.removeprefix("text_model.")


def _beginnings(encoder: str, company: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What begins the names of an encoder's weights in `company`: with underscores, and with dots."""
    has_l, has_g = CLIP_L in company, CLIP_G in company
    if encoder in (CLIP_L, CLIP_H):
        return ("lora_te_", "lora_te1_"), ("text_encoder.", "base_model.model.", "")
    if encoder == CLIP_G and has_l:
        return ("lora_te2_",), ("text_encoder_2.",)
    if encoder == CLIP_G:
        return ("lora_te_", "lora_te2_", "lora_prior_te_"), ("text_encoder.", "base_model.model.", "")
    if encoder == BERT:
        return ("lora_te1_",), ("text_encoder.",)
    if encoder == MT5:
        return ("lora_te2_",), ("text_encoder_2.",)
    if encoder in T5:
        number = 1 + has_g + has_l
        # trainers of Flux do not agree whether T5 is the second encoder or keeps the number that it has in SD3
        numbers = (number, 3) if has_l and not has_g else (number,)
        return tuple(f"lora_te{n}_" for n in numbers), (f"text_encoder_{number}." if number > 1 else "text_encoder.",)
    return (), ()


def _projection_beginnings(encoder: str) -> tuple[str, ...]:
    """The projection's names do not depend on the company."""
    return {CLIP_L: ("lora_te1_",), CLIP_G: ("lora_te2_", "lora_prior_te_")}.get(encoder, ())
