"""`ModelPatcher`: one component whose device weights are a function of (host weights, patch set).

Host weights are views of the mapped file and are never written. What is on the device is said by a `WeightsTarget`; the
patcher works out the difference and moves only that. Taking patches off is uploading again, so there is nothing to
restore. Clones share the weights and own a patch set; cloning is O(1).

Knows one component on one device. Does not decide what should be resident (`pool.residency`), nor when
(`pool.vram_manager`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pool.devices.transfers import TransferLedger
from pool.ops import apply_weight_functions, compute, set_weight_functions, swap_to_casting
from pool.patches.patch_set import PatchSet, WeightPatch
from pool.residency import ModuleBytes, Resident
from pool.sizing import OwnWeights, component_spec, component_use, module_bytes, own_weights
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Role


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """What should be on the device: these modules with these patches. The rest streams, with the same patches."""

    resident: frozenset[str]
    patches: PatchSet


@dataclass(frozen=True, slots=True)
class RealizeReport:
    """What moving to a target took.

    uploaded_bytes  weights as they crossed the bus, in storage dtype
    freed_bytes     resident bytes given back
    switched        something was resident with another patch set
    """

    uploaded_bytes: int
    freed_bytes: int
    switched: bool


@dataclass(slots=True)
class SharedWeights:
    """The module that all clones of a patcher run, and which of its modules are on the device.

    carried  digest of the patches that each resident module's bytes carry; a module is resident exactly when named here
    hooked   digest of the patches that each streamed module applies on the fly; absent when it applies none
    settled  the last `realize` came to its end
    ledger   told of weights that stream, for devices that do not count by themselves
    """

    key: ComponentKey
    role: Role
    module: nn.Module
    device: torch.device
    compute_dtype: torch.dtype
    owned: dict[str, OwnWeights]
    sizes: dict[str, ModuleBytes]
    realized: PatchSet = field(default_factory=PatchSet)
    carried: dict[str, str] = field(default_factory=dict)
    hooked: dict[str, str] = field(default_factory=dict)
    settled: bool = True
    patched_bytes: int = 0
    ledger: TransferLedger | None = None


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
        compute_dtype: torch.dtype,
        ledger: TransferLedger | None = None,
    ) -> ModelPatcher:
        """A patcher over `module`, whose parameters are host tensors that nobody writes from now on.

        Gives every instance in `module` its casting class. Moves nothing.
        """
        owned = {own.name: own for own in own_weights(module)}
        sizes = {m.name: m for m in module_bytes(owned.values(), compute_dtype)}
        swap_to_casting(module)
        weights = SharedWeights(key, role, module, device, compute_dtype, owned, sizes, ledger=ledger)
        return cls(weights, PatchSet())

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
        return self._weights.compute_dtype

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
        return component_spec(w.key, w.role, w.owned.values(), w.compute_dtype)

    def use(self, passes: int = 1) -> ComponentUse:
        """What a run with this patch set needs. Sizes are those of the host weights, resident or not."""
        w = self._weights
        return component_use(w.key, w.owned.values(), w.compute_dtype, self.patches, passes)

    def modules(self) -> tuple[ModuleBytes, ...]:
        """The sizes of every module with weights of its own."""
        return tuple(self._weights.sizes.values())

    def resident_modules(self) -> frozenset[str]:
        """Names of the modules that are on the device now."""
        return frozenset(self._weights.carried)

    def resident(self) -> Resident:
        """What is on the device now, with the patch set it was realized with (not necessarily this clone's)."""
        w = self._weights
        held_bytes = sum(w.sizes[name].resident_bytes for name in w.carried)
        return Resident(w.key, held_bytes, w.realized.digest, w.patched_bytes)

    def realize(self, target: WeightsTarget) -> RealizeReport:
        """Bring the module to `target`, moving the difference only: first what leaves, then what arrives.

        When something raises (out of memory, say) every module is either wholly on the device or wholly off it, and
        `resident()` tells the truth; call again with a target to go on.
        """
        w = self._weights
        if w.settled and w.realized.digest == target.patches.digest and w.carried.keys() == target.resident:
            return RealizeReport(0, 0, False)
        w.settled = False
        switched = bool(w.carried) and w.realized.digest != target.patches.digest
        wanted = {name: target.patches.digest_for(own.parameter_names) for name, own in w.owned.items()}
        freed_bytes = 0
        for name in [n for n, digest in w.carried.items() if n not in target.resident or digest != wanted[n]]:
            freed_bytes += self._put_back(w.owned[name])
        w.realized = target.patches
        w.patched_bytes = self._touched_bytes(target.patches)
        uploaded_bytes = 0
        for name, own in w.owned.items():
            if name in target.resident and name not in w.carried:
                uploaded_bytes += self._upload(own, target.patches, wanted[name])
        for name, own in w.owned.items():
            if name not in w.carried:
                self._hook(own, target.patches, wanted[name])
        w.settled = True
        return RealizeReport(uploaded_bytes, freed_bytes, switched)

    def shrink(self, kept: frozenset[str]) -> RealizeReport:
        """Keep only these modules on the device, with the patches they carry."""
        return self.realize(WeightsTarget(self.resident_modules() & kept, self._weights.realized))

    def unload(self) -> RealizeReport:
        """Take every byte off the device."""
        return self.realize(WeightsTarget(frozenset(), PatchSet()))

    @contextmanager
    def running(self, interrupt: Callable[[], None] | None = None) -> Iterator[nn.Module]:
        """The module, ready to be called with inputs on `device`; `interrupt` is called at each layer's head."""
        w = self._weights
        with torch.no_grad(), compute(w.device, w.compute_dtype, interrupt, w.ledger):
            yield w.module

    def _touched_bytes(self, patches: PatchSet) -> int:
        w = self._weights
        touched = patches.parameters
        return sum(
            w.sizes[own.name].resident_bytes for own in w.owned.values() if not touched.isdisjoint(own.parameter_names)
        )

    def _put_back(self, own: OwnWeights) -> int:
        """Host views in place of device copies. Returns the bytes given back."""
        for name, host in own.parameters.items():
            own.module._parameters[name] = nn.Parameter(host, requires_grad=False)
        for name, host in own.buffers.items():
            own.module._buffers[name] = host
        del self._weights.carried[own.name]
        return self._weights.sizes[own.name].resident_bytes

    def _upload(self, own: OwnWeights, patches: PatchSet, digest: str) -> int:
        """Device copies in place of host views. Returns the bytes that crossed the bus."""
        w = self._weights
        arrived = {
            name: self._arrive(host, patches.functions(own.full_name(name))) for name, host in own.parameters.items()
        }
        buffers = {name: host.to(w.device) for name, host in own.buffers.items()}
        self._hook(own, PatchSet(), "")
        for name, weight in arrived.items():
            own.module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        own.module._buffers.update(buffers)
        w.carried[own.name] = digest
        return w.sizes[own.name].upload_bytes

    def _arrive(self, host: Tensor, functions: tuple[WeightPatch, ...]) -> Tensor:
        w = self._weights
        if not host.is_floating_point():
            return host.to(w.device)
        return apply_weight_functions(host, functions, w.device, w.compute_dtype)

    def _hook(self, own: OwnWeights, patches: PatchSet, digest: str) -> None:
        """Let a streamed module apply `patches` on the fly (none for a resident one: its bytes carry them)."""
        hooked = self._weights.hooked
        if hooked.get(own.name, "") == digest:
            return
        for name in own.parameters:
            set_weight_functions(own.module, name, patches.functions(own.full_name(name)))
        hooked[own.name] = digest
