"""Names of a GGUF file's tensors: diffusion models have their own, text encoders llama.cpp's for those of transformers.

Also what llama.cpp changes in the values when it converts, which is undone where they are read: the rows of Llama's and
Mistral's queries and keys stand in another order, and the norms of Gemma are one more.
Source: the tables of the `gguf` package 0.19 (MIT), and what transformers 5.23 does on reading such files; the tests
compare with both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.formats.ggml_types import block_of, is_block_type
from modelpool.pool.formats.safetensors_file import TensorEntry
from modelpool.pool.formats.strict_json import brief


@dataclass(frozen=True, slots=True)
class Names:
    """Of one kind of text encoder.

    blocks  the beginning of a block's names, with the block's number behind it, here and in transformers
    parts   of a block
    whole   of tensors outside blocks
    turned  parts whose rows are heads with the rows of their halves in turns, and what the file says how many those are
    norm    what is added to the norms
    """

    blocks: tuple[str, str]
    parts: Mapping[str, str]
    whole: Mapping[str, str]
    turned: Mapping[str, str] = field(default_factory=dict)
    norm: float = 0.0


_T5 = Names(
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
_QWEN = Names(
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
#: Llama's, and Mistral's: most files of Mistral say that they are Llama
_LLAMA = replace(_QWEN, turned={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"})
#: which has norms behind its two halves too, and calls Qwen's second norm otherwise
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
#: by what a file says it is
NAMES: Mapping[str, Names] = MappingProxyType(
    {
        "t5": _T5, "t5encoder": _T5, "qwen2": _QWEN, "qwen2vl": _QWEN, "qwen3": _QWEN,
        "llama": _LLAMA, "mistral3": _LLAMA, "gemma2": _GEMMA, "gemma3": _GEMMA,
    }
)  # fmt: skip
#: relatives of these that no model here reads, and whose values llama.cpp changes too
RELATIVES = ("gemma", "gemma-embedding")
#: which names a file has follows from what it says it is
_ARCHITECTURE_KEY = "general.architecture"
_NORM = "norm.weight"
#: parts of T5's files that only its other half reads, and what models have that write texts
_UNREAD = re.compile(r"(dec\..*|rope_freqs\.weight)")
#: Z-Image's, one row each: some converters leave the 1 out
_ROWS = ("cap_pad_token", "x_pad_token")
#: of a number of heads
_MOST_DIGITS = 7
_BLOCK = re.compile(r"([0-9]{1,4})\.(.+)")


def renamed(entry: TensorEntry, metadata: Mapping[str, str]) -> TensorEntry | None:
    """The tensor under the name that transformers has for it, with what is to be undone in its values; as its model has
    it where the file, which says `metadata`, is no text encoder; None for one that no text encoder reads.

    Raises UnknownArchitecture for encoders of which that is not enough, or that do not say what is needed for it.
    """
    architecture = metadata.get(_ARCHITECTURE_KEY, "")
    if architecture in RELATIVES:
        raise UnknownArchitecture(
            f"a text encoder of the kind {architecture!r}, which no model here reads, expected one of "
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
    known = names.whole.get(stem) if found is None or part is None else f"{there}{found[1]}.{part}"
    if known is None:  # none of llama.cpp's, which has then changed nothing
        return entry
    if found is not None and found[2] in names.turned:
        entry = _with_heads(entry, f"{architecture}.{names.turned[found[2]]}", metadata)
    if names.norm and entry.name.endswith(_NORM):
        entry = _with_norm(entry, names.norm)
    return replace(entry, name=known + dot + end)


def _with_norm(entry: TensorEntry, added: float) -> TensorEntry:
    if is_block_type(entry.dtype):
        raise UnknownArchitecture(f"tensor {brief(entry.name)}: found a norm as {entry.dtype}, expected plain numbers")
    return replace(entry, added=added)


def _with_heads(entry: TensorEntry, key: str, metadata: Mapping[str, str]) -> TensorEntry:
    said = metadata.get(key, "")
    heads = int(said) if said.isdecimal() and len(said) < _MOST_DIGITS else 0
    rows = entry.shape[0] if entry.shape and entry.elements else 0
    if not heads or not rows or rows % (2 * heads):
        raise UnknownArchitecture(
            f"tensor {brief(entry.name)}: found {rows} rows and {key} {brief(said or 'nothing')}, expected a number of "
            f"heads with two halves each"
        )
    if is_block_type(entry.dtype) and (len(entry.shape) < 2 or math.prod(entry.shape[1:]) % block_of(entry.dtype)[0]):
        raise UnknownArchitecture(
            f"tensor {brief(entry.name)}: found {entry.dtype} of shape {entry.shape}, expected rows of whole blocks"
        )
    return replace(entry, heads=heads)
