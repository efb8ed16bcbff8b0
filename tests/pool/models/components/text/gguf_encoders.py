"""Language models as llama.cpp's converter writes them: its names, its order of rows, its norms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from tests.pool.files.formats.gguf_files import write_gguf

#: text encoders by name, and what llama.cpp calls their kind
ARCHITECTURES = {"llama3_8b": "llama", "mistral3_24b": "llama", "gemma2_2b": "gemma2", "gemma3_4b": "gemma3"}


def written(
    path: Path,
    module: nn.Module,
    architecture: str,
    kind: str = "Q8_0",
    entries: Mapping[str, Any] | None = None,
    more: Mapping[str, Tensor] | None = None,
    *,
    part_tensors: int = 0,
) -> Path:
    """The file of `module`, a language model of transformers; `entries` are said beside the usual ones, `more` tensors
    are in it too."""
    said = {**entries_of(module, architecture), **(entries or {})}
    tensors = converted(module, architecture) | dict(more or {})
    write_gguf(path, tensors, kind, architecture, entries=said, part_tensors=part_tensors)
    return path


def converted(module: nn.Module, architecture: str) -> dict[str, Tensor]:
    """The tensors that the converter makes of those of `module`."""
    config: Any = module.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for key, tensor in module.state_dict().items():
        stem, _, end = key.rpartition(".")
        part = stem.rpartition(".")[2]
        if architecture in ("llama", "mistral3") and part in heads:
            tensor = in_turns(tensor, heads[part])
        if architecture.startswith("gemma") and part.endswith("norm"):
            tensor = tensor + 1
        name = names.get_name(f"model.{stem}")
        assert name is not None, key
        found[f"{name}.{end}"] = tensor
    return found


def in_turns(rows: Tensor, heads: int) -> Tensor:
    """`rows` of `heads` with the rows of each one's two halves in turns."""
    halves = rows.chunk(heads)
    return torch.cat([torch.stack(head.chunk(2), dim=1).flatten(0, 1) for head in halves])


def entries_of(module: nn.Module, architecture: str) -> dict[str, Any]:
    """What the converter says of the sizes of `module`."""
    config: Any = module.config
    positions = config.rope_parameters.get("full_attention", config.rope_parameters)
    said = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(positions["rope_theta"]),
        "vocab_size": config.vocab_size,
    }
    return {f"{architecture}.{key}": value for key, value in said.items()}


#: sizes of published models: architecture, width, inner width, rows of queries and keys, heads, layers, tokens
PUBLISHED = {
    "llama3_8b": ("llama", 4096, 14336, 4096, 1024, (32, 8), 32, 128256),
    "mistral3_24b": ("llama", 5120, 32768, 4096, 1024, (32, 8), 40, 131072),
    "gemma2_2b": ("gemma2", 2304, 9216, 2048, 1024, (8, 4), 26, 256000),
    "gemma3_4b": ("gemma3", 2560, 10240, 2048, 1024, (8, 4), 34, 262208),
}


def published(path: Path, name: str) -> Path:
    """A file of the published sizes, which has nothing on the disk but its header."""
    architecture, width, inner, queries, keys, (heads, groups), layers, words = PUBLISHED[name]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.attention.head_count", heads)
    writer.add_uint32(f"{architecture}.attention.head_count_kv", groups)
    matrices = {
        "attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, queries),
        "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner),
    }  # fmt: skip
    norms = ["attn_norm", "ffn_norm"]
    if architecture.startswith("gemma"):
        norms += ["post_attention_norm", "post_ffw_norm"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (words, width), "output_norm": (width,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.{part}": shape for part, shape in matrices.items()}
        shapes |= {f"blk.{i}.{norm}": (width,) for norm in norms}
        if architecture == "gemma3":
            shapes |= {f"blk.{i}.attn_{part}_norm": (queries // heads,) for part in "qk"}
    total = 0
    for part, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_K
        values_, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = int(torch.Size(shape).numel()) // values_ * block_bytes
        writer.add_tensor_info(f"{part}.weight", shape, torch.float32, size, raw_dtype=kind)  # type: ignore[arg-type]
        total += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 + total)
    return path
