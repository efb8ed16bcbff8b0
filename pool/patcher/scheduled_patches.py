"""One run whose patches change over its steps, such as LoRAs that act in a part of the schedule.

The patch set of a step is a function of the step alone, so a run that resumes at a step has the weights that it would
have had there. Hooks of conditions, whose patches also depend on the condition, are in `pool.patcher.hooked_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from modelpool.pool.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.patches.patch_set import PatchSet

#: (steps of the complete schedule that are done) -> the patches of the next step
PatchesAtStep: TypeAlias = Callable[[int], PatchSet]


@contextmanager
def scheduled_patches(patcher: ModelPatcher, patches_at: PatchesAtStep | None) -> Iterator[Callable[[int], None]]:
    """Yield `change(steps_done)`, which gives the weights the patches of the next step; does nothing for None.

    Enter it inside `patcher.running()`. What is resident stays resident; only weights whose patches differ move. On
    exit, the patcher has its own patches again; the weights keep those of the last step until somebody needs others.
    """
    if patches_at is None:
        yield lambda step: None
        return
    own = patcher.patches
    at: int | None = None

    def change(step: int) -> None:
        nonlocal at
        if step == at:
            return
        patches = patches_at(step)
        if patches.digest != patcher.patches.digest:
            patcher.realize(WeightsTarget(patcher.resident_modules(), patches))
        at = step

    try:
        yield change
    finally:
        patcher.patches = own
