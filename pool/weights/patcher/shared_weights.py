"""The weights that all clones of a patcher share: one module on the host and, in part or fully, on a device.

Host weights are views of the mapped file and are never written. A `WeightsTarget` states what should be on the device;
`SharedWeights.realize` computes the difference and moves only that. Patches are removed by uploading again, so there is
nothing to restore. Modules that stay on the device with other patches are written in place: their tensors, and the
addresses of these, stay the same. Knows one component on one device; not what should be resident
(`pool.weights.plan.eviction_plan`), nor when (`pool.weights.vram.vram_manager`), nor which patches a clone has
(`pool.weights.patcher.model_patcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from modelpool.pool.devices.copy_streams import Event
from modelpool.pool.values.core.errors import PatchFailed
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.specs.spec import UNPATCHED, ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.ops.attention_signatures import remember_signatures
from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.ops.casting_classes import set_weight_functions, swap_to_casting
from modelpool.pool.weights.ops.context import without_uploader
from modelpool.pool.weights.ops.low_rank_linear import LowRankPath, set_low_rank_path
from modelpool.pool.weights.ops.packed import PackedWeight, shares_memory, stored_bytes, write_into
from modelpool.pool.weights.patcher.compiled_blocks import CompiledBlocks
from modelpool.pool.weights.patcher.compute_context import RunTools, StreamHistory
from modelpool.pool.weights.patcher.graphed_calls import GraphedCalls
from modelpool.pool.weights.patcher.patched_weight_cache import CachedWeights, PatchedWeightCache
from modelpool.pool.weights.patcher.weight_bytes import (
    ModuleWeights,
    component_spec,
    component_use,
    merges,
    module_bytes,
    module_weights,
    product_bytes,
    product_rank,
)
from modelpool.pool.weights.patcher.weight_form import WeightForm, is_packed
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.patches.stochastic_rounding import round_to, seed_of
from modelpool.pool.weights.plan.eviction_plan import ModuleBytes, Resident
from modelpool.pool.weights.quant.quantize import requantize
from modelpool.pool.weights.tracing.module_flops import module_work

CHANNELS_LAST = torch.channels_last

#: patch sets that have their sizes kept
USES_KEPT = 64


@dataclass(frozen=True, slots=True)
class WeightsTarget:
    """The desired state of the device: these modules with these patches. The others stream, with the same patches."""

    resident: frozenset[str]
    patches: PatchSet


@dataclass(frozen=True, slots=True)
class RealizeReport:
    """The cost of moving to a target.

    uploaded_bytes  weights that crossed the bus, in storage dtype
    freed_bytes     resident bytes that were evicted; not those that were written in place
    switched        something was resident with another patch set
    """

    uploaded_bytes: int
    freed_bytes: int
    switched: bool


@dataclass(frozen=True, slots=True)
class _PatchPlacement:
    """The patches of one module, divided into merged and lazy ones.

    merged         names of its parameters with patches that are merged into their resident bytes
    merged_digest  digest of those patches
    lazy           names of its parameters with patches that are computed at each use
    lazy_digest    digest of those
    """

    merged: frozenset[str]
    merged_digest: str
    lazy: tuple[str, ...]
    lazy_digest: str


class SharedWeights:
    """The module that all clones of a patcher run, and which of its modules are on the device."""

    def __init__(
        self,
        key: ComponentKey,
        role: Role,
        module: nn.Module,
        device: torch.device,
        form: WeightForm,
        tools: RunTools | None = None,
        typical_call: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Take `module`. Its parameters are host tensors that nobody writes from now on.

        Gives every instance in `module` its casting class. Moves nothing. `typical_call` is for `sizes_with_flops`.
        """
        self.key = key
        self.role = role
        self.module = module
        self.device = device
        self.form = form
        self.tools = tools or RunTools()
        self._stream_history = StreamHistory()
        self.owners = {owner.name: owner for owner in module_weights(module)}
        self._typical_call = typical_call
        self.sizes: dict[str, ModuleBytes] = {m.name: m for m in module_bytes(self.owners.values(), form)}
        #: by the digest of the patch set
        self._uses: LruCache[str, ComponentUse] = LruCache(USES_KEPT)
        self._product_bytes: LruCache[str, int] = LruCache(USES_KEPT)
        #: device memory for factors that runs may keep, as granted by the plan; 0: as much as the pipeline has
        self.kept_bytes = 0
        self._realized = PatchSet()
        #: module name -> digest of the patches merged into its bytes; a module is resident exactly if it is listed here
        self._merged_digests: dict[str, str] = {}
        #: bytes of these modules: a run asks for them some thirty times, and a model has thousands of modules
        self._held_bytes = 0
        #: module name -> names of its parameters with such patches; has the same keys
        self._merged_names: dict[str, frozenset[str]] = {}
        #: the end of the last run with these weights on the device, or of their last change; None without streams
        self._last_use: Event | None = None
        #: module name -> digest of the patches that it computes at each use; absent if none
        self._lazy_digests: dict[str, str] = {}
        self._settled = True
        self._merged_bytes = 0
        #: number of changes started
        self._changes = 0
        #: number of nested runs in progress
        self._blocks = 0
        #: context of each weight change during a run
        self._change_context: Callable[[], AbstractContextManager[None]] = nullcontext
        swap_to_casting(module)
        remember_signatures(module)
        compiler = self.tools.compiler if role.is_diffusion_model else None
        #: None if no block is ever compiled
        self.compiled = None if compiler is None else CompiledBlocks(module, device, form.compute_dtype, compiler)
        graphs = self.tools.graphs if role.is_diffusion_model else None
        #: None if no call is ever captured
        self.graphed = None if graphs is None else GraphedCalls(key, module, device, graphs)
        #: number of changes to the addresses of weights on the device
        self._address_changes = 0

    @cached_property
    def host_parameters(self) -> Mapping[str, Tensor]:
        """Every parameter on the host, by its full name. Must not be written to."""
        own_parameters = (
            (owner, name, host) for owner in self.owners.values() for name, host in owner.parameters.items()
        )
        return MappingProxyType({owner.full_name(name): host for owner, name, host in own_parameters})

    @cached_property
    def sizes_with_flops(self) -> tuple[ModuleBytes, ...]:
        """`sizes` with the FLOPs of each module, in execution order; unused modules last."""
        if self._typical_call is None:
            return tuple(self.sizes.values())
        work = module_work(self.module, self.form.compute_dtype, self._typical_call)
        used = [name for name in work if name in self.sizes]
        unused = [name for name in self.sizes if name not in work]
        return tuple(replace(self.sizes[name], flops=work.get(name, 0)) for name in (*used, *unused))

    @property
    def has_counted_flops(self) -> bool:
        """Whether `sizes_with_flops` is known."""
        return self._typical_call is None or "sizes_with_flops" in self.__dict__

    def use(self, patches: PatchSet, passes: int = 1) -> ComponentUse:
        """Return what a run with `patches` needs in addition to the weights. The sizes for the last patch sets are
        kept: they take some 10 ms for the parameters of a large model."""
        found = self._uses.get(
            patches.digest, lambda: component_use(self.key, self.owners.values(), self.form, patches)
        )
        return replace(found, passes=passes)

    def product_bytes(self, patches: PatchSet) -> int:
        """Return the bytes of the factors of `patches` that are products next to layers. The sizes for the last patch
        sets are kept."""
        return self._product_bytes.get(patches.digest, lambda: product_bytes(self.owners.values(), self.form, patches))

    @cached_property
    def spec(self) -> ComponentSpec:
        """The component's sizes."""
        return component_spec(self.key, self.role, self.owners.values(), self.form)

    @property
    def resident_modules(self) -> frozenset[str]:
        """Names of the modules that are on the device now."""
        return frozenset(self._merged_digests)

    @property
    def stream_history(self) -> StreamHistory | None:
        """The streaming order of earlier runs with these weights; None if neither weights nor patches stream."""
        return self._stream_history if self._has_lazy or len(self._merged_digests) < len(self.owners) else None

    @property
    def _has_lazy(self) -> bool:
        """Whether some patches are computed at each use."""
        return any(digest != UNPATCHED for digest in self._lazy_digests.values())

    def resident(self) -> Resident:
        """Return the bytes on the device now and the patch set they were realized with."""
        return Resident(self.key, self._held_bytes, self._realized.digest, self._merged_bytes)

    @contextmanager
    def around_changes(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Make weight changes inside the block run inside `around()`, itself inside the context set before."""
        before = self._change_context

        @contextmanager
        def both() -> Iterator[None]:
            with around(), before():
                yield

        self._change_context = both
        try:
            yield
        finally:
            self._change_context = before

    def mark_use(self) -> None:
        """Note that all runs with these weights, and all writes to them, are pending on the compute stream or done."""
        self._last_use = self.tools.run_mark()

    @contextmanager
    def fast_run(self, is_plain: bool, captures: bool) -> Iterator[None]:
        """The context of a run that compiles what it may (`CompiledBlocks.running`) and, if it `captures`, makes whole
        calls as graphs. Neither unless it `is_plain`: without options that act inside the module."""
        with ExitStack() as fast:
            if self.compiled is not None:
                fast.enter_context(self.compiled.running(is_plain))
            if self.graphed is not None:
                is_graphed = is_plain and captures
                fast.enter_context(
                    self.graphed.running(self._frozen_version) if is_graphed else self.graphed.suspended()
                )
            yield

    def thawed(self) -> AbstractContextManager[None]:
        """Return the context of changes to weights, or to what the module computes, during a run."""
        return self.fast_run(is_plain=False, captures=False)

    def _frozen_version(self) -> int | None:
        """A number that changes with each address of the weights; None if some are not on the device, not in compute
        dtype, or patched at each use."""
        whole = self._settled and len(self._merged_digests) == len(self.owners) and not self._has_lazy
        return self._address_changes if whole and self._has_one_dtype else None

    @cached_property
    def _has_one_dtype(self) -> bool:
        kept = (host for host in self.host_parameters.values() if self.form.stays_stored(host))
        return not any(is_packed(host) or host.is_floating_point() for host in kept)

    @contextmanager
    def with_patches(self, patches: PatchSet) -> Iterator[None]:
        """Inside the block the weights have `patches`; resident modules stay resident.

        A nested block restores the patches of the enclosing one on exit. Raises as `realize` does.
        """
        before = self._realized if self._blocks else None
        self._switch_patches(patches)
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if before is not None:
                self._switch_patches(before)

    def _switch_patches(self, patches: PatchSet) -> None:
        self.realize(WeightsTarget(self.resident_modules, patches))

    def realize(self, target: WeightsTarget, cache: PatchedWeightCache | None = None) -> RealizeReport:
        """Bring the module to `target`, moving only the difference: evict first, then upload.

        Evicted weights go to `cache`, if there is one; weights found there need not be computed and moved again. If
        something raises (out of memory, for example), the uploaded modules are evicted again and the evicted ones stay
        on the host: every module is either fully on the device or fully off it, and `resident()` is accurate; call
        again with a target to resume. Raises PatchFailed for a patch that fits no parameter, before anything has moved.
        """
        is_same = self._realized.digest == target.patches.digest
        if self._settled and is_same and self._merged_digests.keys() == target.resident:
            return RealizeReport(0, 0, False)
        self.check(target.patches)
        with self._change_context(), self.thawed(), without_uploader():
            steps = self._change(target, cache)
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                report: RealizeReport = end.value
        if report.uploaded_bytes:
            self.mark_use()  # if no run follows, a later switch during another run would overtake the writes
        return report

    def realize_in_steps(self, target: WeightsTarget) -> Generator[int, None, RealizeReport]:
        """`realize` in steps: evictions before the first step, then one step for each uploaded module, which yields the
        bytes that crossed the bus. No run of these weights may be in progress.

        A caller that stops early leaves every module either fully on the device or fully off it, and `resident()` is
        accurate; `realize` resumes from there. Another change of these weights ends the steps. Raises as `realize`
        does.
        """
        assert not self._blocks, f"{self.key} is changed in steps while a run is in progress"
        is_same = self._realized.digest == target.patches.digest
        if self._settled and is_same and self._merged_digests.keys() == target.resident:
            return RealizeReport(0, 0, False)
        self.check(target.patches)
        return (yield from self._change(target, None))

    def check(self, patches: PatchSet) -> None:
        """Raise PatchFailed if a patch names no parameter, or does not fit its parameter."""
        hosts = self.host_parameters
        unknown = sorted(patches.parameters - hosts.keys())
        if unknown:
            patch = patches.patches_for(unknown[0])[0]
            raise PatchFailed(f"{patch.name}: found no such parameter in {self.key}, expected one of its parameters")
        patches.check({name: tuple(hosts[name].shape) for name in patches.parameters})

    def _change(self, target: WeightsTarget, cache: PatchedWeightCache | None) -> Generator[int, None, RealizeReport]:
        """Move to `target`; yields after each uploaded module the bytes that crossed the bus."""
        patches = target.patches
        self._settled = False
        self._changes += 1
        this = self._changes
        self._stream_history = StreamHistory()
        switched = bool(self._merged_digests) and self._realized.digest != patches.digest
        placement = {n: self._placement_of(owner, patches, n in target.resident) for n, owner in self.owners.items()}
        stale = {n for n, d in self._merged_digests.items() if d != placement[n].merged_digest}
        rewritten = stale & target.resident if cache is None else set()
        freed_bytes = 0
        for name in [n for n in self._merged_digests if n not in target.resident or n in stale - rewritten]:
            freed_bytes += self._evict(self.owners[name], cache)
        self._realized = patches
        self._merged_bytes = self.use(patches).patched_bytes
        there = self._merged_digests.keys() - rewritten
        arriving = [n for n in self.owners if n in target.resident and n not in there]
        uploaded_bytes = 0
        try:
            for name in arriving:
                if name in rewritten:
                    arrived_bytes = self._rewrite(self.owners[name], patches, placement[name])
                    rewritten.remove(name)
                else:
                    arrived_bytes = self._load(self.owners[name], patches, placement[name], cache)
                uploaded_bytes += arrived_bytes
                yield arrived_bytes
                if self._changes != this:
                    return RealizeReport(uploaded_bytes, freed_bytes, switched)
            for name, owner in self.owners.items():
                self._set_lazy(owner, patches, placement[name])
        except GeneratorExit:
            if self._changes == this:  # what has been uploaded is valid; the rest has the patches of before
                for name in rewritten & self._merged_digests.keys():
                    self._evict(self.owners[name], None)
            raise
        except BaseException:
            for name in self._merged_digests.keys() & set(arriving):
                self._evict(self.owners[name], None)
            raise
        self._settled = True
        return RealizeReport(uploaded_bytes, freed_bytes, switched)

    def evict_except(self, kept: Iterable[str]) -> RealizeReport:
        """Keep only these modules on the device, with their current patches. Uploads nothing: where a change in steps
        was left half done, what still has the patches of before leaves, too."""
        stays = self.resident_modules & frozenset(kept)
        if not self._settled:
            stays = frozenset(name for name in stays if self._is_current(self.owners[name]))
        return self.realize(WeightsTarget(stays, self._realized))

    def _is_current(self, owner: ModuleWeights) -> bool:
        """Whether a module on the device has the patches that were realized last."""
        return self._merged_digests[owner.name] == self._placement_of(owner, self._realized, True).merged_digest

    def unload(self) -> RealizeReport:
        """Evict all bytes from the device."""
        return self.realize(WeightsTarget(frozenset(), PatchSet()))

    def _placement_of(self, owner: ModuleWeights, patches: PatchSet, resident: bool) -> _PatchPlacement:
        merged = [n for n in owner.parameters if resident and merges(owner, n, self.form, patches)]
        lazy = tuple(n for n in owner.parameters if n not in merged)
        return _PatchPlacement(
            frozenset(n for n in merged if patches.patches_for(owner.full_name(n))),
            patches.digest_for(owner.full_name(n) for n in merged),
            lazy,
            patches.digest_for(owner.full_name(n) for n in lazy),
        )

    def _evict(self, owner: ModuleWeights, cache: PatchedWeightCache | None) -> int:
        """Replace device copies by host views; the copies go to `cache`. Returns the bytes freed."""
        held_bytes = self.sizes[owner.name].resident_bytes
        self._address_changes += 1
        if self.graphed is not None:
            self.graphed.store.drop(self.key)  # they hold what leaves
        if cache is not None:
            parameters = {name: owner.module._parameters[name] for name in owner.parameters}
            buffers = {name: owner.module._buffers[name] for name in owner.buffers}
            cache.put((owner.name, self._merged_digests[owner.name]), CachedWeights(parameters, buffers, held_bytes))
        for name, host in owner.parameters.items():
            owner.module._parameters[name] = nn.Parameter(host, requires_grad=False)
        for name, buffer in owner.buffers.items():
            owner.module._buffers[name] = buffer
        del self._merged_digests[owner.name], self._merged_names[owner.name]
        self._held_bytes -= held_bytes
        return held_bytes

    def _load(
        self, owner: ModuleWeights, patches: PatchSet, placement: _PatchPlacement, cache: PatchedWeightCache | None
    ) -> int:
        """Replace host views by device copies, from the cache if they are in it. Returns the bytes uploaded."""
        self._address_changes += 1
        cached = None if cache is None else cache.take((owner.name, placement.merged_digest))
        if cached is None:
            return self._upload(owner, patches, placement)
        self._set_lazy(owner, patches, placement)
        owner.module._parameters.update(cached.parameters)
        owner.module._buffers.update(cached.buffers)
        self._hold(owner, placement)
        return 0

    def _upload(self, owner: ModuleWeights, patches: PatchSet, placement: _PatchPlacement) -> int:
        """Replace host views by device copies. Returns the bytes that crossed the bus."""
        uploaded = {
            name: self._device_copy(owner, name, PatchSet() if name in placement.lazy else patches)
            for name in owner.parameters
        }
        buffers = {name: self.tools.bring(host, self.device) for name, host in owner.buffers.items()}
        self.tools.keep((*uploaded.values(), *buffers.values()))
        self._set_lazy(owner, patches, placement)
        for name, weight in uploaded.items():
            owner.module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        owner.module._buffers.update(buffers)
        self._hold(owner, placement)
        return self.sizes[owner.name].upload_bytes

    def _rewrite(self, owner: ModuleWeights, patches: PatchSet, placement: _PatchPlacement) -> int:
        """Write the values with `patches` into the module's tensors on the device. Returns the bytes that crossed the
        bus. If something raises, the caller evicts the module.

        Nothing is allocated in the end, so that CUDA graphs and compiled code that know the addresses stay valid. Where
        the device is the host, tensors of the file are not written but replaced, and come back without patches.
        """
        changed = [name for name in owner.parameters if name in self._merged_names[owner.name] | placement.merged]
        copies = {
            name: self._device_copy(owner, name, patches if name in placement.merged else PatchSet())
            for name in changed
        }
        self.tools.await_run(self._last_use)
        self._set_lazy(owner, patches, placement)
        for name, copy in copies.items():
            held, host = owner.module._parameters[name], owner.parameters[name]
            assert held is not None
            if shares_memory(held, host) or shares_memory(copy, host):
                self._address_changes += 1
                owner.module._parameters[name] = nn.Parameter(copy, requires_grad=False)
            else:
                self.tools.written(write_into(held.detach(), copy))
        self._hold(owner, placement)
        return sum(stored_bytes(owner.parameters[name]) for name in changed)

    def _hold(self, owner: ModuleWeights, placement: _PatchPlacement) -> None:
        """Note that a module is on the device with these patches."""
        if owner.name not in self._merged_digests:
            self._held_bytes += self.sizes[owner.name].resident_bytes
        self._merged_digests[owner.name] = placement.merged_digest
        self._merged_names[owner.name] = placement.merged

    def _device_copy(self, owner: ModuleWeights, own_name: str, patches: PatchSet) -> Tensor:
        host, name = owner.parameters[own_name], owner.full_name(own_name)
        functions = patches.functions(name)
        if not self.form.stays_stored(host):
            made = apply_weight_functions(host, functions, self.device, self.form.compute_dtype, self.tools.bring)
            return made.contiguous(memory_format=CHANNELS_LAST) if self.form.reorders(owner.module, host) else made
        if functions:
            values = apply_weight_functions(host, functions, self.device, torch.float32, self.tools.bring)
            seed = seed_of(name)
            return (
                requantize(values, host, seed, name)
                if isinstance(host, PackedWeight)
                else round_to(values, host.dtype, seed)
            )
        if isinstance(host, PackedWeight):
            return host.moved(self.device, lambda part: self.tools.bring(part, self.device))
        return self.tools.bring(host, self.device)

    def _set_lazy(self, owner: ModuleWeights, patches: PatchSet, placement: _PatchPlacement) -> None:
        """Make a module compute at each use the patches that are not merged into its bytes."""
        if self._lazy_digests.get(owner.name, UNPATCHED) == placement.lazy_digest:
            return
        for name in owner.parameters:
            functions = patches.functions(owner.full_name(name)) if name in placement.lazy else ()
            low_rank_path = self._low_rank_path(owner, name, patches) if functions else None
            set_weight_functions(owner.module, name, functions)
            if isinstance(owner.module, nn.Linear) and name == "weight":
                set_low_rank_path(owner.module, low_rank_path)
        self._lazy_digests[owner.name] = placement.lazy_digest

    def _low_rank_path(self, owner: ModuleWeights, name: str, patches: PatchSet) -> LowRankPath | None:
        """Return the patches of a weight as a low-rank product computed next to its layer; None if that is impossible
        or not wanted.

        Converted to compute dtype on the host already: no more bytes cross the bus than are computed with.
        """
        if product_rank(owner, name, self.form, patches) is None:
            return None
        factors = patches.low_rank_factors(owner.full_name(name), tuple(owner.parameters[name].shape))
        assert factors is not None, f"{owner.full_name(name)} has a rank and no factors"
        return LowRankPath(*(factor.to(self.form.compute_dtype) for factor in factors))
