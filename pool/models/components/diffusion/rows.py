"""The table of all diffusion models that this package builds, by the names that recognition returns."""

from __future__ import annotations

from collections.abc import Mapping

from modelpool.pool.families.definitions import defined_families, defined_unets
from modelpool.pool.families.parts.definition import ModelBuild
from modelpool.pool.models.components.common.library_names import of_library
from modelpool.pool.models.components.diffusion.adapted_modules import ADAPTED
from modelpool.pool.models.components.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.components.diffusion.key_maps import converter_of


def _built(build: ModelBuild) -> DiffusionArchitecture:
    module = ADAPTED.get(build.module) or of_library("diffusers", build.module)
    convert = converter_of(build.convert)
    return DiffusionArchitecture(module, build.config, convert, build.forward, build.prepare, build.seconds_model)


ARCHITECTURES: Mapping[str, DiffusionArchitecture] = {
    **{unet.name: _built(unet.build) for unet in defined_unets() if unet.build is not None},
    **{family.name: _built(family.build) for family in defined_families()},
}
