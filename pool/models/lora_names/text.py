"""Names that LoRA files use for the weights of a model's text encoders. Torch-free at run time.

Text encoders have one key naming, transformers' own; a number selects one of several encoders, and depends on the
others: kohya counts the encoders that exist, diffusers counts the pipeline's slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from modelpool.pool.families.definitions import defined_families
from modelpool.pool.families.parts.lora_naming import Ranges
from modelpool.pool.files.formats.safetensors_file import Shape

if TYPE_CHECKING:
    from modelpool.pool.weights.keymaps.key_map import KeyMap

#: separates the name of an encoder from its module's weight names in the keys of a set of text encoders
MODULE = ".transformer."
CLIP_L, CLIP_G, CLIP_H, BERT, MT5 = "clip_l", "clip_g", "clip_h", "hydit_clip", "mt5xl"
T5, UMT5 = ("t5xxl", "t5xl", "t5base", "umt5xxl"), "umt5xxl"
#: pieces of transformers' names of a T5, and of the names in Wan's own code
_WAN_PIECES = (
    ("encoder.block.", "blocks."),
    (".layer.0.SelfAttention.relative_attention_bias", ".pos_embedding.embedding"),
    (".layer.0.SelfAttention.", ".attn."),
    (".layer.0.layer_norm", ".norm1"),
    (".layer.1.layer_norm", ".norm2"),
    (".layer.1.DenseReluDense.wi_0", ".ffn.gate.0"),
    (".layer.1.DenseReluDense.wi_1", ".ffn.fc1"),
    (".layer.1.DenseReluDense.wo", ".ffn.fc2"),
    ("encoder.final_layer_norm", "norm"),
    ("shared", "token_embedding"),
)
_PROJECTION, _LEVEL = "text_projection", "text_model."
#: the conventions' names of text encoders in families for which they have a name of their own
_OF_FAMILIES = {family.name: family.text.lora_names for family in defined_families() if family.text.lora_names}


def text_encoder_names(shapes: Mapping[str, Shape]) -> dict[str, Ranges]:
    """Return every base name that a LoRA may use for a weight of a set of text encoders, and the rows that it means.

    Keys of `shapes` are an encoder's name ("clip_l", "clip_g", "clip_h", "t5xxl", "hydit_clip", ...), ".transformer."
    and transformers' name of the tensor ("text_model.encoder.layers.0.mlp.fc1.weight"); others are ignored.
    """
    from modelpool.pool.weights.keymaps.key_map import key_map_of  # importing torch is slow

    key_map = key_map_of(shapes, {})
    encoders: dict[str, dict[str, Ranges]] = {}
    for key in shapes:
        encoder, found, name = key.partition(MODULE)
        if found and name.endswith(".weight"):
            encoders.setdefault(encoder, {})[name.removesuffix(".weight")] = key_map.full_source(key)
    return names_of_encoders(encoders)


def lora_encoder(encoder: str, family: str) -> str:
    """Return the conventions' name of the text encoder `encoder` (a name of the detection) of a model of `family`."""
    own = _OF_FAMILIES.get(family, {})
    if encoder in own:
        return own[encoder]
    return {"hydit_bert": BERT, "t5_base": "t5base", "t5xxl_old": "t5xxl", "umt5_xxl": UMT5}.get(encoder, encoder)


def names_of_module(encoder: str, key_map: KeyMap, siblings: Iterable[str] = ()) -> dict[str, Ranges]:
    """Return the names for the weights of a built text module; `siblings` are the text encoders of its model."""
    # a CLIP module may lack the text_model level; the conventions are older and have it
    level = _LEVEL if encoder in (CLIP_L, CLIP_G, CLIP_H) else ""
    weights = {
        key if key.startswith((_PROJECTION, _LEVEL)) else level + key: (key_map.parameter_range(key),)
        for key in key_map.origins
        if key.endswith(".weight")
    }
    named = {key.removesuffix(".weight"): ranges for key, ranges in weights.items()}
    return names_of_encoders({encoder: named}, siblings)


def names_of_encoders(encoders: Mapping[str, Mapping[str, Ranges]], siblings: Iterable[str] = ()) -> dict[str, Ranges]:
    """Return the names for the weights of `encoders`: encoder -> base name of a weight -> its rows. `siblings` are
    other text encoders of the model, which change the numbers."""
    names: dict[str, Ranges] = {}
    together = frozenset((*encoders, *siblings))
    for encoder, weights in encoders.items():
        for base, ranges in weights.items():
            for name in _names(encoder, base, together):
                names.setdefault(name, ranges)
    return names


def _names(encoder: str, base: str, siblings: Iterable[str]) -> Iterator[str]:
    yield from _usual_names(encoder, base, siblings)
    if encoder == UMT5:
        wan = base
        for piece, other in _WAN_PIECES:
            wan = wan.replace(piece, other)
        yield from _usual_names(encoder, wan, siblings)


def _usual_names(encoder: str, base: str, siblings: Iterable[str]) -> Iterator[str]:
    yield f"text_encoders.{encoder}{MODULE}{base}"
    yield f"{encoder}{MODULE}{base}"
    yield f"{encoder}.{base}"
    prefixes, dotted = _prefixes(encoder, frozenset(siblings))
    if base == _PROJECTION:
        yield from (f"{prefix}{_PROJECTION}" for prefix in _projection_prefixes(encoder))
        yield from (f"{prefix}{_PROJECTION}" for prefix in dotted if prefix)
        return
    bare = base.removeprefix("bert.")
    yield from (prefix + bare.replace(".", "_") for prefix in prefixes)
    # the same numbers with dots: te1.text_model.encoder...
    yield from (f"{prefix.removeprefix('lora_').rstrip('_')}.{bare}" for prefix in prefixes if prefix[5:7] == "te")
    for prefix in dotted:
        yield prefix + bare
        if bare.startswith("text_model.") and prefix.startswith("text_encoder"):
            yield prefix + bare.removeprefix("text_model.")


def _prefixes(encoder: str, siblings: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the prefixes of the names of an encoder's weights next to `siblings`: with underscores, and with dots."""
    has_l, has_g = CLIP_L in siblings, CLIP_G in siblings
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
        # trainers of Flux disagree whether T5 is the second encoder or keeps its number of SD3
        numbers = (number, 3) if has_l and not has_g else (number,)
        joined = tuple(f"lora_te{n}_" for n in numbers)
        return (*joined, *(("lora_te_",) if number == 1 else ())), (
            f"text_encoder_{number}." if number > 1 else "text_encoder.",
        )
    return (), ()


def _projection_prefixes(encoder: str) -> tuple[str, ...]:
    """Return the prefixes of the projection's names, which do not depend on the other encoders."""
    return {CLIP_L: ("lora_te1_",), CLIP_G: ("lora_te2_", "lora_prior_te_")}.get(encoder, ())
