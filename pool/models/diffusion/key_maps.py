"""Converters from published names to those of diffusers' modules, shared with LoRA name discovery.

`pool.lora_names.discovered` has them for files of any size; here they are functions of tensors, as the architecture
rows need.
"""

from __future__ import annotations

from torch import Tensor

from modelpool.pool.lora_names.discovered import layout_map
from modelpool.pool.models.diffusion.architecture import Convert


def unchanged(*without: str) -> Convert:
    """Return a converter for models published under diffusers' names; it drops the tensors `without`."""
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key not in without}


def layout_converter(family: str, without: tuple[str, ...] = ()) -> Convert:
    """Return the converter of `family`, a name of `layout_map`; it drops the tensors `without`."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        read = {key: tensor for key, tensor in tensors.items() if key not in without}
        return layout_map(family, {key: tuple(tensor.shape) for key, tensor in read.items()}).load(read)

    return convert
