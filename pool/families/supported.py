"""List the families that run, and state why other recognised families do not. Torch-free."""

from __future__ import annotations

from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.families.unet_families import FAMILIES, VIDEO_UNETS

#: where people find the list, in the project
LIST = "docs/reference/families.md"


def running_families() -> dict[str, LocatedFamily]:
    """Return the families that run, by the name that recognition returns."""
    return {family.name: family for family in (*FAMILIES, *VIDEO_UNETS)} | dict(TRANSFORMERS)


def why_not(runs: str) -> str:
    """Return why a recognised family does not run; `runs` is the diffusers class of its architecture, empty for
    none."""
    if runs:
        return f"diffusers has its architecture ({runs}), but it is not integrated yet"
    return "no dependency has its architecture"
