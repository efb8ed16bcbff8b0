"""Convert the names of CLIP vision encoders in files to transformers' names, and back to open_clip's.

Converters for `pool.weights.keymaps.key_map.discover` rename and split, and drop tensors that are no weights of the
encoder (position tables, the text model of a complete CLIP). Reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape

#: a key that only the naming of open_clip has, without prefix
OPEN_CLIP_KEY = "conv1.weight"
_LEVEL, _PROJECTION = "vision_model.", "visual_projection.weight"
#: prefixes of the encoder's parts in files without the outer level
_PARTS_ALONE = ("embeddings.", "encoder.", "pre_layrnorm.", "post_layernorm.")
_LAYERS, _OWN_LAYERS = "transformer.resblocks.", "vision_model.encoder.layers."
_TABLES: Mapping[str, str] = MappingProxyType(
    {
        "class_embedding": "vision_model.embeddings.class_embedding",
        "conv1.weight": "vision_model.embeddings.patch_embedding.weight",
        "positional_embedding": "vision_model.embeddings.position_embedding.weight",
        # transformers' spelling
        "ln_pre.weight": "vision_model.pre_layrnorm.weight",
        "ln_pre.bias": "vision_model.pre_layrnorm.bias",
        "ln_post.weight": "vision_model.post_layernorm.weight",
        "ln_post.bias": "vision_model.post_layernorm.bias",
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


def convert_vision(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `transformers.CLIPVisionModelWithProjection`, or of the model without a projection if
    the file has none, from `tensors` in the naming of open_clip or transformers, without prefix."""
    if OPEN_CLIP_KEY in tensors:
        named = {name: value for key, tensor in tensors.items() for name, value in _converted(key, tensor)}
    else:
        leveled = {_LEVEL + key if key.startswith(_PARTS_ALONE) else key: tensor for key, tensor in tensors.items()}
        named = {key: tensor for key, tensor in leveled.items() if _is_weight(key)}
    if _PROJECTION in named:
        return named
    # the module without a projection has one level less
    return {key.removeprefix(_LEVEL): tensor for key, tensor in named.items()}


def open_clip_vision_shapes(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensors of an open_clip vision encoder, without prefix, from the `shapes` of the parameters of
    `transformers.CLIPVisionModelWithProjection`: the inverse of `convert_vision`."""
    tables, parts = ({own: theirs for theirs, own in names.items()} for names in (_TABLES, _PARTS))
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name in tables:
            found[tables[name]] = shape
        elif name == _PROJECTION:
            found["proj"] = shape[::-1]
        elif name.startswith(_OWN_LAYERS):
            number, _, part = name.removeprefix(_OWN_LAYERS).partition(".")
            module, _, kind = part.rpartition(".")
            if module == "self_attn.q_proj":
                found[f"{_LAYERS}{number}.attn.in_proj_{kind}"] = (3 * shape[0], *shape[1:])
            elif module in parts:
                found[f"{_LAYERS}{number}.{parts[module]}.{kind}"] = shape
    return found


def _is_weight(key: str) -> bool:
    return (key.startswith(_LEVEL) or key == _PROJECTION) and not key.endswith(".position_ids")


def _converted(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if key in _TABLES:
        yield _TABLES[key], tensor
    elif key == "proj":
        yield _PROJECTION, tensor.T
    elif key.startswith(_LAYERS):
        number, _, part = key.removeprefix(_LAYERS).partition(".")
        for kind in ("weight", "bias"):
            if part == f"attn.in_proj_{kind}":
                for name, rows in zip("qkv", tensor.chunk(3), strict=True):
                    yield f"{_OWN_LAYERS}{number}.self_attn.{name}_proj.{kind}", rows
            elif part.removesuffix(f".{kind}") in _PARTS and part.endswith(kind):
                yield f"{_OWN_LAYERS}{number}.{_PARTS[part.removesuffix(f'.{kind}')]}.{kind}", tensor


def siglip_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters of `transformers.SiglipVisionModel` from `tensors` in its naming, with or without the outer
    level; the text model of a complete SigLIP is left out."""
    leveled = {_LEVEL + key if key.startswith((*_PARTS_ALONE, "head.")) else key: x for key, x in tensors.items()}
    return {key.removeprefix(_LEVEL): x for key, x in leveled.items() if _is_weight(key)}
