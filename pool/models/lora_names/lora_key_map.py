"""Names that LoRA files use for a model's weights, for every family with specific conventions.

Knows the public naming conventions. The weight that a name means follows from key maps, which have both names of every
weight, the checkpoint's and the module's. Does not read tensors and does not compute (`pool.weights.patches`).
`style_of` does not import torch, nor do the maps of a built component.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from modelpool.pool.families.definitions import defined_unets
from modelpool.pool.families.transformer_families import TEXT_ROLES
from modelpool.pool.models.lora_names.diffusion_lora_names import model_names, names_of, through
from modelpool.pool.models.lora_names.name_conventions import style_of, styles_of
from modelpool.pool.models.lora_names.naming import NAMINGS
from modelpool.pool.models.lora_names.text import lora_encoder, names_of_module, text_encoder_names
from modelpool.pool.values.specs.spec import Role

if TYPE_CHECKING:
    from modelpool.pool.families.parts.located_family import LocatedFamily
    from modelpool.pool.weights.keymaps.key_map import KeyMap, RowRange

__all__ = ["lora_key_map", "lora_targets", "model_names", "style_of", "styles_of", "text_encoder_names"]

#: the text encoders of UNet families, by the name under which LoRAs know their weights
_ENCODERS = {
    unet.lora_family: dict(zip(TEXT_ROLES, (reading.encoder for reading in unet.text.readings), strict=False))
    for unet in defined_unets()
}


class KeyedComponent(Protocol):
    """A built component of a family, with the key map that its weights were loaded by."""

    @property
    def family(self) -> LocatedFamily: ...
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
    naming = family.relative or family.name
    if built.role is Role.DIFFUSION_MODEL and family.name in NAMINGS:
        naming = family.name
    return lora_targets(built.role, built.key_map, family.prefixes[built.role], naming)


def lora_targets(role: Role, key_map: KeyMap, prefix: str, family: str) -> dict[str, tuple[RowRange, ...]]:
    """Return the same as `lora_key_map`, for a component that is not built. `prefix` begins its keys in the checkpoint.

    `family` is one of `naming.NAMINGS`.
    """
    if role is Role.DIFFUSION_MODEL:
        return through(names_of(family, key_map, prefix), key_map)
    if role.is_text_encoder:
        encoders = _ENCODERS[family]
        return names_of_module(encoders[role], key_map, tuple(encoders.values()))
    return {}
