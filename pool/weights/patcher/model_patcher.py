"""`ModelPatcher`: one component with one patch set and the options of its runs; `PatcherState`: those options.

Clones share the weights and have their own patch set; cloning is O(1). Patches and options take effect when the weights
are realized (`pool.weights.patcher.shared_weights`) or run. Does not decide what should be resident
(`pool.weights.plan.eviction_plan`), nor when (`pool.weights.vram.vram_manager`). docs/explanation/patcher.md maps the
methods of ComfyUI's ModelPatcher to these.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.options.callbacks import Callback, CallbackPoint, Callbacks
from modelpool.pool.weights.options.injections import Injection, Injections, InjectionState, active_injections
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.object_patches import objects_replaced, patched_object_at
from modelpool.pool.weights.options.transformer_options import Patch, functions_of, on_device
from modelpool.pool.weights.patcher.blocks.applied import applied
from modelpool.pool.weights.patcher.comfy_patches import KeyedPatches, patches_from, with_wrappers_last
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.hooks import HookGroup
from modelpool.pool.weights.patcher.patched_weight_cache import PatchedWeightCache
from modelpool.pool.weights.patcher.shared_weights import RealizeReport, SharedWeights, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.full_weights import PatchedWeight
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightPatch
from modelpool.pool.weights.plan.eviction_plan import ModuleBytes, Resident

__all__ = ["ModelPatcher", "RealizeReport", "WeightsTarget", "realize_in_steps"]


@dataclass(frozen=True, slots=True)
class PatcherState:
    """Everything that a patcher has besides weights and patches. Frozen: clones share it, each `with_` method returns a
    copy.

    options            options of its runs
    callbacks          functions called at the events of its life
    injections         changes to the module during a run; removed while weights change
    object_patches     attribute path -> object that replaces the one in the module during a run
    attachments        arbitrary objects; one that defines `on_model_patcher_clone()` gives clones its return value
    additional_models  patchers that its runs also need; cloned with it
    """

    options: ModelOptions = field(default_factory=ModelOptions)
    callbacks: Callbacks = field(default_factory=Callbacks)
    injections: Injections = field(default_factory=Injections)
    object_patches: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    attachments: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    additional_models: Mapping[str, tuple[ModelPatcher, ...]] = field(default_factory=lambda: MappingProxyType({}))

    def with_options(self, change: Callable[[ModelOptions], ModelOptions]) -> PatcherState:
        """Return a copy with `change` applied to the options."""
        return replace(self, options=change(self.options))

    def with_callback(self, point: CallbackPoint, callback: Callback, key: str = "") -> PatcherState:
        """Return a copy that calls `callback` at `point`."""
        return replace(self, callbacks=self.callbacks.with_callback(point, callback, key))

    def with_injections(self, key: str, *pairs: Injection) -> PatcherState:
        """Return a copy with `pairs` under `key`."""
        return replace(self, injections=self.injections.with_injections(key, *pairs))

    def with_object_patch(self, path: str, value: Any) -> PatcherState:
        """Return a copy that replaces the object at `path` in the module by `value` during runs."""
        return replace(self, object_patches=MappingProxyType({**self.object_patches, path: value}))

    def with_attachment(self, name: str, value: Any) -> PatcherState:
        """Return a copy with `value` under `name`."""
        return replace(self, attachments=MappingProxyType({**self.attachments, name: value}))

    def with_additional_models(self, key: str, *patchers: ModelPatcher) -> PatcherState:
        """Return a copy with `patchers` under `key`."""
        return replace(self, additional_models=MappingProxyType({**self.additional_models, key: patchers}))

    def cloned(self, clone: Callable[[ModelPatcher], ModelPatcher]) -> PatcherState:
        """Return the state of a clone: attachments and additional models are cloned, the rest is shared."""
        if not self.attachments and not self.additional_models:
            return self
        models = {key: tuple(map(clone, patchers)) for key, patchers in self.additional_models.items()}
        attachments = {name: _attachment_of_clone(value) for name, value in self.attachments.items()}
        return replace(self, attachments=MappingProxyType(attachments), additional_models=MappingProxyType(models))

    def leaves_module_as_is(self, options: ModelOptions) -> bool:
        """Whether runs with `options` change nothing inside the module."""
        return options.transformer.is_empty and not self.object_patches and not self.injections.entries

    @contextmanager
    def entered(self, patcher: ModelPatcher, options: ModelOptions) -> Iterator[None]:
        """Run `patcher` with `options`: call callbacks, replace objects, inject, apply options; undo everything on
        exit.

        Undoes in the opposite order, even if something raises.
        """
        self.callbacks.call(CallbackPoint.ON_PRE_RUN, patcher)
        try:
            with (
                objects_replaced(patcher.module, self.object_patches),
                self._injected(patcher),
                applied(patcher.module, _on_device(options, patcher.device)),
            ):
                yield
        finally:
            self.callbacks.call(CallbackPoint.ON_CLEANUP, patcher)

    @contextmanager
    def ejected(self, patcher: ModelPatcher) -> Iterator[None]:
        """Remove the injections of the patcher's run inside the block and insert them again after it.

        If one cannot be inserted again, none is, and the run continues, and ends, without them.
        """
        if not self.injections.entries:
            yield
            return
        # another thread has no record of this run: from there, injections count as inserted
        known = active_injections(patcher) or (InjectionState(self.injections, patcher, is_injected=True),)
        # the innermost that is inserted; enclosing blocks handle outer runs
        placement = next((p for p in known if p.is_injected), None)
        if placement is None:  # could not be inserted again the last time
            yield
            return
        self._take_out(placement, patcher)
        try:
            yield
        finally:
            self._put_in(placement, patcher)

    @contextmanager
    def _injected(self, patcher: ModelPatcher) -> Iterator[None]:
        if not self.injections.entries:
            yield
            return
        placement = InjectionState(self.injections, patcher)
        with placement.active():
            try:
                self._put_in(placement, patcher)
                yield
            finally:
                self._take_out(placement, patcher)

    def _put_in(self, placement: InjectionState, patcher: ModelPatcher) -> None:
        placement.inject()
        self.callbacks.call(CallbackPoint.ON_INJECT_MODEL, patcher)

    def _take_out(self, placement: InjectionState, patcher: ModelPatcher) -> None:
        if placement.is_injected:
            placement.eject()
            self.callbacks.call(CallbackPoint.ON_EJECT_MODEL, patcher)


class ModelPatcher:
    """One component with one patch set. Build with `ModelPatcher.of`, vary with `clone` and `add_patches`.

    patches  patch set of the next `realize`, weight wrappers last
    state    options, callbacks, injections and so on; assign a changed value:
             `patcher.state = patcher.state.with_object_patch(...)`
    """

    def __init__(self, weights: SharedWeights, patches: PatchSet, state: PatcherState | None = None) -> None:
        self._weights = weights
        self.patches = patches
        self.state = state or PatcherState()

    @classmethod
    def of(
        cls,
        key: ComponentKey,
        role: Role,
        module: nn.Module,
        device: torch.device,
        form: WeightForm,
        tools: RunTools | None = None,
        typical_call: Callable[[nn.Module], object] | None = None,
    ) -> ModelPatcher:
        """Return a patcher over `module`. Its parameters are host tensors that nobody writes from now on.

        Gives every instance in `module` its casting class. Moves nothing. `typical_call` calls the module with inputs
        of a typical size on the meta device, to count the FLOPs of each module (`modules_with_flops`).
        """
        return cls(SharedWeights(key, role, module, device, form, tools, typical_call), PatchSet())

    @property
    def key(self) -> ComponentKey:
        """The key of the component."""
        return self._weights.key

    @property
    def module(self) -> nn.Module:
        """The module to call inside `running()`."""
        return self._weights.module

    @property
    def device(self) -> torch.device:
        """The device that runs compute on."""
        return self._weights.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that runs compute in."""
        return self._weights.form.compute_dtype

    @property
    def model_options(self) -> ModelOptions:
        """The options of this patcher's runs."""
        return self.state.options

    def clone(self) -> ModelPatcher:
        """Return a patcher that shares the weights and starts from the same patch set and state. O(1) in both.

        Clones additional models too, and attachments that define `on_model_patcher_clone`.
        """
        return self._clone({})

    def _clone(self, clones: dict[int, ModelPatcher]) -> ModelPatcher:
        """Return the clone, or the one already in `clones`: additional models may refer to each other in a cycle."""
        if id(self) not in clones:
            twin = clones[id(self)] = ModelPatcher(self._weights, self.patches, self.state)
            twin.state = self.state.cloned(lambda patcher: patcher._clone(clones))
            self.state.callbacks.call(CallbackPoint.ON_CLONE, self, twin)
        return clones[id(self)]

    def is_clone(self, other: ModelPatcher) -> bool:
        """Whether both run the same module."""
        return self._weights is other._weights

    def clone_has_same_weights(self, other: ModelPatcher) -> bool:
        """Whether both run the same module with equal patches."""
        return self.is_clone(other) and self.patches.digest == other.patches.digest

    def add_patches(
        self,
        patches: Iterable[WeightPatch] | KeyedPatches,
        strength_patch: float = 1.0,
        strength_model: float = 1.0,
        identity: str | None = None,
    ) -> tuple[str, ...]:
        """Append `patches` to the patch set; they take effect at the next `realize`. Other clones are not affected.

        Takes ready patches as they are, or ComfyUI's form: key, (key, offset) or (key, offset, function) -> value. Of
        the latter it takes the values for parameters, with both strengths; `identity` names the values for digests, and
        without it they never equal the values of another call. Weight wrappers
        (`pool.weights.patcher.comfy_patches.weight_wrapper`) stay after all other patches, including those added later.
        Returns the parameters that got a patch, in order. Raises PatchFailed, and adds nothing, for a value of an
        unknown kind and for a patch that fits no parameter.
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
        """Return each parameter with a name that begins with `prefix`: its host weight with its patches, usable as the
        value of another patch. Model merging is built on this."""
        return {
            name: PatchedWeight(host, self.patches.patches_for(name))
            for name, host in self._weights.host_parameters.items()
            if name.startswith(prefix)
        }

    def spec(self) -> ComponentSpec:
        """The component's sizes."""
        return self._weights.spec

    def use(self, passes: int = 1) -> ComponentUse:
        """Return what a run with this patch set needs. Sizes count the host weights, resident or not."""
        return self._weights.use(self.patches, passes)

    @property
    def product_bytes(self) -> int:
        """Bytes of the factors of this patch set that its runs multiply next to layers, in every pass."""
        return self._weights.product_bytes(self.patches)

    @contextmanager
    def keeping_products(self, most_bytes: int) -> Iterator[None]:
        """Inside the block each run may keep factors of that many bytes on the device; 0: as many as the pipeline
        has memory for."""
        before = self._weights.kept_bytes
        self._weights.kept_bytes = most_bytes
        try:
            yield
        finally:
            self._weights.kept_bytes = before

    def modules(self) -> tuple[ModuleBytes, ...]:
        """Return the sizes of every module that directly holds weights."""
        return tuple(self._weights.sizes.values())

    @property
    def modules_with_flops(self) -> tuple[ModuleBytes, ...]:
        """The sizes of `modules` with the FLOPs of each, in execution order. Counted at the first access; equal to
        `modules` without a typical call."""
        return self._weights.sizes_with_flops

    @property
    def has_counted_flops(self) -> bool:
        """Whether `modules_with_flops` costs nothing. Counting is a run on the meta device, of up to some seconds."""
        return self._weights.has_counted_flops

    @property
    def host_parameters(self) -> Mapping[str, Tensor]:
        """Every parameter on the host, by its full name. Must not be written to."""
        return self._weights.host_parameters

    def bring(self, host: Tensor) -> Tensor:
        """Return a copy of a host tensor on the device that may be kept."""
        return self._weights.tools.bring(host, self.device)

    @property
    def ahead_bytes(self) -> int:
        """Device memory for copies of streamed weights ahead of their use."""
        pipeline = self._weights.tools.pipeline
        return 0 if pipeline is None else pipeline.ahead_bytes

    def resident_modules(self) -> frozenset[str]:
        """Names of the modules that are on the device now."""
        return self._weights.resident_modules

    @property
    def streams(self) -> bool:
        """Whether a run moves weights or patches to the device while it computes."""
        return self._weights.stream_history is not None

    def resident(self) -> Resident:
        """Return the bytes on the device now and the patch set they were realized with (maybe another clone's)."""
        return self._weights.resident()

    def realize(self, target: WeightsTarget, cache: PatchedWeightCache | None = None) -> RealizeReport:
        """Bring the module to `target`, moving only the difference: evict first, then upload. Its patches become this
        clone's.

        Evicted weights go to `cache`, if there is one; weights found there need not be computed and moved again. If
        something raises (out of memory, for example), the uploaded modules are evicted again, the evicted ones stay on
        the host, and `resident()` is accurate; call again with a target to resume.
        """
        report = self._weights.realize(target, cache)
        self.patches = target.patches
        return self._notify(report)

    def evict_except(self, kept: frozenset[str]) -> RealizeReport:
        """Keep only these modules on the device, with their current patches."""
        return self._notify(self._weights.evict_except(kept))

    def unload(self) -> RealizeReport:
        """Evict all bytes from the device."""
        return self._notify(self._weights.unload())

    @contextmanager
    def running(
        self,
        interrupt: Callable[[], None] | None = None,
        options: ModelOptions | None = None,
        captures: bool = False,
    ) -> Iterator[nn.Module]:
        """Yield the module, ready to be called with inputs on `device`; `interrupt` is called at the start of each
        layer. A run that `captures` changes nothing inside the module by other means than options, and calls it with
        everything that its result depends on: its calls may be CUDA graphs.

        Inside the block the weights have this clone's patches, whichever clone was realized last: resident modules stay
        resident, the others stream. The module acts on the options of the state, or on `options` if passed; everything
        is undone on exit. Raises UnusableField for an option that does not apply to the module.
        """
        w, state = self._weights, self.state
        options = options or state.options
        with (
            torch.no_grad(),
            w.with_patches(self.patches),
            w.tools.computing(w.device, w.form.compute_dtype, w.stream_history, interrupt, w.kept_bytes),
            w.thawed(),  # else options of a run inside another would wrap compiled blocks
            state.entered(self, options),
            w.around_changes(lambda: state.ejected(self)),
            w.fast_run(state.leaves_module_as_is(options), captures),
        ):
            try:
                yield w.module
            finally:
                w.mark_use()

    def thawed(self) -> AbstractContextManager[None]:
        """Return a context in which no block of the module is compiled, for changes of a run to its options."""
        return self._weights.thawed()

    def _notify(self, report: RealizeReport) -> RealizeReport:
        """Call the callbacks for `report` and return it."""
        if report.uploaded_bytes:
            self.state.callbacks.call(CallbackPoint.ON_LOAD, self, report)
        elif report.freed_bytes and not self._weights.resident_modules:
            self.state.callbacks.call(CallbackPoint.ON_DETACH, self, report)
        return report


def realize_in_steps(patcher: ModelPatcher, target: WeightsTarget) -> Generator[int, None, None]:
    """`ModelPatcher.realize` in steps, one for each uploaded module; see `SharedWeights.realize_in_steps`. Callbacks
    are called after the last step."""
    report = yield from patcher._weights.realize_in_steps(target)
    patcher.patches = target.patches
    patcher._notify(report)


def get_model_object(patcher: ModelPatcher, path: str) -> Any:
    """Return the object that a run of `patcher` finds at `path` in its module: an object patch or the module's. Raises
    UnknownName."""
    return patched_object_at(patcher.module, path, patcher.state.object_patches)


def models_to_load(patcher: ModelPatcher, groups: Iterable[HookGroup | None] = ()) -> tuple[ModelPatcher, ...]:
    """Return the other patchers that a run of `patcher` needs, each once: its additional models, those that functions
    of its options and of its conditions' hook `groups` name (by a method `models()`), and theirs in turn. Lease them
    together with it."""
    found: list[ModelPatcher] = []
    of_conditions = [group.transformer for group in groups if group is not None]

    def visit(one: ModelPatcher) -> None:
        state = one.state
        options = [state.options.transformer, *(of_conditions if one is patcher else ())]
        named = [model for o in options for f in functions_of(o) for model in _models_of(f)]
        for model in (*(m for models in state.additional_models.values() for m in models), *named):
            if model is not patcher and not any(model is known for known in found):
                found.append(model)
                visit(model)

    visit(patcher)
    return tuple(found)


def _models_of(function: Patch) -> tuple[ModelPatcher, ...]:
    models = getattr(function, "models", None)
    return tuple(models()) if callable(models) else ()


def _on_device(options: ModelOptions, device: torch.device) -> ModelOptions:
    transformer = on_device(options.transformer, device)
    return options if transformer is options.transformer else replace(options, transformer=transformer)


def _attachment_of_clone(value: Any) -> Any:
    on_clone = getattr(value, "on_model_patcher_clone", None)
    return on_clone() if callable(on_clone) else value
