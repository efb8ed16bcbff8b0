"""Finds the reading and the tokenizer of a text encoder of an open checkpoint: inside its weights file, or next to
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.families.transformer_families import TEXT_ROLES
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.text.text_tokenizer import TextTokenizer, tokenizer_kind
from modelpool.pool.models.text.tokenizer_files import TENSORS, find_tokenizer
from modelpool.pool.values.specs.spec import Role


def reading_of_role(checkpoint: Checkpoint, role: Role) -> Reading | None:
    """Return how the text encoder `role` is read; None for UNet families, which specify it themselves."""
    if not checkpoint.family.text_set:
        return None
    readings = readings_of(checkpoint.family.text_set)
    return None if readings is None else readings[TEXT_ROLES.index(role)]


def tokenizer_of(checkpoint: Checkpoint, role: Role, reading: Reading, module: nn.Module) -> TextTokenizer:
    """Return the tokenizer of the text encoder `role`, which is not CLIP; `module` is its module, with or without
    weights.

    Raises TokenizerMissing, saying which file to put where, if there is none.
    """
    prefix, mapped = checkpoint.family.prefixes[role], checkpoint.mapped
    config: Any = module.config  # transformers is not typed
    vocabulary = int(getattr(config, "text_config", config).vocab_size)
    stems = (prefix, prefix.removesuffix("transformer."))
    tensors = {
        name: mapped.tensors()[stem + name]
        for name in TENSORS
        for stem in stems
        if stem + name in mapped.header.tensors
    }
    kind = tokenizer_kind(reading.encoder, vocabulary, config.model_type)
    inside = next(key for key in mapped.header.tensors if key.startswith(prefix))
    return find_tokenizer(kind, vocabulary, tensors=tensors, weights=Path(mapped.header.path_of(inside)))
