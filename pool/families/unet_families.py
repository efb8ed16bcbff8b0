"""The families of UNets and of Stable Cascade that run, from their modules. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from modelpool.pool.families.definitions import defined_unets
from modelpool.pool.families.detection.layouts.unet_layouts import CASCADE, LDM_UNET
from modelpool.pool.families.parts.family import Family
from modelpool.pool.families.parts.unet_definition import UNetDefinition

#: by the name that recognition returns
UNETS: Mapping[str, UNetDefinition] = MappingProxyType({each.name: each for each in defined_unets()})

_LDM = tuple(each.family for each in defined_unets() if each.layout is LDM_UNET)
#: the UNets that read text
FAMILIES: tuple[Family, ...] = tuple(family for family in _LDM if family.text_encoders)
#: those that read an image alone
VIDEO_UNETS: tuple[Family, ...] = tuple(family for family in _LDM if not family.text_encoders)
#: the stages of Stable Cascade, by name
CASCADES: Mapping[str, Family] = MappingProxyType(
    {each.name: each.family for each in defined_unets() if each.layout is CASCADE}
)
