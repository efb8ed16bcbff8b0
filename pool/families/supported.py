"""Which of the families that are recognised run in this version, and why the others do not. Torch-free."""

from __future__ import annotations

from modelpool.pool.families.family import FAMILIES, Family
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.families.video_unet_families import VIDEO_UNETS

#: where people find the list, in the project
LIST = "docs/families.md"


def running_families() -> dict[str, Family]:
    """The families that this version runs, by the name that recognition gives."""
    return {family.name: family for family in (*FAMILIES, *VIDEO_UNETS)} | dict(TRANSFORMERS)


def why_not(runs: str) -> str:
    """Why a family is recognised and does not run; `runs` is the class of diffusers that has its architecture."""
    if runs:
        return f"diffusers has its architecture ({runs}), but it is not joined to the rest yet"
    return "nothing that this version depends on has its architecture"
