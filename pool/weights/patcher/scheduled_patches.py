"""One run that changes patches between model calls: over its steps, such as LoRAs that act in a part of the schedule,
and from text to text, such as LoRAs of one region.

The patch set of a call is a function of the step and of the texts alone, so a run that resumes at a step has the
weights that it would have had there. Hooks of conditions that a program composes, with keyframes by noise level,
are in `pool.weights.patcher.hooked_run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch

from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.patched_weight_cache import PatchedWeightCache
from modelpool.pool.weights.patches.patch_set import PatchSet

#: (steps of the complete schedule that are done, hooks of the texts or None) -> the patches of the next call
PatchesAtStep: TypeAlias = Callable[[int, object | None], PatchSet]


class ScheduledPatches:
    """The patches of one run of `patcher`.

    Resident modules stay resident; only weights with other patches move. `cache_bytes` of the device are for weights
    with the patches of other texts, which the next step needs again; they are given up if the device runs out of
    memory.
    """

    def __init__(self, patcher: ModelPatcher, patches_at: PatchesAtStep, cache_bytes: int = 0) -> None:
        self._patcher, self._patches_at = patcher, patches_at
        self._cache = PatchedWeightCache(cache_bytes) if cache_bytes else None
        self._hooks: object | None = None
        self._at: tuple[int, object | None] | None = None

    def begin_texts(self, hooks: object | None, sigma: float) -> None:
        """Make the next calls those for texts with these hooks
        (`pool.inference.conditioning.conditions.ApplyHooks`)."""
        self._hooks = hooks

    def begin_call(self, step: int) -> None:
        """Give the weights the patches of a call in the step after `step` steps."""
        if self._at == (step, self._hooks):
            return
        patches = self._patches_at(step, self._hooks)
        if patches.digest != self._patcher.patches.digest:
            realize_cached(self._patcher, WeightsTarget(self._patcher.resident_modules(), patches), self._cache)
        self._at = (step, self._hooks)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the patcher its own patches again after the block, and free the cache; the weights keep the patches of
        the last call until another run needs others. Enter it inside `patcher.running()`."""
        own = self._patcher.patches
        try:
            yield
        finally:
            self._patcher.patches = own
            if self._cache is not None:
                self._cache.clear()


def realize_cached(patcher: ModelPatcher, target: WeightsTarget, cache: PatchedWeightCache | None) -> None:
    """Bring `patcher` to `target` with the weights that are in `cache`. If the device runs out of memory, the cache is
    dropped first."""
    try:
        patcher.realize(target, cache)
    except torch.OutOfMemoryError:
        if cache is None or not cache.held_bytes:
            raise
        cache.clear()
        patcher.realize(target, cache)
