"""One run whose weights change between model calls, as the hooks of its conditions say.

Weights on the device are a function of (host weights, patch set); a hook only says which patch set. So each change is
one `realize`, and the end of the run is one more, with the patcher's own patches. Decides nothing about guidance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from modelpool.pool.options.callbacks import CallbackPoint
from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.options.run_context import current_run
from modelpool.pool.options.transformer_options import TransformerOptions, merged, on_device
from modelpool.pool.patcher.blocks.applied import applied
from modelpool.pool.patcher.hooks import HookGroup, WeightHook
from modelpool.pool.patcher.keyframes import KeyframePlace, SigmaAtPercent
from modelpool.pool.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.patcher.patched_weight_cache import PatchedShelf
from modelpool.pool.patches.patch_set import PatchSet


@contextmanager
def hooked_run(
    patcher: ModelPatcher, max_sigma: float, sigma_at: SigmaAtPercent, shelf_bytes: int = 0
) -> Iterator[Callable[[object | None, float], None]]:
    """Yields `apply_hooks(group, sigma)`, which gives the weights what `group` wants at noise level `sigma`.

    `group` is a HookGroup, or None for the plain weights: those with the patcher's own patches, which are realized when
    the run begins. What is resident then stays resident. Enter it inside `patcher.running()`: a group's transformer
    options act until the next `apply_hooks`, beside those of the run.
    `max_sigma` is the noise level of the first step, `sigma_at` says where keyframes start.
    `shelf_bytes` is for weights that are likely to be wanted again, on the device: 0 saves memory at the price of an
    upload for each change (ComfyUI's "min VRAM"), more saves time ("max speed"). Given up when the device runs out.
    `HookMode.shelf_bytes` says how many there can be.
    After the block, whatever happened in it, the weights carry the patcher's own patches again.
    """
    shelf = PatchedShelf(shelf_bytes) if shelf_bytes else None
    run = _HookedRun(patcher, max_sigma, sigma_at, shelf)
    run.restore()
    try:
        yield run.apply
    finally:
        try:
            run.restore()
        finally:
            if shelf is not None:
                shelf.clear()
            run.leave_options()


class _HookedRun:
    """The places of all hooks among their keyframes, and the patch set in force."""

    def __init__(
        self, patcher: ModelPatcher, max_sigma: float, sigma_at: SigmaAtPercent, shelf: PatchedShelf | None
    ) -> None:
        self._patcher, self._base, self._shelf = patcher, patcher.patches, shelf
        self._resident = patcher.resident_modules()
        self._max_sigma, self._sigma_at = max_sigma, sigma_at
        self._places: list[tuple[WeightHook, KeyframePlace]] = []
        #: group and strengths that were asked for last; None while it is not known what the weights carry
        self._in_force: tuple[object | None, tuple[float, ...]] | None = None
        self._digest = ""
        #: what undoes the transformer options of the group in force
        self._options = ExitStack()
        self._transformer = TransformerOptions()
        #: transformer options of groups, as they are given and on the device
        self._moved: list[tuple[TransformerOptions, TransformerOptions]] = []

    def apply(self, group: object | None, sigma: float) -> None:
        """See `hooked_run`. Nothing is done, or looked up, while group and strengths stay what they are."""
        assert group is None or isinstance(group, HookGroup), f"hooks of a condition are {type(group).__name__}"
        strengths = () if group is None else tuple(self._strength(hook, sigma) for hook in group.hooks)
        before = self._in_force
        if before is not None and before[1] == strengths and (before[0] is group or before[0] == group):
            return
        self._enter_options(TransformerOptions() if group is None else group.transformer)
        patches = self._base if group is None else group.on(self._base, strengths)
        if self._switch(patches):
            self._patcher.extras.callbacks.call(CallbackPoint.ON_APPLY_HOOKS, self._patcher, patches)
        self._in_force = (group, strengths)

    def restore(self) -> None:
        """The patcher's own patches, as the run finds them and leaves them."""
        self._switch(self._base)
        self._in_force = (None, ())

    def leave_options(self) -> None:
        """The options of the run alone."""
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
            self._options.enter_context(applied(self._patcher.module, options))
        self._transformer = transformer

    def _on_device(self, transformer: TransformerOptions) -> TransformerOptions:
        """Moved once in a run, however often conditions take turns."""
        for given, there in self._moved:
            if given is transformer:
                return there
        there = on_device(transformer, self._patcher.device)
        self._moved.append((transformer, there))
        return there

    def _switch(self, patches: PatchSet) -> bool:
        """The weights with `patches`. Whether something had to be done for it."""
        if self._in_force is not None and patches.digest == self._digest:
            return False
        self._in_force = None
        target = WeightsTarget(self._resident, patches)
        try:
            self._patcher.realize(target, self._shelf)
        except torch.OutOfMemoryError:
            if self._shelf is None or not self._shelf.held_bytes:
                raise
            self._shelf.clear()
            self._patcher.realize(target, self._shelf)
        self._digest = patches.digest
        return True

    def _strength(self, hook: WeightHook, sigma: float) -> float:
        """The keyframe's strength of `hook` at this step, the same for every condition that has it."""
        for number, (known, place) in enumerate(self._places):
            if known is hook or known == hook:
                moved = hook.keyframes.advance(place, sigma, self._max_sigma, self._sigma_at)
                self._places[number] = (known, moved)
                return hook.keyframes.strength_at(moved)
        first = hook.keyframes.advance(KeyframePlace(), sigma, self._max_sigma, self._sigma_at)
        self._places.append((hook, first))
        return hook.keyframes.strength_at(first)
