"""The text models of open_clip in the spelling of transformers. A converter like those of diffusers.

Ours, because diffusers' own leaves out the last layer of SD2's, which a LoRA may name and a saved file must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

_LAYERS, _OWN_LAYERS = "transformer.resblocks.", "text_model.encoder.layers."
_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "ln_final.weight": "text_model.final_layer_norm.weight",
        "ln_final.bias": "text_model.final_layer_norm.bias",
    }
)
#: parts of a layer, by the beginning of their names
_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "ln_1": "layer_norm1",
        "ln_2": "layer_norm2",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
        "attn.out_proj": "self_attn.out_proj",
    }
)


def open_clip_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters of `transformers.CLIPTextModelWithProjection` made of an open_clip text model's `tensors`, whose
    keys have no prefix. Keys that are neither are left out."""
    return {name: value for key, tensor in tensors.items() for name, value in _converted(key, tensor)}


def _converted(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in _TABLES:
        yield _TABLES[key], tensor
    elif key == "text_projection":
        yield "text_projection.weight", tensor.T
    elif key.startswith(_LAYERS):
        number, _, part = key.removeprefix(_LAYERS).partition(".")
        for kind in ("weight", "bias"):
            if part == f"attn.in_proj_{kind}":
                for name, rows in zip("qkv", tensor.chunk(3), strict=True):
                    yield f"{_OWN_LAYERS}{number}.self_attn.{name}_proj.{kind}", rows
            elif part.removesuffix(f".{kind}") in _PARTS and part.endswith(kind):
                yield f"{_OWN_LAYERS}{number}.{_PARTS[part.removesuffix(f'.{kind}')]}.{kind}", tensor
