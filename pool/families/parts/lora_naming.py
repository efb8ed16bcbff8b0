"""`LoraNaming`: rules for the names of a diffusion model's weights in LoRA files, and the usual ones. Torch-free.

Sources of the conventions: as in `pool.models.lora_names.naming`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from modelpool.pool.weights.keymaps.key_map import RowRange

Ranges: TypeAlias = "tuple[RowRange, ...]"
BaseNames: TypeAlias = "Mapping[NameSource, Mapping[str, Ranges]]"


class NameSource(Enum):
    """Source of the base name of a weight.

    CHECKPOINT  the checkpoint's key without its prefix and without its last part, for weights
    WHOLE_KEY   the checkpoint's key without its prefix, for everything that is no weight: biases, tables, scales; also
                diffusers' name
    DIFFUSERS   diffusers' name of a weight, without its last part
    """

    CHECKPOINT = "checkpoint"
    WHOLE_KEY = "whole key"
    DIFFUSERS = "diffusers"


@dataclass(frozen=True, slots=True)
class NameRule:
    """A rule for names: `prefix`, then the base name from one source.

    joined     with underscores for dots
    transform  applied to the base name first
    """

    prefix: str
    source: NameSource
    joined: bool = False
    transform: Callable[[str], str] = str

    def write(self, base: str) -> str:
        """Return the LoRA name of the weight with the base name `base`."""
        transformed = self.transform(base)
        return self.prefix + (transformed.replace(".", "_") if self.joined else transformed)


@dataclass(frozen=True, slots=True)
class LoraNaming:
    """All rules for names in the LoRAs of one family.

    rules        the first wins if two make the same name
    extra_names  base names that neither source has, made from the names of all sources
    """

    rules: tuple[NameRule, ...]
    extra_names: Callable[[BaseNames], Iterator[tuple[NameSource, str, Ranges]]] = field(
        default=lambda names_by_source: iter(())
    )


def dotted(source: NameSource, *prefixes: str) -> tuple[NameRule, ...]:
    """Return a rule for each prefix."""
    return tuple(NameRule(prefix, source) for prefix in prefixes)


def joined_names(source: NameSource, *prefixes: str) -> tuple[NameRule, ...]:
    """Return a rule for each prefix, with underscores for dots."""
    return tuple(NameRule(prefix, source, joined=True) for prefix in prefixes)


#: names with a prefix before a checkpoint's key
CHECKPOINT_KEYS = (
    *dotted(NameSource.CHECKPOINT, "diffusion_model.", "model.diffusion_model."),
    *dotted(NameSource.WHOLE_KEY, "diffusion_model.", "model.diffusion_model."),
    *joined_names(NameSource.CHECKPOINT, "lora_unet_"),
    *joined_names(NameSource.WHOLE_KEY, "lora_unet_"),
)
#: the conventions of diffusers, PEFT and others applied to the checkpoint's keys, as trainers of original code do
_BORROWED = (
    *dotted(NameSource.CHECKPOINT, "transformer.", "base_model.model.", ""),
    *joined_names(NameSource.CHECKPOINT, "lycoris_", "lora_transformer_"),
)
_TRANSFORMER_RULES = (
    *dotted(
        NameSource.DIFFUSERS, "transformer.", "base_model.model.", "unet.base_model.model.", "", "diffusion_model."
    ),
    *joined_names(NameSource.DIFFUSERS, "lycoris_", "lora_transformer_", "lora_unet_"),
)


#: names made of the checkpoint's keys
GENERIC = LoraNaming((*CHECKPOINT_KEYS, *_BORROWED))
#: the same, and names made of diffusers' names
TRANSFORMER = LoraNaming((*CHECKPOINT_KEYS, *_TRANSFORMER_RULES, *_BORROWED))


def as_attention_processor(base: str) -> str:
    """Return `base` as diffusers named it when LoRAs were part of attention processors."""
    return base.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_")


def _unet_labels(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """The label embedding has two names in diffusers: its configuration determines which one a UNet uses."""
    names = names_by_source[NameSource.DIFFUSERS]
    for layer in ("linear_1", "linear_2"):
        for name, other in (("add_embedding", "class_embedding"), ("class_embedding", "add_embedding")):
            if f"{name}.{layer}" in names:
                yield NameSource.DIFFUSERS, f"{other}.{layer}", names[f"{name}.{layer}"]


_UNET_RULES = (
    *joined_names(NameSource.DIFFUSERS, "lora_unet_", "lycoris_"),
    *dotted(NameSource.DIFFUSERS, "unet.", "base_model.model.", "unet.base_model.model.", ""),
    *(NameRule(b, NameSource.DIFFUSERS, transform=as_attention_processor) for b in ("unet.", "base_model.model.", "")),
    *dotted(NameSource.CHECKPOINT, "unet.", "base_model.model.", ""),
    *joined_names(NameSource.CHECKPOINT, "lycoris_"),
)
#: names of UNets that read texts
UNET = LoraNaming((*CHECKPOINT_KEYS, *_UNET_RULES), _unet_labels)
