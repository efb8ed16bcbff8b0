"""Names of the blocks of a model, for LoRAs with a strength for each block. Torch-free.

The names are those that users of UNets know: BASE (the text encoders), IN00.. and OUT00.. (input and output blocks, as
the original checkpoints count them) and MID. Transformers with double and single blocks have D00.. and S00.., others
B00..; weights outside of blocks are OTHER. Source of the lists of 12, 17, 20 and 26 numbers: the documentation of
A1111's LoRA Block Weight extension.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.refs import BASE_BLOCK

#: factors of a LoRA's strength by block or group of blocks, sorted by name; unnamed blocks have factor 1
BlockFactors = tuple[tuple[str, float], ...]

BASE, MID, OTHER = BASE_BLOCK, "MID", "OTHER"
_FIELD = "loras.blocks"


def _names(group: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"{group}{number:02}" for number in numbers)


#: the blocks that a list of numbers is for, by its length
NUMBERED: Mapping[int, tuple[str, ...]] = {
    12: (BASE, *_names("IN", 4, 5, 7, 8), MID, *_names("OUT", *range(6))),
    17: (BASE, *_names("IN", 1, 2, 4, 5, 7, 8), MID, *_names("OUT", *range(3, 12))),
    20: (BASE, *_names("IN", *range(9)), MID, *_names("OUT", *range(9))),
    26: (BASE, *_names("IN", *range(12)), MID, *_names("OUT", *range(12))),
}
#: the extension's presets: indices of the 17 blocks with factor 1; the others have 0
_PRESETS: Mapping[str, Sequence[int]] = {
    "NONE": (),
    "ALL": range(17),
    "INS": range(4),
    "IND": (0, 4, 5, 6),
    "INALL": range(7),
    "MIDD": (0, *range(4, 12)),
    "OUTD": (0, *range(8, 12)),
    "OUTS": (0, *range(12, 17)),
    "OUTALL": (0, *range(8, 17)),
}
EXPECTED = (
    f"{', '.join(map(str, NUMBERED))} numbers, factors by block such as IN04*0.5,MID*0, or one of {', '.join(_PRESETS)}"
)


def numbered_factors(numbers: Sequence[float]) -> BlockFactors:
    """Return the factors that a list of 12 (SDXL), 17 (SD 1), 20 (SDXL, all blocks) or 26 (SD 1, all blocks) numbers
    means. Raises UnusableField for another length."""
    names = NUMBERED.get(len(numbers))
    if names is None:
        raise unusable_field(_FIELD, counted(len(numbers), "number"), EXPECTED)
    return tuple(sorted(zip(names, map(float, numbers), strict=True)))


def preset_factors(name: str) -> BlockFactors | None:
    """Return the factors of a preset of the extension, which is for the 17 blocks of SD 1; None for another name."""
    chosen = _PRESETS.get(name.strip().upper())
    return None if chosen is None else numbered_factors([float(place in chosen) for place in range(17)])


def canonical_block(name: str) -> str:
    """Return a block's name as this module writes it: upper case, two digits; M00 is MID."""
    found = re.fullmatch(r"([A-Z]+)(\d+)?", name.strip().upper())
    if found is None:
        return name
    group, number = found.groups()
    if number is None or group == "M":
        return MID if group == "M" else group
    return f"{group}{int(number):02}"


@dataclass(frozen=True, slots=True)
class ModelBlocks:
    """The blocks of one diffusion model.

    layers  layers of each block of a UNet; 0 for a transformer
    groups  list of modules -> name of its group, for a transformer
    names   of all blocks and groups, BASE included
    """

    layers: int
    groups: Mapping[str, str]
    names: frozenset[str]

    @staticmethod
    def of(parameters: Iterable[str]) -> ModelBlocks:
        """Return the blocks of a model with these parameters, which have diffusers' names."""
        known = list(parameters)
        resnets = {found[1] for name in known if (found := re.match(r"down_blocks\.0\.resnets\.(\d+)\.", name))}
        places = {(place[1], place[2]) for place in map(_LIST.match, known) if place}
        lists = Counter(found for found, _ in places)
        if {"transformer_blocks", "single_transformer_blocks"} <= lists.keys():
            groups = {"transformer_blocks": "D", "single_transformer_blocks": "S"}
        else:
            groups = {name: "B" for name, _ in lists.most_common(1)}
        blocks = ModelBlocks(len(resnets), {} if resnets else groups, frozenset())
        found_names = {blocks.block_of(name) for name in known}
        group_names = {re.sub(r"\d+$", "", name) for name in found_names}
        return ModelBlocks(blocks.layers, blocks.groups, frozenset((BASE, *found_names, *group_names)))

    def block_of(self, parameter: str) -> str:
        """Return the name of the block of a parameter; OTHER if it is in none."""
        if self.layers:
            return _unet_block(parameter, self.layers)
        place = _LIST.match(parameter)
        group = self.groups.get(place[1]) if place else None
        return OTHER if group is None or place is None else f"{group}{int(place[2]):02}"

    def check(self, factors: BlockFactors) -> None:
        """Raise UnusableField for a block that the model does not have."""
        for name, _ in factors:
            if name not in self.names:
                known = sorted(self.names)
                raise unusable_field(_FIELD, name, f"a block of the model: {', '.join(known)}")

    def factor(self, factors: Mapping[str, float], parameter: str) -> float:
        """Return the factor for a parameter of the diffusion model: its block's factor, else the group's."""
        block = self.block_of(parameter)
        return factors.get(block, factors.get(block.rstrip("0123456789"), 1.0))


_LIST = re.compile(r"(\w+)\.(\d+)\.")
_DOWN = re.compile(r"down_blocks\.(\d+)\.(resnets|attentions|downsamplers)\.(\d+)\.")
_UP = re.compile(r"up_blocks\.(\d+)\.(resnets|attentions|upsamplers)\.(\d+)\.")


def _unet_block(parameter: str, layers: int) -> str:
    """Return the block of a UNet's parameter. The original layout counts the first convolution, each layer and each
    downsampler as an input block; an upsampler belongs to the output block before it."""
    if parameter.startswith("conv_in."):
        return "IN00"
    if parameter.startswith("mid_block."):
        return MID
    if place := _DOWN.match(parameter):
        block, layer = int(place[1]), layers if place[2] == "downsamplers" else int(place[3])
        return f"IN{1 + block * (layers + 1) + layer:02}"
    if place := _UP.match(parameter):
        block, layer = int(place[1]), layers if place[2] == "upsamplers" else int(place[3])
        return f"OUT{block * (layers + 1) + layer:02}"
    return OTHER
