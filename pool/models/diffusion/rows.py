"""The table of all buildable diffusion models, by the names that recognition returns."""

from __future__ import annotations

from collections.abc import Mapping

import diffusers

from modelpool.pool.families.modules import defined_families
from modelpool.pool.families.parts.definition import FamilyDefinition
from modelpool.pool.models.diffusion.adapted_modules import ADAPTED
from modelpool.pool.models.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.diffusion.cascade_model import CASCADE_ROWS
from modelpool.pool.models.diffusion.image_rows import IMAGE_ROWS
from modelpool.pool.models.diffusion.key_maps import converter_of
from modelpool.pool.models.diffusion.unet_rows import UNET_ROWS


def _defined(family: FamilyDefinition) -> DiffusionArchitecture:
    module = ADAPTED.get(family.module) or getattr(diffusers, family.module)
    return DiffusionArchitecture(module, family.config, converter_of(family.convert), family.forward)


ARCHITECTURES: Mapping[str, DiffusionArchitecture] = {
    **IMAGE_ROWS,
    **CASCADE_ROWS,
    **UNET_ROWS,
    **{family.name: _defined(family) for family in defined_families()},
}
