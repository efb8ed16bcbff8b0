"""Rules for the names of a diffusion model's weights in LoRA files, for each family. Torch-free.

A rule is a prefix and the source of the base name. The two sources are the checkpoint's keys and the module names of
diffusers; the weights that they mean follow from a key map. `extra_names` of a family adds the few names that are
neither.

Sources of the conventions: the files that kohya's scripts, LyCORIS, OneTrainer, SimpleTuner, diffusers, PEFT and the
trainers of single models publish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.parts.lora_naming import (
    CHECKPOINT_KEYS,
    GENERIC,
    BaseNames,
    LoraNaming,
    NameRule,
    NameSource,
    Ranges,
    dotted,
    joined_names,
)


def naming_of(family: str) -> LoraNaming:
    """Return the naming of LoRAs of `family`; for an unknown one, names made of the checkpoint's keys."""
    return NAMINGS.get(family, GENERIC)


def generate_names(naming: LoraNaming, names_by_source: BaseNames) -> Iterator[tuple[str, Ranges]]:
    """Yield every name that `naming` makes of the base names, and the rows that it means. If several rules make one
    name, the first wins."""
    bases: dict[NameSource, dict[str, Ranges]] = {s: dict(names_by_source.get(s, {})) for s in NameSource}
    for source, base, ranges in list(naming.extra_names(names_by_source)):
        bases[source].setdefault(base, ranges)
    for rule in naming.rules:
        for base, ranges in bases[rule.source].items():
            yield rule.write(base), ranges


def _as_attention_processor(base: str) -> str:
    """Return `base` as diffusers named it when LoRAs were part of attention processors."""
    return base.replace(".to_out.0", ".to_out").replace(".to_", ".processor.to_")


_UNET_RULES = (
    *joined_names(NameSource.DIFFUSERS, "lora_unet_", "lycoris_"),
    *dotted(NameSource.DIFFUSERS, "unet.", "base_model.model.", "unet.base_model.model.", ""),
    *(NameRule(b, NameSource.DIFFUSERS, transform=_as_attention_processor) for b in ("unet.", "base_model.model.", "")),
    *dotted(NameSource.CHECKPOINT, "unet.", "base_model.model.", ""),
    *joined_names(NameSource.CHECKPOINT, "lycoris_"),
)


def _unet_labels(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """The label embedding has two names in diffusers: its configuration determines which one a UNet uses."""
    names = names_by_source[NameSource.DIFFUSERS]
    for layer in ("linear_1", "linear_2"):
        for name, other in (("add_embedding", "class_embedding"), ("class_embedding", "add_embedding")):
            if f"{name}.{layer}" in names:
                yield NameSource.DIFFUSERS, f"{other}.{layer}", names[f"{name}.{layer}"]


def _cascade_queries(names_by_source: BaseNames) -> Iterator[tuple[NameSource, str, Ranges]]:
    """Separate names for queries, keys and values, which a published file has in one tensor: the names in files that
    have them separately."""
    for base, ranges in names_by_source[NameSource.DIFFUSERS].items():
        stem, found, part = base.partition(".attention.to_")
        if found and part in ("q", "k", "v"):
            yield NameSource.CHECKPOINT, f"{stem}.attention.attn.to_{part}", ranges


_UNET = LoraNaming((*CHECKPOINT_KEYS, *_UNET_RULES), _unet_labels)
_CASCADE = LoraNaming(
    (
        *GENERIC.rules,
        *joined_names(NameSource.CHECKPOINT, "lora_prior_unet_"),
        *joined_names(NameSource.DIFFUSERS, "lora_prior_unet_"),
        *dotted(NameSource.DIFFUSERS, "prior."),
        NameRule("prior.", NameSource.DIFFUSERS, transform=_as_attention_processor),
        *dotted(NameSource.CHECKPOINT, "prior."),
    ),
    _cascade_queries,
)

#: by family, and by layout for families that are published under the names of one
NAMINGS: Mapping[str, LoraNaming] = {
    **{names.layout: family.lora for family in defined_families() if (names := family.layout_names) is not None},
    **{family.name: family.lora for family in defined_families()},
    "sd1": _UNET,
    "sd2": _UNET,
    "sdxl": _UNET,
    "sdxl_refiner": _UNET,
    "cascade": _CASCADE,
    # diffusers uses the names of the original code for these
    "ace_step": GENERIC,
    "kandinsky5": GENERIC,
    "omnigen2": GENERIC,
}
