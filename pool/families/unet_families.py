"""The families of UNets and of Stable Cascade that run, from their modules. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from modelpool.pool.families.definitions import defined_unets
from modelpool.pool.families.detection.layouts.unet_layouts import CASCADE, LDM_UNET
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.parts.unet_definition import FolderMark, UNetDefinition

#: by the name that recognition returns
UNETS: Mapping[str, UNetDefinition] = MappingProxyType({each.name: each for each in defined_unets()})

#: those with folders that another family is recognised in
_MARKED = tuple((each, each.folder_mark) for each in defined_unets() if each.folder_mark is not None)
_LDM = tuple(each.family for each in defined_unets() if each.detect.layout is LDM_UNET)
#: the UNets that read text
FAMILIES: tuple[LocatedFamily, ...] = tuple(family for family in _LDM if family.text_encoders)
#: those that read an image alone
VIDEO_UNETS: tuple[LocatedFamily, ...] = tuple(family for family in _LDM if not family.text_encoders)
#: the stages of Stable Cascade, by name
CASCADES: Mapping[str, LocatedFamily] = MappingProxyType(
    {each.name: each.family for each in defined_unets() if each.detect.layout is CASCADE}
)


def folder_unet(name: str, folders: Collection[str], index: Mapping[str, Any]) -> LocatedFamily | None:
    """Return the family of the UNet of a diffusers folder that is recognised as `name`; None for no family that reads
    text or views.

    `folders` are the folders of its components, `index` is the content of its index file.
    """

    def is_marked(mark: FolderMark) -> bool:
        if mark.recognised_as != name or mark.edm:
            return False
        is_other = mark.folder not in ("", *folders) or mark.lacks in folders
        return not is_other and (not mark.entry or index.get(mark.entry) is True)

    marked = next((each.family for each, mark in _MARKED if is_marked(mark)), None)
    return marked or next((family for family in FAMILIES if family.name == name), None)


def edm_relative(name: str) -> LocatedFamily | None:
    """Return the family that folders of the family `name` have if their scheduler has the noise of EDM and the model
    predicts noise; None if there is none."""
    return next((each.family for each, mark in _MARKED if mark.edm and mark.recognised_as == name), None)


def look_alike(name: str) -> LocatedFamily | None:
    """Return the family with the shapes of the family `name` at unpublished sizes; None if there is none."""
    unet = UNETS.get(name)
    return UNETS[unet.looks_like].family if unet is not None and unet.looks_like else None


def labels_width(family: LocatedFamily) -> int:
    """Return the width of the image embedding in the class labels of a UNet that varies images. Raises KeyError for
    another family."""
    width = UNETS[family.name].labels_width
    if not width:
        raise KeyError(family.name)
    return width
