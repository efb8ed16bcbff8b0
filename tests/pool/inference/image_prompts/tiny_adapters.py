"""Tiny IP-Adapters and vision encoders in their published key layouts (h94/IP-Adapter)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from modelpool.pool.weights.patcher.blocks.diffusers_names import cross_attentions
from tests.pool.families.tiny_transformers import seeded

State = dict[str, Tensor]

SIDE, PATCH, HIDDEN, PROJECTED, HEADS = 32, 8, 24, 20, 2
#: width of a face embedding
FACE = 12
_HEAD = 64


def vision_encoder(seed: int = 5) -> Any:
    """CLIP with a projection, as IP-Adapters read."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": HEADS}
    config = CLIPVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH, projection_dim=PROJECTED, hidden_act="gelu")
    return seeded(lambda: CLIPVisionModelWithProjection(config), seed)


def siglip(seed: int = 6) -> Any:
    """As Redux reads."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 16}
    return seeded(lambda: SiglipVisionModel(SiglipVisionConfig(**sizes, image_size=SIDE, patch_size=PATCH)), seed)


def write_encoder(folder: Path, module: Any) -> None:
    """As a folder of transformers, "image_encoder" of h94/IP-Adapter."""
    folder.mkdir(parents=True)
    # as published, whatever the version of transformers calls its parts
    level = "" if any(name.startswith("vision_model.") for name in module.state_dict()) else "vision_model."
    save_file({level + name: x for name, x in module.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(module.config.to_dict(), default=str))


def _linear(found: State, name: str, rows: int, columns: int, bias: bool = True) -> None:
    found[f"{name}.weight"] = torch.randn(rows, columns) / columns**0.5
    if bias:
        found[f"{name}.bias"] = torch.randn(rows) * 0.1


def _norm(found: State, name: str, width: int) -> None:
    found[f"{name}.weight"], found[f"{name}.bias"] = 1 + torch.randn(width) * 0.1, torch.randn(width) * 0.1


def _resampler(found: State, prefix: str, states: int, hidden: int, text: int, heads: int) -> None:
    _linear(found, f"{prefix}proj_in", hidden, states)
    _linear(found, f"{prefix}proj_out", text, hidden)
    _norm(found, f"{prefix}norm_out", text)
    for n in range(4):
        at = f"{prefix}layers.{n}"
        _norm(found, f"{at}.0.norm1", hidden)
        _norm(found, f"{at}.0.norm2", hidden)
        _linear(found, f"{at}.0.to_q", heads * _HEAD, hidden, False)
        _linear(found, f"{at}.0.to_kv", 2 * heads * _HEAD, hidden, False)
        _linear(found, f"{at}.0.to_out", hidden, heads * _HEAD, False)
        _norm(found, f"{at}.1.0", hidden)
        _linear(found, f"{at}.1.1", 4 * hidden, hidden, False)
        _linear(found, f"{at}.1.3", hidden, 4 * hidden, False)


def projection(kind: str, text: int, hidden: int = HIDDEN, projected: int = PROJECTED, face: int = FACE) -> State:
    """The `image_proj` of a kind of IP-Adapter for a model that reads texts of width `text`."""
    found: State = {}
    if kind == "base":
        _linear(found, "proj", 4 * text, projected)
        _norm(found, "norm", text)
    elif kind == "full":
        _linear(found, "proj.0", hidden, hidden)
        _linear(found, "proj.2", text, hidden)
        _norm(found, "proj.3", text)
    elif kind == "plus":
        found["latents"] = torch.randn(1, 16, 16)
        _resampler(found, "", hidden, 16, text, 2)
    elif kind == "faceid":
        _linear(found, "proj.0", 2 * face, face)
        _linear(found, "proj.2", 4 * text, 2 * face)
        _norm(found, "norm", text)
    elif kind == "faceid_plus":
        _linear(found, "proj.0", 2 * face, face)
        _linear(found, "proj.2", 4 * text, 2 * face)
        _norm(found, "norm", text)
        _resampler(found, "perceiver_resampler.", hidden, text, text, 2)
    return found


def layers_for(unet: nn.Module) -> list[tuple[int, int]]:
    """Width of the result and of the text of each cross-attention, in the order of modules."""
    found: Any = sorted(cross_attentions(unet), key=lambda each: each[1])
    return [(attention.to_k.out_features, attention.to_k.in_features) for _, _, attention in found]


def ip_adapter(kind: str, layers: list[tuple[int, int]], seed: int = 7) -> dict[str, State]:
    """The two tables of a file of h94/IP-Adapter."""
    torch.manual_seed(seed)
    found: State = {}
    for place, (width, text) in enumerate(layers):
        for name in "kv":
            _linear(found, f"{2 * place + 1}.to_{name}_ip", width, text, False)
    return {"image_proj": projection(kind, layers[0][1]), "ip_adapter": found}


def flat(tables: dict[str, State]) -> State:
    """As in a safetensors file."""
    return {f"{table}.{name}": tensor for table, named in tables.items() for name, tensor in named.items()}
