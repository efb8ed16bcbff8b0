"""Tokenizers that a checkpoint saved as one file would leave behind, as tensors of that file.

A GGUF file has its tokenizer among its entries, which safetensors files have no place for. Files of weights carry
tokenizers as tensors of bytes; `pool.text.tokenizer_files` finds them there before it looks beside the file, so that
the saved one is read as the source was, wherever it lies. Other files keep what they have: a tokenizer that lies beside
one lies there for whoever puts it beside the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelpool.pool.formats.gguf_entries import has_gguf_start
from modelpool.pool.formats.safetensors_writer import TensorToWrite
from modelpool.pool.loading.build_checkpoint import Checkpoint
from modelpool.pool.loading.open_tokenizer import reading_of_role, tokenizer_of
from modelpool.pool.mapping.tensor_bytes import made
from modelpool.pool.specs.spec import Role
from modelpool.pool.text.text_tokenizer import TokenizerMissing
from modelpool.pool.text.tokenizer_files import TENSORS

#: of bytes: the tensor that is a tokenizer.json
_TENSOR = next(name for name, file in TENSORS.items() if file == "tokenizer.json")


def tokenizer_tensors(checkpoint: Checkpoint) -> Iterator[TensorToWrite]:
    """The tokenizers that the text encoders in GGUF files are read with, inside those or beside; none for an encoder
    that has none, or needs none. Raises CorruptFile for a file that cannot be read any more."""
    for role in checkpoint.family.text_encoders:
        reading = reading_of_role(checkpoint, role)
        if reading is None or reading.is_clip or not _is_gguf(checkpoint, role):
            continue
        key = checkpoint.family.prefixes[role] + _TENSOR
        try:
            own = tokenizer_of(checkpoint, role, reading, checkpoint.build(role).module)
        except TokenizerMissing:
            continue
        if own.is_of_bytes or key in checkpoint.header.tensors:
            continue
        data = torch.frombuffer(bytearray(own.as_json().encode()), dtype=torch.uint8)
        yield made(key, torch.uint8, data.shape, data.clone)


def _is_gguf(checkpoint: Checkpoint, role: Role) -> bool:
    keys = checkpoint.family.shapes_of(role, checkpoint.shapes)
    return any(has_gguf_start(path) for path in {checkpoint.header.path_of(key) for key in keys})
