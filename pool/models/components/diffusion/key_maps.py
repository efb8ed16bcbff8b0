"""Converters from published names to names of diffusers' modules, shared with LoRA name discovery.

`pool.models.lora_names.discovered` has them for files of any size; here they are functions of tensors, as the
architecture rows need.
"""

from __future__ import annotations

from torch import Tensor

from modelpool.pool.families.parts.forward import Convert
from modelpool.pool.families.parts.layout_names import LayoutNames
from modelpool.pool.models.lora_names.discovered import layout_map


def converter_of(convert: Convert | str | LayoutNames) -> Convert:
    """Return the converter of a family's definition as a function."""
    if isinstance(convert, str):
        return layout_converter(convert)
    if not isinstance(convert, LayoutNames):
        return convert
    names, of_layout = convert, layout_converter(convert.layout)

    def with_exceptions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        read = {key: tensor for key, tensor in tensors.items() if not key.startswith(names.without)}
        return {names.renamed.get(key, key): tensor for key, tensor in of_layout(read).items()}

    return with_exceptions


def layout_converter(family: str) -> Convert:
    """Return the converter of `family`, a name of `layout_map`."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return layout_map(family, {key: tuple(tensor.shape) for key, tensor in tensors.items()}).load(tensors)

    return convert
