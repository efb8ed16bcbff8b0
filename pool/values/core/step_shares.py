"""Which steps a part of a run means, for fields that give its start and its end as shares of the steps.

The page docs/explanation/step_shares.md compares these rules with other programs' rules.
"""

from __future__ import annotations

#: a share such as 0.07 of 100 steps is not exactly a whole number
_TOLERANCE = 1e-6


def begins_within(step: int, steps: int, start: float, end: float) -> bool:
    """Return whether step number `step`, from 0, of `steps` begins in the part from `start` to `end`."""
    return start * steps - _TOLERANCE <= step < end * steps - _TOLERANCE


def lies_within(step: int, steps: int, start: float, end: float) -> bool:
    """Return whether it begins and ends there. Source: `controlnet_keep` of diffusers' pipelines, with its numbers
    compared as they are."""
    return not (step / steps < start or (step + 1) / steps > end)
