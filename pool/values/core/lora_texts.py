"""Names of the texts of a sampling run, for LoRAs that act only while the model predicts for some of them.

Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

#: the prompt, and the negative prompt
PROMPT, NEGATIVE = "prompt", "negative"
#: the prompts of all regions; of the region with this number, from 0
REGIONS = "regions"
#: the prompt and the prompts of all regions
POSITIVE = "positive"
EXPECTED = f"{POSITIVE}, {NEGATIVE}, {PROMPT}, {REGIONS}, or a region by its number, such as region0"

_REGION = re.compile(r"region(0|[1-9]\d{0,3})")


def region_text(number: int) -> str:
    """Return the name of the prompt of a region."""
    return f"region{number}"


def is_text_name(name: str) -> bool:
    """Whether `name` names texts of a run."""
    return name in (PROMPT, NEGATIVE, REGIONS, POSITIVE) or _REGION.fullmatch(name) is not None


def acts_for(only: Iterable[str], text: str) -> bool:
    """Whether a LoRA with this `only` acts for the text of this name; with nothing, it acts for all."""
    names = frozenset(only)
    if not names or text in names:
        return True
    if text != NEGATIVE and POSITIVE in names:
        return True
    return REGIONS in names and _REGION.fullmatch(text) is not None


def texts_of_run(reads_negative: bool, regions: int) -> tuple[str, ...]:
    """Return the names of the texts of a run, in the order in which it reads them."""
    return (PROMPT, *((NEGATIVE,) if reads_negative else ()), *(region_text(number) for number in range(regions)))
