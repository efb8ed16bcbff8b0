"""Convert the transformers of open_clip to the naming of transformers, and back. Replaces diffusers' converter.

diffusers' own drops the last layer of SD2's text model, which a LoRA may target and a saved file must have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from modelpool.pool.files.formats.safetensors_file import Shape

_LAYERS = "transformer.resblocks."
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


@dataclass(frozen=True, slots=True)
class OpenClipNames:
    """The names of one of the two transformers of open_clip, and the names of transformers.

    level           outer level of the parameters of transformers, but for the projection
    projection      the tensor of open_clip
    own_projection  the parameter of transformers, which is transposed
    tables          the parameters outside of layers, by tensors of open_clip
    """

    level: str
    projection: str
    own_projection: str
    tables: Mapping[str, str]

    @property
    def own_layers(self) -> str:
        """The beginning of the names of layers in transformers."""
        return f"{self.level}encoder.layers."

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of transformers from `tensors` of open_clip, without prefix. Unknown keys are
        dropped."""
        return {name: value for key, tensor in tensors.items() for name, value in self._converted(key, tensor)}

    def shapes(self, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Return the open_clip tensors, without prefix, from which `convert` produces parameters of `shapes`. Their
        names may lack the level. Parameters that it never produces are dropped."""
        found: dict[str, Shape] = {}
        for name, shape in shapes.items():
            levelled = name if name.startswith((self.level, self.own_projection)) else self.level + name
            found |= self._source(levelled, shape)
        return found

    def _converted(self, key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if key in self.tables:
            yield self.tables[key], tensor
        elif key == self.projection:
            yield self.own_projection, tensor.T
        elif key.startswith(_LAYERS):
            number, _, part = key.removeprefix(_LAYERS).partition(".")
            for kind in ("weight", "bias"):
                if part == f"attn.in_proj_{kind}":
                    for name, rows in zip(_FUSED, tensor.chunk(3), strict=True):
                        yield f"{self.own_layers}{number}.{name}.{kind}", rows
                elif part.removesuffix(f".{kind}") in _PARTS and part.endswith(kind):
                    yield f"{self.own_layers}{number}.{_PARTS[part.removesuffix(f'.{kind}')]}.{kind}", tensor

    def _source(self, name: str, shape: Shape) -> dict[str, Shape]:
        """Return the tensor from which the parameter `name` is produced, if any; three parameters of a layer come from
        one."""
        tables = {own: key for key, own in self.tables.items()}
        if name in tables:
            return {tables[name]: shape}
        if name == self.own_projection:
            return {self.projection: shape[::-1]}
        if not name.startswith(self.own_layers):
            return {}
        number, _, rest = name.removeprefix(self.own_layers).partition(".")
        part, _, kind = rest.rpartition(".")
        parts = {own: key for key, own in _PARTS.items()}
        if part in parts:
            return {f"{_LAYERS}{number}.{parts[part]}.{kind}": shape}
        if part in _FUSED:
            return {f"{_LAYERS}{number}.attn.in_proj_{kind}": (len(_FUSED) * shape[0], *shape[1:])}
        return {}


#: the parameters of `transformers.CLIPTextModelWithProjection`
OPEN_CLIP_TEXT = OpenClipNames(
    "text_model.",
    "text_projection",
    "text_projection.weight",
    MappingProxyType(
        {
            "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
            "positional_embedding": "text_model.embeddings.position_embedding.weight",
            "ln_final.weight": "text_model.final_layer_norm.weight",
            "ln_final.bias": "text_model.final_layer_norm.bias",
        }
    ),
)
#: the parameters of `transformers.CLIPVisionModelWithProjection`
OPEN_CLIP_VISION = OpenClipNames(
    "vision_model.",
    "proj",
    "visual_projection.weight",
    MappingProxyType(
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
    ),
)
