"""The table of all diffusion models that this package builds, by the names that recognition returns."""

from __future__ import annotations

from collections.abc import Mapping

import diffusers

from modelpool.pool.families.definitions import defined_families, defined_unets
from modelpool.pool.families.parts.definition import FamilyDefinition
from modelpool.pool.families.parts.unet_definition import ModelBuild
from modelpool.pool.models.components.diffusion.adapted_modules import ADAPTED
from modelpool.pool.models.components.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.components.diffusion.key_maps import converter_of


def _defined(family: FamilyDefinition | ModelBuild) -> DiffusionArchitecture:
    module = ADAPTED.get(family.module) or getattr(diffusers, family.module)
    call = (module, family.config, converter_of(family.convert), family.forward)
    if isinstance(family, FamilyDefinition):
        return DiffusionArchitecture(*call, family.prepare, family.seconds_model)
    return DiffusionArchitecture(*call)


ARCHITECTURES: Mapping[str, DiffusionArchitecture] = {
    **{unet.name: _defined(unet.build) for unet in defined_unets() if unet.build is not None},
    **{family.name: _defined(family) for family in defined_families()},
}
