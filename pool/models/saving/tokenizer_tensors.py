"""Converts tokenizers that a checkpoint saved as one file would lose to tensors of that file.

A GGUF file has its tokenizer among its entries, which safetensors files cannot store. Weights files store tokenizers as
byte tensors; `pool.models.text.tokenizer_files` searches them before the folder of the file, so the saved file is read
like the source, wherever it is. Other files keep what they have; a tokenizer next to the source has to be placed next
to the new file by the user.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from modelpool.pool.files.formats.gguf_entries import has_gguf_start
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.loading.open_tokenizer import reading_of_role, tokenizer_of
from modelpool.pool.models.text.text_tokenizer import TokenizerMissing
from modelpool.pool.models.text.tokenizer_files import TENSORS
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.tensor_bytes import computed_tensor

#: the byte tensor with a tokenizer.json
_TENSOR = next(name for name, file in TENSORS.items() if file == "tokenizer.json")


def tokenizer_tensors(checkpoint: Checkpoint) -> Iterator[TensorToWrite]:
    """Yield the tokenizers of the text encoders in GGUF files, inside those or next to them; none for an encoder that
    has or needs none. Raises CorruptFile for a file that can no longer be read."""
    for role in checkpoint.family.text_encoders:
        reading = reading_of_role(checkpoint, role)
        if reading is None or reading.is_clip or reading.connects or not _is_gguf(checkpoint, role):
            continue
        key = checkpoint.family.prefixes[role] + _TENSOR
        try:
            tokenizer = tokenizer_of(checkpoint, role, reading, checkpoint.build(role).module)
        except TokenizerMissing:
            continue
        if tokenizer.is_of_bytes or key in checkpoint.header.tensors:
            continue
        data = torch.frombuffer(bytearray(tokenizer.as_json().encode()), dtype=torch.uint8)
        yield computed_tensor(key, torch.uint8, data.shape, data.clone)


def _is_gguf(checkpoint: Checkpoint, role: Role) -> bool:
    keys = checkpoint.family.shapes_of(role, checkpoint.shapes)
    return any(has_gguf_start(path) for path in {checkpoint.header.path_of(key) for key in keys})
