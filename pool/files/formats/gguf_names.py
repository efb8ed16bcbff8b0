"""Maps tensor names of GGUF files to published names: of text encoders (llama.cpp's) and of whole checkpoints
(stable-diffusion.cpp's). Diffusion models keep their names. Torch-free and pure.

Also marks the changes that llama.cpp makes to values when it converts, which are undone when they are read: the rows of
Llama's and Mistral's queries and keys are permuted, and the norms of Gemma are larger by one.

In whole checkpoints, diffusion models (`model.diffusion_model.`), VAEs (`first_stage_model.`) and the encoders of
transformers (`text_encoders.NAME.transformer.`) keep their names. The converter writes the CLIP encoders of UNet models
in the naming of transformers below `cond_stage_model.`, whichever place their published files have. ggml does not store
leading dimensions of size 1.
Sources: the tables of the `gguf` package 0.19 (MIT), and the GGUF reader of transformers 5.23; the tests compare with
both. The names that stable-diffusion.cpp documents for its GGUF files; the GGUF specification for dimensions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from modelpool.pool.files.formats.ggml_types import block_size, is_block_type
from modelpool.pool.files.formats.safetensors_file import TensorEntry
from modelpool.pool.files.formats.strict_json import brief
from modelpool.pool.values.core.errors import UnknownArchitecture

#: where the converter puts the first and the second CLIP of a UNet model
_FIRST, _SECOND = "cond_stage_model.transformer.", "cond_stage_model.1.transformer."
#: where files of SDXL have them, and files of SD2 the only one
_SDXL_FIRST, _SDXL_SECOND, _SD2 = (
    "conditioner.embedders.0.transformer.",
    "conditioner.embedders.1.model.",
    "cond_stage_model.model.",
)
#: linear in SD2, a convolution in SD1
_PROJECTION_IN = "model.diffusion_model.input_blocks.1.1.proj_in.weight"
_MODEL = "model.diffusion_model."
#: weights of diffusion models with 1 as the first of three dimensions: position tables, modulations of Wan
_THREE_DIMENSIONS = ("pos_embed", "positional_encoding", ".modulation")


def published_entries(tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Return the `tensors` of a file under the names and with the dimensions of published files; tensors of other files
    than whole checkpoints are returned as they are."""
    beginnings = _beginnings(tensors)
    found: dict[str, TensorEntry] = {}
    for key, entry in tensors.items():
        name = next((new + key.removeprefix(old) for old, new in beginnings.items() if key.startswith(old)), key)
        is_flat = len(entry.shape) == 2 and key.startswith(_MODEL) and key.endswith(_THREE_DIMENSIONS)
        found[name] = replace(entry, name=name, shape=(1, *entry.shape) if is_flat else entry.shape)
    return found


def _beginnings(tensors: Mapping[str, TensorEntry]) -> Mapping[str, str]:
    """Return the beginnings of names to replace, with their replacements."""
    if any(key.startswith(_SECOND) for key in tensors):
        return {_FIRST: _SDXL_FIRST, _SECOND: _SDXL_SECOND}
    entry = tensors.get(_PROJECTION_IN)
    return {_FIRST: _SD2} if entry is not None and len(entry.shape) == 2 else {}


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Name tables of one kind of text encoder: llama.cpp's names to transformers' names.

    blocks       prefixes of block names, before the block's number, in llama.cpp and in transformers
    parts        names inside a block
    top_level    names of tensors outside blocks
    interleaved  parts with rows of heads, the rows of their two halves alternating, and the entry with their head
                 count
    norm         what llama.cpp adds to the norms
    """

    blocks: tuple[str, str]
    parts: Mapping[str, str]
    top_level: Mapping[str, str]
    interleaved: Mapping[str, str] = field(default_factory=dict)
    norm: float = 0.0


_T5 = EncoderNames(
    ("enc.blk.", "encoder.block."),
    {
        "attn_norm": "layer.0.layer_norm",
        "attn_q": "layer.0.SelfAttention.q",
        "attn_k": "layer.0.SelfAttention.k",
        "attn_v": "layer.0.SelfAttention.v",
        "attn_o": "layer.0.SelfAttention.o",
        "attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
        "ffn_norm": "layer.1.layer_norm",
        "ffn_gate": "layer.1.DenseReluDense.wi_0",
        "ffn_up": "layer.1.DenseReluDense.wi_1",
        "ffn_down": "layer.1.DenseReluDense.wo",
    },
    {"token_embd": "shared", "enc.output_norm": "encoder.final_layer_norm"},
)
_QWEN = EncoderNames(
    ("blk.", "model.layers."),
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    },
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
)
#: Llama's, and Mistral's: most Mistral files declare themselves as Llama
_LLAMA = replace(_QWEN, interleaved={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"})
#: has norms after both sublayers too, and names Qwen's second norm differently
_GEMMA = replace(
    _QWEN,
    parts={
        **_QWEN.parts,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    norm=1.0,
)
#: by the file's `general.architecture`
NAMES: Mapping[str, EncoderNames] = MappingProxyType(
    {
        "t5": _T5, "t5encoder": _T5, "qwen2": _QWEN, "qwen2vl": _QWEN, "qwen3": _QWEN,
        "llama": _LLAMA, "mistral3": _LLAMA, "gemma2": _GEMMA, "gemma3": _GEMMA,
    }
)  # fmt: skip
#: related architectures that no model here reads, with values that llama.cpp changes too
UNSUPPORTED = ("gemma", "gemma-embedding")
#: the entry that decides which names a file has
_ARCHITECTURE_KEY = "general.architecture"
_NORM = "norm.weight"
#: the tensors of a layer that have its rows
_ROW_PARTS = ("weight", "bias")
#: tensors of T5's decoder, and rope factors of language models: not used
_UNREAD = re.compile(r"(dec\..*|rope_freqs\.weight)")
#: Z-Image's, one row each: some converters drop the first dimension of size 1
_ROWS = ("cap_pad_token", "x_pad_token")
#: digits of a head count
_MAX_DIGITS = 7
_BLOCK = re.compile(r"([0-9]{1,4})\.(.+)")


def transformers_entry(entry: TensorEntry, metadata: Mapping[str, str]) -> TensorEntry | None:
    """Return the tensor under its transformers name, marked with the value changes to undo; unchanged if the file with
    `metadata` is no text encoder; None for a tensor that no text encoder reads.

    Raises UnknownArchitecture for encoders that cannot be converted this way, or that lack the entries needed for it.
    """
    architecture = metadata.get(_ARCHITECTURE_KEY, "")
    if architecture in UNSUPPORTED:
        raise UnknownArchitecture(
            f"a text encoder of the architecture {architecture!r}, which is not supported, expected one of "
            f"{', '.join(NAMES)}"
        )
    names = NAMES.get(architecture)
    if names is None:
        is_row = entry.name.endswith(_ROWS) and len(entry.shape) == 1
        return replace(entry, shape=(1, *entry.shape)) if is_row else entry
    if _UNREAD.fullmatch(entry.name):
        return None
    stem, dot, end = entry.name.rpartition(".")
    here, there = names.blocks
    found = _BLOCK.fullmatch(stem.removeprefix(here)) if stem.startswith(here) else None
    part = None if found is None else names.parts.get(found[2])
    known = names.top_level.get(stem) if found is None or part is None else f"{there}{found[1]}.{part}"
    if known is None:  # not a name of llama.cpp's, which then has changed nothing
        return entry
    if found is not None and found[2] in names.interleaved and end in _ROW_PARTS:
        entry = _with_heads(entry, f"{architecture}.{names.interleaved[found[2]]}", metadata)
    if names.norm and entry.name.endswith(_NORM):
        entry = _with_norm(entry, names.norm)
    return replace(entry, name=known + dot + end)


def _with_norm(entry: TensorEntry, added: float) -> TensorEntry:
    if is_block_type(entry.dtype):
        raise UnknownArchitecture(f"tensor {brief(entry.name)}: found a norm as {entry.dtype}, expected plain numbers")
    return replace(entry, added=added)


def _with_heads(entry: TensorEntry, key: str, metadata: Mapping[str, str]) -> TensorEntry:
    text = metadata.get(key, "")
    heads = int(text) if text.isdecimal() and len(text) < _MAX_DIGITS else 0
    rows = entry.shape[0] if entry.shape and entry.elements else 0
    if not heads or not rows or rows % (2 * heads):
        raise UnknownArchitecture(
            f"tensor {brief(entry.name)}: found {rows} rows and {key} {brief(text or 'nothing')}, expected a number of "
            f"heads with two halves each"
        )
    if is_block_type(entry.dtype) and (len(entry.shape) < 2 or math.prod(entry.shape[1:]) % block_size(entry.dtype)[0]):
        raise UnknownArchitecture(
            f"tensor {brief(entry.name)}: found {entry.dtype} of shape {entry.shape}, expected rows of complete blocks"
        )
    return replace(entry, heads=heads)
