"""The table of all diffusion models that this package builds, by the names that recognition returns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from modelpool.pool.families.definitions import defined_families, defined_unets
from modelpool.pool.families.parts.family import ModelBuild
from modelpool.pool.families.parts.forward import Convert
from modelpool.pool.families.parts.layout_names import LayoutNames
from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.models.components.diffusion.adapted_modules import ADAPTED
from modelpool.pool.models.components.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.lora_names.discovered import layout_map


def _converter_of(convert: Convert | str | LayoutNames) -> Convert:
    """Return the converter of a family's definition as a function."""
    if isinstance(convert, str):
        return _layout_converter(convert)
    if not isinstance(convert, LayoutNames):
        return convert
    names, of_layout = convert, _layout_converter(convert.layout)

    def with_exceptions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        read = {key: tensor for key, tensor in tensors.items() if not key.startswith(names.without)}
        return {names.renamed.get(key, key): tensor for key, tensor in of_layout(read).items()}

    return with_exceptions


def _layout_converter(family: str) -> Convert:
    """Return the converter of `family`, a name of `layout_map`."""

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return layout_map(family, {key: tuple(tensor.shape) for key, tensor in tensors.items()}).load(tensors)

    return convert


def _built(build: ModelBuild) -> DiffusionArchitecture:
    module = ADAPTED.get(build.module) or of_library("diffusers", build.module)
    convert = _converter_of(build.convert)
    return DiffusionArchitecture(
        module, build.config, convert, build.forward, build.prepare, build.seconds_model, build.lengths
    )


ARCHITECTURES: Mapping[str, DiffusionArchitecture] = {
    **{unet.name: _built(unet.build) for unet in defined_unets() if unet.build is not None},
    **{family.name: _built(family.build) for family in defined_families()},
}
