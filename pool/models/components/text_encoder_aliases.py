"""Detect text encoders that use another naming than the family's own files, or lack unused parts. Torch-free.

Complete checkpoints store CLIP-G and CLIP-H in open_clip's naming; separate files of the same weights mostly use
transformers' naming. Files converted from diffusers folders lack the last layer of CLIP-H and its projection, as those
folders do. Does not know where the tensors come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.infer_config import clip_text_config
from modelpool.pool.values.core.family_facts import TextFacts

_OPEN_CLIP_KEY, _TRANSFORMERS_KEY = "ln_final.weight", "final_layer_norm.weight"
_OPEN_CLIP_LAYERS = "transformer.resblocks."
_LEVEL, _PROJECTION, _OPEN_CLIP_PROJECTION = "text_model.", "text_projection.weight", "text_projection"
#: layers of CLIP-H in diffusers folders: without the last, which SD2 does not read
_SHORT_CLIP_H = 23


def with_detected_text_encoders(family: LocatedFamily, shapes: Mapping[str, Shape]) -> LocatedFamily:
    """Return `family` with the architectures of its text encoders among tensors of `shapes` (keys with prefixes);
    `family` itself if all use the naming of its own files.

    Raises UnknownArchitecture for a text encoder with impossible shapes.
    """
    architectures = dict(family.architectures)
    texts, configs = dict(family.texts), dict(family.configs)
    for role in family.text_encoders:
        prefix = family.prefixes[role]
        if family.architectures[role] is not Architecture.OPEN_CLIP_TEXT:
            continue
        own = {key.removeprefix(prefix).removeprefix(_LEVEL): s for key, s in shapes.items() if key.startswith(prefix)}
        if _OPEN_CLIP_KEY in own:
            if _OPEN_CLIP_PROJECTION not in own and not texts[role].gives_pooled:
                architectures[role] = Architecture.OPEN_CLIP_TEXT_ALONE
            layers = {key.split(".")[2] for key in own if key.startswith(_OPEN_CLIP_LAYERS)}
            texts[role] = _text_facts(texts[role], len(layers))
            continue
        if _TRANSFORMERS_KEY not in own:
            continue
        if _PROJECTION in own or _OPEN_CLIP_PROJECTION in own:
            architectures[role] = Architecture.CLIP_TEXT_PROJECTED
        else:
            architectures[role] = Architecture.CLIP_TEXT
            configs[role] = {**clip_text_config(own), "hidden_act": "gelu"}
        texts[role] = _text_facts(texts[role], clip_text_config(own)["num_hidden_layers"])
    if (architectures, texts) == (family.architectures, family.texts):
        return family
    return replace(family, architectures=architectures, texts=texts, configs=configs)


def _text_facts(facts: TextFacts, layers: int) -> TextFacts:
    is_short = facts.final_norm and layers == _SHORT_CLIP_H
    return replace(facts, layers_left_out=0) if is_short else facts
