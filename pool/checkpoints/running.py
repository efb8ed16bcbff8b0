"""Which of the families that are recognised run in this version, and why the others do not. Torch-free."""

from __future__ import annotations

from pool.checkpoints.families import FAMILIES, Family
from pool.checkpoints.transformers import TRANSFORMERS

#: where people find the list, in the project
LIST = "docs/families.md"


def running_families() -> dict[str, Family]:
    """The families that this version runs, by the name that recognition gives."""
    return {family.name: family for family in FAMILIES} | dict(TRANSFORMERS)


#: families that read a picture through a vision encoder beside its latent (CLIP's, or that of their LLaVA)
_NEED_VISION = frozenset({"wan21_i2v", "wan21_flf2v", "hunyuan_video_i2v"})


def why_not(runs: str, name: str = "") -> str:
    """Why the family `name` is recognised and does not run; `runs` is the class of diffusers that has its
    architecture."""
    if name in _NEED_VISION:
        return "it reads a picture through a vision encoder too, and those are not run yet"
    if runs:
        return f"diffusers has its architecture ({runs}), but it is not joined to the rest yet"
    return "nothing that this version depends on has its architecture"
