"""Convert the text models of open_clip to the naming of transformers, and back. Replaces diffusers' converter.

diffusers' own drops the last layer of SD2's, which a LoRA may target and a saved file must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape

_LEVEL = "text_model."
_LAYERS, _OWN_LAYERS = "transformer.resblocks.", "text_model.encoder.layers."
_PROJECTION, _OWN_PROJECTION = "text_projection", "text_projection.weight"
_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
        "positional_embedding": "text_model.embeddings.position_embedding.weight",
        "ln_final.weight": "text_model.final_layer_norm.weight",
        "ln_final.bias": "text_model.final_layer_norm.bias",
    }
)
#: parts of a layer, by name prefix
_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "ln_1": "layer_norm1",
        "ln_2": "layer_norm2",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
        "attn.out_proj": "self_attn.out_proj",
    }
)
#: parts that are one tensor in open_clip
_FUSED = tuple(f"self_attn.{name}_proj" for name in "qkv")


def open_clip_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `transformers.CLIPTextModelWithProjection` from an open_clip text model's `tensors`
    (keys without prefix). Unknown keys are dropped."""
    return {name: value for key, tensor in tensors.items() for name, value in _converted(key, tensor)}


def _converted(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in _TABLES:
        yield _TABLES[key], tensor
    elif key == _PROJECTION:
        yield _OWN_PROJECTION, tensor.T
    elif key.startswith(_LAYERS):
        number, _, part = key.removeprefix(_LAYERS).partition(".")
        for kind in ("weight", "bias"):
            if part == f"attn.in_proj_{kind}":
                for name, rows in zip("qkv", tensor.chunk(3), strict=True):
                    yield f"{_OWN_LAYERS}{number}.self_attn.{name}_proj.{kind}", rows
            elif part.removesuffix(f".{kind}") in _PARTS and part.endswith(kind):
                yield f"{_OWN_LAYERS}{number}.{_PARTS[part.removesuffix(f'.{kind}')]}.{kind}", tensor


def open_clip_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the open_clip tensors, without prefix, from which `open_clip_text` produces parameters of `shapes`.
    Parameter names may lack the `text_model` level. Parameters that it never produces are dropped."""
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        levelled = name if name.startswith((_LEVEL, _OWN_PROJECTION)) else _LEVEL + name
        found |= _source(levelled, shape)
    return found


def _source(name: str, shape: Shape) -> dict[str, Shape]:
    """Return the tensor from which the parameter `name` is produced, if any; three parameters of a layer come from
    one."""
    tables = {own: key for key, own in _TABLES.items()}
    if name in tables:
        return {tables[name]: shape}
    if name == _OWN_PROJECTION:
        return {_PROJECTION: shape[::-1]}
    if not name.startswith(_OWN_LAYERS):
        return {}
    number, _, rest = name.removeprefix(_OWN_LAYERS).partition(".")
    part, _, kind = rest.rpartition(".")
    parts = {own: key for key, own in _PARTS.items()}
    if part in parts:
        return {f"{_LAYERS}{number}.{parts[part]}.{kind}": shape}
    if part in _FUSED:
        return {f"{_LAYERS}{number}.attn.in_proj_{kind}": (len(_FUSED) * shape[0], *shape[1:])}
    return {}
