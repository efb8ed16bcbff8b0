"""Rules for the names of a diffusion model's weights in LoRA files, for each family. Torch-free.

A rule is a prefix and the source of the base name. The two sources are the checkpoint's keys and the module names of
diffusers; the weights that they mean follow from a key map. `extra_names` of a family adds the few names that are
neither.

Sources of the conventions: the files that kohya's scripts, LyCORIS, OneTrainer, SimpleTuner, diffusers, PEFT and the
trainers of single models publish.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from modelpool.pool.families.definitions import all_definitions, defined_families, defined_unets
from modelpool.pool.families.parts.lora_naming import GENERIC, BaseNames, LoraNaming, NameSource, Ranges


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


#: by family, by the family that others are derived from, and by layout for families that are published under the names
#: of one. Of several families that are derived from one, the first has its naming
NAMINGS: Mapping[str, LoraNaming] = {
    **{names.layout: family.lora for family in defined_families() if (names := family.layout_names) is not None},
    **{unet.family.name: unet.lora for unet in defined_unets()},
    **{family.lora_family: family.lora for family in reversed(tuple(all_definitions()))},
}
