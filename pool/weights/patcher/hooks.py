"""Hooks of conditions as values: weight patches with a strength that follows keyframes, and transformer options.

Knows patches and options, not models; `pool.weights.patcher.hooked_run` puts them into effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from modelpool.pool.weights.options.transformer_options import TransformerOptions, merged
from modelpool.pool.weights.patcher.comfy_patches import with_wrappers_last
from modelpool.pool.weights.patcher.keyframes import HookKeyframes
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightPatch


@dataclass(frozen=True, slots=True)
class WeightHook:
    """Patches that are in force while the model predicts for the conditions that have this hook.

    strength  multiplied by each patch's strength and the keyframe's
    """

    patches: tuple[WeightPatch, ...]
    strength: float = 1.0
    keyframes: HookKeyframes = field(default_factory=HookKeyframes)

    def patches_at(self, strength: float) -> tuple[WeightPatch, ...]:
        """Return the patches at the keyframe strength `strength`; none if the product is 0."""
        product = self.strength * strength
        if product == 0.0:
            return ()
        if product == 1.0:
            return self.patches
        return tuple(replace(patch, strength=patch.strength * product) for patch in self.patches)


@dataclass(frozen=True, slots=True)
class HookGroup:
    """All hooks of one condition. Conditions with equal groups can be batched.

    hooks        in the order in which their patches are applied
    transformer  transformer options for this condition, in addition to the run's
    """

    hooks: tuple[WeightHook, ...] = ()
    transformer: TransformerOptions = field(default_factory=TransformerOptions)

    def with_hooks(self, hooks: Iterable[WeightHook]) -> HookGroup:
        """Return a copy with `hooks` appended, without duplicates."""
        added = list(self.hooks)
        for hook in hooks:
            if hook not in added:
                added.append(hook)
        return replace(self, hooks=tuple(added))

    def with_transformer_options(self, options: TransformerOptions) -> HookGroup:
        """Return a copy with `options` added; they override existing ones."""
        return replace(self, transformer=merged(self.transformer, options))

    def on(self, base: PatchSet, strengths: Sequence[float]) -> PatchSet:
        """Return `base` plus the patches of every hook at the keyframe strengths `strengths`.

        Weight wrappers of `base` stay after them.
        """
        patches = [p for hook, s in zip(self.hooks, strengths, strict=True) for p in hook.patches_at(s)]
        return with_wrappers_last(base, tuple(patches)) if patches else base

    def at_most(self, base: PatchSet) -> PatchSet:
        """Return `base` with every patch of the group: the upper bound of all steps, to plan memory with."""
        return with_wrappers_last(base, tuple(p for hook in self.hooks for p in hook.patches))
