"""Names of a GGUF file's tensors: diffusion models have their own, text encoders llama.cpp's for those of transformers.

Only renaming: encoders whose values llama.cpp changes when it converts (rows of Llama and Mistral in another order,
norms of Gemma plus one) are refused. Source: the tables of the `gguf` package 0.19 (MIT), which the tests compare with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from pool.checkpoints.safetensors_file import TensorEntry
from pool.errors import UnknownArchitecture


@dataclass(frozen=True, slots=True)
class Names:
    """Of one kind of text encoder.

    blocks  the beginning of a block's names, with the block's number behind it, here and in transformers
    parts   of a block
    whole   of tensors outside blocks
    """

    blocks: tuple[str, str]
    parts: Mapping[str, str]
    whole: Mapping[str, str]


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
#: by what a file says it is
NAMES: Mapping[str, Names] = MappingProxyType(
    {"t5": _T5, "t5encoder": _T5, "qwen2": _QWEN, "qwen2vl": _QWEN, "qwen3": _QWEN}
)
#: whose values are changed, not only their names
CHANGED = ("llama", "mistral3", "gemma", "gemma2", "gemma3", "gemma-embedding")
#: parts of T5's files that only its other half reads, and what models have that write texts
_UNREAD = re.compile(r"(dec\..*|rope_freqs\.weight)")
#: Z-Image's, one row each: some converters leave the 1 out
_ROWS = ("cap_pad_token", "x_pad_token")
_BLOCK = re.compile(r"(\d{1,4})\.(.+)")


def renamed(entry: TensorEntry, architecture: str) -> TensorEntry | None:
    """The tensor under the name that transformers has for it; as its model has it where the file is no text encoder;
    None for one that no text encoder reads.

    Raises UnknownArchitecture for encoders of which a new name is not enough.
    """
    if architecture in CHANGED:
        raise UnknownArchitecture(
            f"a text encoder of the kind {architecture!r}, whose values llama.cpp changes in GGUF files: use its "
            f"safetensors file"
        )
    names = NAMES.get(architecture)
    if names is None:
        is_row = entry.name.endswith(_ROWS) and len(entry.shape) == 1
        return replace(entry, shape=(1, *entry.shape)) if is_row else entry
    if _UNREAD.fullmatch(entry.name):
        return None
    stem, dot, end = entry.name.rpartition(".")
    here, there = names.blocks
    if stem in names.whole:
        return replace(entry, name=names.whole[stem] + dot + end)
    found = _BLOCK.fullmatch(stem.removeprefix(here)) if stem.startswith(here) else None
    part = None if found is None else names.parts.get(found[2])
    return entry if found is None or part is None else replace(entry, name=f"{there}{found[1]}.{part}{dot}{end}")
