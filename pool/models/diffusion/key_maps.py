"""From published names to those of diffusers' modules, by the converters that LoRA names are found with.

`pool.lora_names.discovered` has them for files of any size; here they are functions of tensors, as rows of
the table of architectures have them.
"""

from __future__ import annotations

from torch import Tensor

from modelpool.pool.lora_names.discovered import layout_map
from modelpool.pool.models.diffusion.architecture import Convert


def as_it_is(*without: str) -> Convert:
    """For models that are published under diffusers' own names; the tensors `without` are left out."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key not in without}


def through_layout(family: str, without: tuple[str, ...] = ()) -> Convert:
    """The converter of `family`, a name of `layout_map`; it leaves out the tensors `without`."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        read = {key: tensor for key, tensor in tensors.items() if key not in without}
        return layout_map(family, {key: tuple(tensor.shape) for key, tensor in read.items()}).load(read)

    return convert
