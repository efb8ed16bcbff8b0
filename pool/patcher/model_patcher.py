"""`ModelPatcher`: one component with one patch set, and what its runs are told.

Clones share the weights and own a patch set; cloning is O(1). What a clone wants becomes so when it is realized
(`pool.patcher.shared_weights`). Does not decide what should be resident (`pool.plan.residency`), nor when
(`pool.vram.vram_manager`). docs/patcher.md says what each method of ComfyUI's ModelPatcher is called here.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from modelpool.pool.options.callbacks import CallbackPoint
from modelpool.pool.options.model_options import ModelOptions
from modelpool.pool.patcher.comfy_patches import KeyedPatches, patches_from, with_wrappers_last
from modelpool.pool.patcher.compute_context import ComputeTools
from modelpool.pool.patcher.patched_weight_cache import PatchedShelf
from modelpool.pool.patcher.patcher_state import PatcherExtras
from modelpool.pool.patcher.shared_weights import RealizeReport, SharedWeights, WeightsTarget
from modelpool.pool.patcher.weight_bytes import component_use
from modelpool.pool.patcher.weight_form import WeightForm
from modelpool.pool.patches.full_weights import PatchedWeight
from modelpool.pool.patches.patch_set import PatchSet, WeightPatch
from modelpool.pool.plan.residency import ModuleBytes, Resident
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role

__all__ = ["ModelPatcher", "RealizeReport", "WeightsTarget", "realizing"]


class ModelPatcher:
    """One component with one patch set. Build with `ModelPatcher.of`, vary with `clone` and `add_patches`.

    patches  what `realize` is to be asked for, weight wrappers last
    extras   options, callbacks, injections and the like; assign a changed value:
             `patcher.extras = patcher.extras.with_object_patch(...)`
    """

    def __init__(self, weights: SharedWeights, patches: PatchSet, extras: PatcherExtras | None = None) -> None:
        self._weights = weights
        self.patches = patches
        self.extras = extras or PatcherExtras()

    @classmethod
    def of(
        cls,
        key: ComponentKey,
        role: Role,
        module: nn.Module,
        device: torch.device,
        form: WeightForm,
        tools: ComputeTools | None = None,
        usual_call: Callable[[nn.Module], object] | None = None,
    ) -> ModelPatcher:
        """A patcher over `module`, whose parameters are host tensors that nobody writes from now on.

        Gives every instance in `module` its casting class. Moves nothing. `usual_call` calls the module with inputs of
        a usual size that it makes on the meta device: it tells how much work each module has (`worked_modules`).
        """
        return cls(SharedWeights(key, role, module, device, form, tools, usual_call), PatchSet())

    @property
    def key(self) -> ComponentKey:
        """Which component this is."""
        return self._weights.key

    @property
    def module(self) -> nn.Module:
        """The module to call inside `running()`."""
        return self._weights.module

    @property
    def device(self) -> torch.device:
        """Where runs compute."""
        return self._weights.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """What runs compute in."""
        return self._weights.form.compute_dtype

    @property
    def model_options(self) -> ModelOptions:
        """What runs of this patcher are told."""
        return self.extras.options

    def clone(self) -> ModelPatcher:
        """A patcher that shares the weights and starts from the same patch set and extras. O(1) in both.

        Additional models are cloned with it, attachments that ask for it too.
        """
        return self._clone({})

    def _clone(self, made: dict[int, ModelPatcher]) -> ModelPatcher:
        """The clone, or the one that was `made` already: additional models may name each other in a circle."""
        if id(self) not in made:
            twin = made[id(self)] = ModelPatcher(self._weights, self.patches, self.extras)
            twin.extras = self.extras.cloned(lambda patcher: patcher._clone(made))
            self.extras.callbacks.call(CallbackPoint.ON_CLONE, self, twin)
        return made[id(self)]

    def is_clone(self, other: ModelPatcher) -> bool:
        """Both run the same module."""
        return self._weights is other._weights

    def clone_has_same_weights(self, other: ModelPatcher) -> bool:
        """Both run the same module with equal patches."""
        return self.is_clone(other) and self.patches.digest == other.patches.digest

    def add_patches(
        self,
        patches: Iterable[WeightPatch] | KeyedPatches,
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
        identity: str | None = None,
    ) -> tuple[str, ...]:
        """Apply `patches` after the ones there, from the next `realize` on. Other clones are not affected.

        Either ready patches, which are taken as they are, or ComfyUI's form: key, (key, offset) or (key, offset,
        function) -> value. Of these the ones whose key is a parameter are taken, with both strengths; `identity` names
        the values for digests, and without it no other call's are ever taken for equal. Weight wrappers
        (`pool.patcher.comfy_patches.weight_wrapper`) stay behind all other patches, also those that are added later.
        Returns the parameters that got a patch, in order. Raises PatchFailed, and adds nothing, for a value of no known
        kind and for a patch that fits no parameter.
        """
        if isinstance(patches, Mapping):
            hosts = self._weights.host_parameters
            patches = patches_from(patches, hosts, strength_patch, strength_model, identity)
        added = tuple(patches)
        together = with_wrappers_last(self.patches, added)
        self._weights.check(together)
        self.patches = together
        return tuple(dict.fromkeys(patch.parameter for patch in added))

    def get_key_patches(self, prefix: str = "") -> dict[str, PatchedWeight]:
        """Each parameter whose name begins with `prefix`: its host weight with its patches, ready to be a patch's value
        elsewhere, which is what merging models is made of."""
        return {
            name: PatchedWeight(host, self.patches.patches_for(name))
            for name, host in self._weights.host_parameters.items()
            if name.startswith(prefix)
        }

    def spec(self) -> ComponentSpec:
        """The component's sizes."""
        return self._weights.spec

    def use(self, passes: int = 1) -> ComponentUse:
        """What a run with this patch set needs. Sizes are those of the host weights, resident or not."""
        w = self._weights
        return component_use(w.key, w.owned.values(), w.form, self.patches, passes)

    def modules(self) -> tuple[ModuleBytes, ...]:
        """The sizes of every module with weights of its own."""
        return tuple(self._weights.sizes.values())

    @property
    def worked_modules(self) -> tuple[ModuleBytes, ...]:
        """The same with the work of each, in the order in which a pass uses them. Counted when first asked for; without
        a usual call it is as `modules`."""
        return self._weights.worked_sizes

    def resident_modules(self) -> frozenset[str]:
        """Names of the modules that are on the device now."""
        return self._weights.resident_modules

    def resident(self) -> Resident:
        """What is on the device now, with the patch set it was realized with (not necessarily this clone's)."""
        return self._weights.resident()

    def realize(self, target: WeightsTarget, shelf: PatchedShelf | None = None) -> RealizeReport:
        """Bring the module to `target`, moving the difference only: first what leaves, then what arrives. Its patches
        are this clone's from then on.

        What leaves goes on `shelf`, if there is one, and what is found there need not be computed and moved again.
        When something raises (out of memory, say) what arrived leaves again, what left stays away, and `resident()`
        tells the truth; call again with a target to go on.
        """
        report = self._weights.realize(target, shelf)
        self.patches = target.patches
        return self._told(report)

    def shrink(self, kept: frozenset[str]) -> RealizeReport:
        """Keep only these modules on the device, with the patches they carry."""
        return self._told(self._weights.shrink(kept))

    def unload(self) -> RealizeReport:
        """Take every byte off the device."""
        return self._told(self._weights.unload())

    @contextmanager
    def running(
        self, interrupt: Callable[[], None] | None = None, options: ModelOptions | None = None
    ) -> Iterator[nn.Module]:
        """The module, ready to be called with inputs on `device`; `interrupt` is called at each layer's head.

        Inside the block the weights carry this clone's patches, whichever clone was realized last: what is resident
        stays so, what is not streams. The module acts as the extras say, with `options` in place of their own when
        given; after it nothing of them is left. Raises UnusableField for an option that the module has no place for.
        """
        w, extras = self._weights, self.extras
        with (
            torch.no_grad(),
            w.carrying(self.patches),
            w.tools.computing(w.device, w.form.compute_dtype, w.stream_memory, interrupt),
            extras.entered(self, options or extras.options),
            w.around_changes(lambda: extras.ejected(self)),
        ):
            yield w.module

    def _told(self, report: RealizeReport) -> RealizeReport:
        """`report`, after those who want to hear of it have."""
        if report.uploaded_bytes:
            self.extras.callbacks.call(CallbackPoint.ON_LOAD, self, report)
        elif report.freed_bytes and not self._weights.resident_modules:
            self.extras.callbacks.call(CallbackPoint.ON_DETACH, self, report)
        return report


def realizing(patcher: ModelPatcher, target: WeightsTarget) -> Generator[int, None, None]:
    """`ModelPatcher.realize` in steps, one for each module that arrives; see `SharedWeights.realizing`. Those who want
    to hear of it do when all have."""
    report = yield from patcher._weights.realizing(target)
    patcher.patches = target.patches
    patcher._told(report)
