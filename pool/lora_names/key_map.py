"""Names that LoRA files use for a model's weights, for every family with specific conventions.

Knows the public naming conventions. The weight that a name means follows from key maps, which have both names of every
weight, the checkpoint's and the module's. Does not read tensors and does not compute (`pool.patches`). `style_of` does
not import torch, nor do the maps of a built component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from modelpool.pool.lora_names.diffusion import model_names, names_of, through
from modelpool.pool.lora_names.styles import style_of, styles_of
from modelpool.pool.lora_names.text import CLIP_G, CLIP_H, CLIP_L, lora_encoder, names_of_module, text_encoder_names
from modelpool.pool.specs.spec import Role

if TYPE_CHECKING:
    from modelpool.pool.families.family import Family
    from modelpool.pool.keymaps.key_map import KeyMap, RowRange

__all__ = ["lora_key_map", "lora_targets", "model_names", "style_of", "styles_of", "text_encoder_names"]

#: the text encoders of UNet families
_ENCODERS = {
    "sd1": {Role.TEXT_ENCODER: CLIP_L},
    "sd2": {Role.TEXT_ENCODER: CLIP_H},
    "sdxl": {Role.TEXT_ENCODER: CLIP_L, Role.TEXT_ENCODER_2: CLIP_G},
    "sdxl_refiner": {Role.TEXT_ENCODER: CLIP_G},
    "cascade": {Role.TEXT_ENCODER: CLIP_G},
}


class KeyedComponent(Protocol):
    """A built component of a family, with the key map that its weights were loaded by."""

    @property
    def family(self) -> Family: ...
    @property
    def role(self) -> Role: ...
    @property
    def key_map(self) -> KeyMap: ...


def lora_key_map(built: KeyedComponent) -> dict[str, tuple[RowRange, ...]]:
    """Return every base name that a LoRA may use for a weight of `built`, and the parameter rows that it means.

    A delta for a name has the shape `ranges[0].source_shape`; `RowRange.place` cuts it up. Names made of the
    checkpoint's keys include biases and tables.
    """
    family = built.family
    if family.text_set and built.role.is_text_encoder:
        siblings = [lora_encoder(facts.encoder, family.name) for facts in family.texts.values()]
        encoder = lora_encoder(family.texts[built.role].encoder, family.name)
        return names_of_module(encoder, built.key_map, siblings)
    return lora_targets(built.role, built.key_map, family.prefixes[built.role], family.relative or family.name)


def lora_targets(role: Role, key_map: KeyMap, prefix: str, family: str = "sd1") -> dict[str, tuple[RowRange, ...]]:
    """Return the same as `lora_key_map`, for a component that is not built. `prefix` begins its keys in the checkpoint.

    `family` is one of `naming.NAMINGS`.
    """
    if role is Role.DIFFUSION_MODEL:
        return through(names_of(family, key_map, prefix), key_map)
    if role.is_text_encoder:
        encoders = _ENCODERS[family]
        return names_of_module(encoders[role], key_map, tuple(encoders.values()))
    return {}
