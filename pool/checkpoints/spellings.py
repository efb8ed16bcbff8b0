"""Text encoders under other names than a family's own files have. Torch-free.

Whole checkpoints spell CLIP-G and CLIP-H as open_clip does; the same weights in a file of their own are mostly spelled
as transformers does. Knows how such a family is told from its shapes. Does not know where the tensors come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pool.checkpoints.families import Architecture, Family, TextFacts
from pool.checkpoints.infer import clip_text_config
from pool.checkpoints.safetensors_file import Shape

_OPEN_CLIP_KEY, _TRANSFORMERS_KEY = "ln_final.weight", "final_layer_norm.weight"
_LEVEL, _PROJECTION = "text_model.", "text_projection.weight"
#: CLIP-H as folders of diffusers have it: without the last layer, which SD2 does not read
_SHORT_CLIP_H = (1024, 23)


def as_spelled(family: Family, shapes: Mapping[str, Shape]) -> Family:
    """`family` with what its text encoders are among tensors of `shapes` (keys with prefixes); `family` itself where
    all of them are spelled as its own files do.

    Raises UnknownArchitecture for a text encoder with shapes that it cannot have.
    """
    architectures = dict(family.architectures)
    texts, configs = dict(family.texts), dict(family.configs)
    for role in family.text_encoders:
        prefix = family.prefixes[role]
        if family.architectures[role] is not Architecture.OPEN_CLIP_TEXT or prefix + _OPEN_CLIP_KEY in shapes:
            continue
        own = {key.removeprefix(prefix).removeprefix(_LEVEL): s for key, s in shapes.items() if key.startswith(prefix)}
        if _TRANSFORMERS_KEY not in own:
            continue
        if _PROJECTION in own:
            architectures[role] = Architecture.CLIP_TEXT_PROJECTED
        else:
            architectures[role] = Architecture.CLIP_TEXT
            configs[role] = {**clip_text_config(own), "hidden_act": "gelu"}
        texts[role] = _text_facts(texts[role], clip_text_config(own))
    if architectures == family.architectures:
        return family
    return replace(family, architectures=architectures, texts=texts, configs=configs)


def _text_facts(facts: TextFacts, config: Mapping[str, Any]) -> TextFacts:
    is_short = (config["hidden_size"], config["num_hidden_layers"]) == _SHORT_CLIP_H
    return replace(facts, layers_left_out=0) if is_short and facts.final_norm else facts
