"""`ModelPatcher`: one component with one patch set.

Clones share the weights and own a patch set; cloning is O(1). What a clone wants becomes so when it is realized
(`pool.shared_weights`). Does not decide what should be resident (`pool.residency`), nor when (`pool.vram_manager`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pool.devices.transfers import TransferLedger
from pool.ops import compute
from pool.patches.patch_set import PatchSet, WeightPatch
from pool.residency import ModuleBytes, Resident
from pool.shared_weights import RealizeReport, SharedWeights, WeightsTarget
from pool.sizing import component_spec, component_use
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from pool.weight_form import WeightForm

__all__ = ["ModelPatcher", "RealizeReport", "WeightsTarget"]


class ModelPatcher:
    """One component with one patch set. Build with `ModelPatcher.of`, vary with `clone` and `add_patches`."""

    def __init__(self, weights: SharedWeights, patches: PatchSet) -> None:
        self._weights = weights
        self.patches = patches

    @classmethod
    def of(
        cls,
        key: ComponentKey,
        role: Role,
        module: nn.Module,
        device: torch.device,
        form: WeightForm,
        ledger: TransferLedger | None = None,
    ) -> ModelPatcher:
        """A patcher over `module`, whose parameters are host tensors that nobody writes from now on.

        Gives every instance in `module` its casting class. Moves nothing.
        """
        return cls(SharedWeights(key, role, module, device, form, ledger), PatchSet())

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

    def clone(self) -> ModelPatcher:
        """A patcher that shares the weights and starts from the same patch set. O(1)."""
        return ModelPatcher(self._weights, self.patches)

    def is_clone(self, other: ModelPatcher) -> bool:
        """Both run the same module."""
        return self._weights is other._weights

    def clone_has_same_weights(self, other: ModelPatcher) -> bool:
        """Both run the same module with equal patches."""
        return self.is_clone(other) and self.patches.digest == other.patches.digest

    def add_patches(self, patches: Iterable[WeightPatch]) -> None:
        """Apply `patches` after the ones there, from the next `realize` on. Other clones are not affected."""
        self.patches = self.patches.with_patches(patches)

    def spec(self) -> ComponentSpec:
        """The component's sizes."""
        w = self._weights
        return component_spec(w.key, w.role, w.owned.values(), w.form)

    def use(self, passes: int = 1) -> ComponentUse:
        """What a run with this patch set needs. Sizes are those of the host weights, resident or not."""
        w = self._weights
        return component_use(w.key, w.owned.values(), w.form, self.patches, passes)

    def modules(self) -> tuple[ModuleBytes, ...]:
        """The sizes of every module with weights of its own."""
        return tuple(self._weights.sizes.values())

    def resident_modules(self) -> frozenset[str]:
        """Names of the modules that are on the device now."""
        return self._weights.resident_modules

    def resident(self) -> Resident:
        """What is on the device now, with the patch set it was realized with (not necessarily this clone's)."""
        return self._weights.resident()

    def realize(self, target: WeightsTarget) -> RealizeReport:
        """Bring the module to `target`, moving the difference only: first what leaves, then what arrives.

        When something raises (out of memory, say) every module is either wholly on the device or wholly off it, and
        `resident()` tells the truth; call again with a target to go on.
        """
        return self._weights.realize(target)

    def shrink(self, kept: frozenset[str]) -> RealizeReport:
        """Keep only these modules on the device, with the patches they carry."""
        return self._weights.shrink(kept)

    def unload(self) -> RealizeReport:
        """Take every byte off the device."""
        return self._weights.unload()

    @contextmanager
    def running(self, interrupt: Callable[[], None] | None = None) -> Iterator[nn.Module]:
        """The module, ready to be called with inputs on `device`; `interrupt` is called at each layer's head."""
        w = self._weights
        with torch.no_grad(), compute(w.device, w.form.compute_dtype, interrupt, w.ledger):
            yield w.module
