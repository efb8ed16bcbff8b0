"""One run that changes weights between model calls, as the hooks of its conditions require.

Weights on the device are a function of (host weights, patch set); a hook only selects the patch set. So each change is
one `realize`, and the end of the run is another, with the patcher's patches. Does not decide about guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from modelpool.pool.weights.options.callbacks import CallbackPoint
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.run_context import current_run
from modelpool.pool.weights.options.transformer_options import TransformerOptions, merged, on_device
from modelpool.pool.weights.patcher.blocks.applied import applied
from modelpool.pool.weights.patcher.hooks import HookGroup, WeightHook
from modelpool.pool.weights.patcher.keyframes import KeyframePosition, SigmaAtPercent
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.patched_weight_cache import PatchedWeightCache
from modelpool.pool.weights.patcher.scheduled_patches import realize_cached
from modelpool.pool.weights.patches.patch_set import PatchSet


@contextmanager
def hooked_run(
    patcher: ModelPatcher, max_sigma: float, sigma_at: SigmaAtPercent, cache_bytes: int = 0
) -> Iterator[Callable[[object | None, float], None]]:
    """Yield `apply_hooks(group, sigma)`, which gives the weights the patches of `group` at noise level `sigma`.

    `group` is a HookGroup, or None for the weights with only the patcher's patches, which are realized when the run
    begins. Resident modules then stay resident. Enter it inside `patcher.running()`: a group's transformer options act
    until the next `apply_hooks`, in addition to the run's. `max_sigma` is the noise level of the first step,
    `sigma_at` defines where keyframes start. `cache_bytes` is device memory for weights that are likely to be needed
    again: 0 saves memory at the price of an upload for each change (ComfyUI's "min VRAM"), more saves time ("max
    speed"). The cache is dropped if the device runs out of memory. `HookMode.cache_bytes` computes how many there can
    be. On exit, whatever happened, the weights have only the patcher's patches again.
    """
    cache = PatchedWeightCache(cache_bytes) if cache_bytes else None
    run = _HookedRun(patcher, max_sigma, sigma_at, cache)
    run.restore()
    try:
        yield run.apply
    finally:
        try:
            run.restore()
        finally:
            if cache is not None:
                cache.clear()
            run.leave_options()


class _HookedRun:
    """The keyframe positions of all hooks, and the patch set in force."""

    def __init__(
        self, patcher: ModelPatcher, max_sigma: float, sigma_at: SigmaAtPercent, cache: PatchedWeightCache | None
    ) -> None:
        self._patcher, self._base, self._cache = patcher, patcher.patches, cache
        self._resident = patcher.resident_modules()
        self._max_sigma, self._sigma_at = max_sigma, sigma_at
        self._places: list[tuple[WeightHook, KeyframePosition]] = []
        #: the last group and strengths; None while the patches of the weights are unknown
        self._in_force: tuple[object | None, tuple[float, ...]] | None = None
        self._digest = ""
        #: undoes the transformer options of the group in force
        self._options = ExitStack()
        self._transformer = TransformerOptions()
        #: transformer options of groups: as passed, and on the device
        self._moved: list[tuple[TransformerOptions, TransformerOptions]] = []

    def apply(self, group: object | None, sigma: float) -> None:
        """See `hooked_run`. Does nothing while group and strengths are unchanged."""
        assert group is None or isinstance(group, HookGroup), f"hooks of a condition are {type(group).__name__}"
        strengths = () if group is None else tuple(self._strength(hook, sigma) for hook in group.hooks)
        before = self._in_force
        if before is not None and before[1] == strengths and (before[0] is group or before[0] == group):
            return
        self._enter_options(TransformerOptions() if group is None else group.transformer)
        patches = self._base if group is None else group.on(self._base, strengths)
        if self._switch(patches):
            self._patcher.state.callbacks.call(CallbackPoint.ON_APPLY_HOOKS, self._patcher, patches)
        self._in_force = (group, strengths)

    def restore(self) -> None:
        """Apply only the patcher's patches, as before and after the run."""
        self._switch(self._base)
        self._in_force = (None, ())

    def leave_options(self) -> None:
        """Remove the options of the group; the run's options remain."""
        self._options.close()
        self._transformer = TransformerOptions()

    def _enter_options(self, transformer: TransformerOptions) -> None:
        if transformer == self._transformer:
            return
        self.leave_options()
        if not transformer.is_empty or transformer.extra:
            run = current_run(self._patcher.module)
            of_run = ModelOptions() if run is None else run.options
            options = replace(of_run, transformer=merged(of_run.transformer, self._on_device(transformer)))
            self._options.enter_context(self._patcher.thawed())
            self._options.enter_context(applied(self._patcher.module, options))
        self._transformer = transformer

    def _on_device(self, transformer: TransformerOptions) -> TransformerOptions:
        """Return the options on the device; moved once per run, however often conditions alternate."""
        for original, moved in self._moved:
            if original is transformer:
                return moved
        moved = on_device(transformer, self._patcher.device)
        self._moved.append((transformer, moved))
        return moved

    def _switch(self, patches: PatchSet) -> bool:
        """Give the weights `patches`. Returns whether that needed a change."""
        if self._in_force is not None and patches.digest == self._digest:
            return False
        self._in_force = None
        realize_cached(self._patcher, WeightsTarget(self._resident, patches), self._cache)
        self._digest = patches.digest
        return True

    def _strength(self, hook: WeightHook, sigma: float) -> float:
        """Return the keyframe strength of `hook` at this step, the same for every condition that has it."""
        for number, (known, place) in enumerate(self._places):
            if known is hook or known == hook:
                moved = hook.keyframes.advance(place, sigma, self._max_sigma, self._sigma_at)
                self._places[number] = (known, moved)
                return hook.keyframes.strength_at(moved)
        first = hook.keyframes.advance(KeyframePosition(), sigma, self._max_sigma, self._sigma_at)
        self._places.append((hook, first))
        return hook.keyframes.strength_at(first)
