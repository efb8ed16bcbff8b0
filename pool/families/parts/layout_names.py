"""`LayoutNames`: the published names of a layout, and how a converter makes diffusers' names of them. Torch-free to
import.

`pool.models.lora_names.discovered` traces the converters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from modelpool.pool.families.parts.forward import Convert, Shapes
from modelpool.pool.values.core.errors import UnknownArchitecture

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FixedCuts:
    """A converter of diffusers that cuts tensors at the rows of the published model, whatever their size.

    keys       the tensors, as a pattern that is searched in the key
    published  end row of each piece, as the converter cuts
    actual     the same for a tensor of a given key in a model of given shapes
    """

    keys: re.Pattern[str]
    published: tuple[int, ...]
    actual: Callable[[Shapes, str], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class LayoutNames:
    """The published names of a layout. Families that share it have an equal value, except for `without` and `renamed`.

    layout      its name in `pool.models.lora_names.discovered`
    without     beginnings of the names of published tensors that the module does not have
    renamed     parameters that the converter leaves under their published names -> the module's names
    converter   the converter, if diffusers has none
    like        another layout with the same names: its converter is used, with `prefixes`: beginnings of its names in
                diffusers, and of this layout's
    cuts        tensors that the converter cuts at fixed rows
    older       the name by which the converter knows a key, if files use newer ones too
    """

    layout: str
    without: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    converter: Convert | None = None
    like: str = ""
    prefixes: tuple[tuple[str, str], ...] = ()
    cuts: FixedCuts | None = None
    older: Callable[[str], str] = str


def width_of(shapes: Shapes, key: str) -> int:
    """Return the rows of the tensor `key`. Raises UnknownArchitecture if there is none."""
    if key not in shapes:
        raise UnknownArchitecture(f"found no {key}, expected it, as it determines the width of the model")
    return shapes[key][0]


def scale_of_norm(name: str) -> str:
    """Return the name of a norm's weight as converters for Flux know it: newer files name a scale weight."""
    is_norm = name.endswith((".query_norm.weight", ".key_norm.weight"))
    return name.removesuffix("weight") + "scale" if is_norm else name


#: queries, keys, values and the hidden layer of Flux's single blocks, which are one tensor
_SINGLE_BLOCKS = re.compile(r"^single_blocks\.\d+\.linear1\.(weight|bias)$")


def single_block_cuts(width_key: str) -> FixedCuts:
    """Return the cuts of Flux's single blocks, for a model that is as wide as `width_key` has rows."""

    def actual(shapes: Shapes, key: str) -> tuple[int, ...]:
        hidden = width_of(shapes, width_key)
        return hidden, 2 * hidden, 3 * hidden, shapes[key][0]

    return FixedCuts(_SINGLE_BLOCKS, (3072, 6144, 9216, 21504), actual)


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """A transformer with numbered `blocks`, in the names of the original and of diffusers: a converter for a layout
    that diffusers builds and does not convert. It only renames and cuts tensors, so that
    `pool.weights.keymaps.key_map` can trace it. Source of the tables: the public key lists of the original and of the
    diffusers checkpoints of the same weights.

    outer    key prefixes outside of blocks; other keys are left out
    swapped  prefixes in `outer` of modules with swapped halves: the original has shift before scale
    blocks   diffusers' name of the list of blocks
    block    modules of a block; one with several names is cut into equal parts. Others keep their names.
    """

    outer: tuple[tuple[str, str], ...]
    swapped: tuple[str, ...]
    blocks: str
    block: Mapping[str, tuple[str, ...]]

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of an original checkpoint under diffusers' names."""
        import torch

        converted: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            block = re.fullmatch(r"blocks\.(\d+)\.(.+)", key)
            if block is not None:
                converted |= self._of_block(f"{self.blocks}.{block[1]}.", block[2], tensor)
                continue
            for old, new in self.outer:
                if key.startswith(old):
                    value = torch.cat(tensor.chunk(2)[::-1]) if old in self.swapped else tensor
                    converted[new + key.removeprefix(old)] = value
        return converted

    def _of_block(self, prefix: str, key: str, tensor: Tensor) -> dict[str, Tensor]:
        module, _, end = key.rpartition(".")
        if module not in self.block:
            return {prefix + key: tensor}
        names = self.block[module]
        pieces = tensor.chunk(len(names)) if len(names) > 1 else (tensor,)
        return {f"{prefix}{name}.{end}": piece for name, piece in zip(names, pieces, strict=True)}
