"""One run whose patches change between model calls: over its steps, such as LoRAs that act in a part of the schedule,
and from text to text, such as LoRAs of one region.

The patch set of a call is a function of the step and of the texts alone, so a run that resumes at a step has the
weights that it would have had there. Hooks of conditions that a program composes, whose keyframes count noise levels,
are in `pool.patcher.hooked_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from modelpool.pool.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.patches.patch_set import PatchSet

#: (steps of the complete schedule that are done, hooks of the texts or None) -> the patches of the next call
PatchesAtStep: TypeAlias = Callable[[int, object | None], PatchSet]


class ScheduledPatches:
    """The patches of one run. With `patches_at` None they never change."""

    def __init__(self, patcher: ModelPatcher, patches_at: PatchesAtStep | None) -> None:
        self._patcher, self._patches_at = patcher, patches_at
        self._hooks: object | None = None
        self._at: tuple[int, object | None] | None = None

    def begin_texts(self, hooks: object | None, sigma: float) -> None:
        """Make the next calls those for texts with these hooks (`pool.conditioning.conditions.ApplyHooks`)."""
        self._hooks = hooks

    def begin_call(self, step: int) -> None:
        """Give the weights the patches of a call in the step after `step` steps."""
        if self._patches_at is None or self._at == (step, self._hooks):
            return
        patches = self._patches_at(step, self._hooks)
        if patches.digest != self._patcher.patches.digest:
            self._patcher.realize(WeightsTarget(self._patcher.resident_modules(), patches))
        self._at = (step, self._hooks)


@contextmanager
def scheduled_patches(patcher: ModelPatcher, patches_at: PatchesAtStep | None) -> Iterator[ScheduledPatches]:
    """Yield the patches of a run, which does nothing for None.

    Enter it inside `patcher.running()`. What is resident stays resident; only weights whose patches differ move. On
    exit, the patcher has its own patches again; the weights keep those of the last call until somebody needs others.
    """
    own = patcher.patches
    try:
        yield ScheduledPatches(patcher, patches_at)
    finally:
        if patches_at is not None:
            patcher.patches = own
