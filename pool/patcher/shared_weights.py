"""One module on the host and, where asked for, on the device: the weights that all clones of a patcher share.

Host weights are views of the mapped file and are never written. What is on the device is said by a `WeightsTarget`;
`SharedWeights.realize` works out the difference and moves only that. Taking patches off is uploading again, so there is
nothing to restore. Knows one component on one device; not what should be resident (`pool.plan.residency`), nor when
(`pool.vram.vram_manager`), nor which patches a clone wants (`pool.patcher.model_patcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import torch
from torch import Tensor, nn

from modelpool.pool.core.errors import PatchFailed
from modelpool.pool.ops.cast import apply_weight_functions
from modelpool.pool.ops.classes import set_weight_functions, swap_to_casting
from modelpool.pool.ops.context import without_uploader
from modelpool.pool.ops.low_rank_linear import SidePath, set_side_path
from modelpool.pool.ops.packed import PackedWeight
from modelpool.pool.patcher.compute_context import ComputeTools, StreamMemory
from modelpool.pool.patcher.patched_weight_cache import PatchedShelf, Shelved
from modelpool.pool.patcher.weight_bytes import (
    OwnWeights,
    component_spec,
    merged_bytes,
    merges,
    module_bytes,
    own_weights,
)
from modelpool.pool.patcher.weight_form import WeightForm
from modelpool.pool.patches.patch_set import PatchSet
from modelpool.pool.patches.stochastic_rounding import round_to, seed_of
from modelpool.pool.plan.residency import ModuleBytes, Resident
from modelpool.pool.quant.quantize import requantize
from modelpool.pool.specs.spec import UNPATCHED, ComponentKey, ComponentSpec, Role
from modelpool.pool.tracing.module_flops import module_work


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


@dataclass(frozen=True, slots=True)
class _Wanted:
    """How one module's patches should reach it.

    merged  digest of those that its resident bytes carry
    live    names of own parameters whose patches are computed at each use
    digest  of these
    """

    merged: str
    live: tuple[str, ...]
    digest: str


class SharedWeights:
    """The module that all clones of a patcher run, and which of its modules are on the device."""

    def __init__(
        self,
        key: ComponentKey,
        role: Role,
        module: nn.Module,
        device: torch.device,
        form: WeightForm,
        tools: ComputeTools | None = None,
        usual_call: Callable[[nn.Module], object] | None = None,
    ) -> None:
        """Take `module`, whose parameters are host tensors that nobody writes from now on.

        Gives every instance in `module` its casting class. Moves nothing. `usual_call` is for `worked_sizes`.
        """
        self.key = key
        self.role = role
        self.module = module
        self.device = device
        self.form = form
        self.tools = tools or ComputeTools()
        self._stream_memory = StreamMemory()
        self.owned = {own.name: own for own in own_weights(module)}
        self._usual_call = usual_call
        self.sizes: dict[str, ModuleBytes] = {m.name: m for m in module_bytes(self.owned.values(), form)}
        self._realized = PatchSet()
        #: digest of the patches that each resident module's bytes carry; resident exactly when named here
        self._carried: dict[str, str] = {}
        #: digest of the patches that each module computes at use; absent when it computes none
        self._hooked: dict[str, str] = {}
        self._settled = True
        self._merged_bytes = 0
        #: changes that were begun
        self._changes = 0
        #: runs that are under way, one inside another
        self._blocks = 0
        #: what is around each change of weights while a run is under way
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext
        swap_to_casting(module)

    @cached_property
    def host_parameters(self) -> Mapping[str, Tensor]:
        """Every parameter on the host, by its full name. Nobody may write into them."""
        own_parameters = ((own, name, host) for own in self.owned.values() for name, host in own.parameters.items())
        return MappingProxyType({own.full_name(name): host for own, name, host in own_parameters})

    @cached_property
    def worked_sizes(self) -> tuple[ModuleBytes, ...]:
        """`sizes` with the work of each module, in the order in which a pass uses them; unused ones last."""
        if self._usual_call is None:
            return tuple(self.sizes.values())
        work = module_work(self.module, self.form.compute_dtype, self._usual_call)
        used = [name for name in work if name in self.sizes]
        unused = [name for name in self.sizes if name not in work]
        return tuple(replace(self.sizes[name], flops=work.get(name, 0)) for name in (*used, *unused))

    @cached_property
    def spec(self) -> ComponentSpec:
        """The component's sizes."""
        return component_spec(self.key, self.role, self.owned.values(), self.form)

    @property
    def resident_modules(self) -> frozenset[str]:
        """Names of the modules that are on the device now."""
        return frozenset(self._carried)

    @property
    def stream_memory(self) -> StreamMemory | None:
        """What earlier runs with these weights streamed; None when nothing does: neither weights nor patches."""
        has_live = any(digest != UNPATCHED for digest in self._hooked.values())
        return self._stream_memory if has_live or len(self._carried) < len(self.owned) else None

    def resident(self) -> Resident:
        """What is on the device now, with the patch set it was realized with."""
        held_bytes = sum(self.sizes[name].resident_bytes for name in self._carried)
        return Resident(self.key, held_bytes, self._realized.digest, self._merged_bytes)

    @contextmanager
    def around_changes(self, around: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Weights that change inside the block do so inside `around()`, itself inside what was there before."""
        before = self._around

        @contextmanager
        def both() -> Iterator[None]:
            with around(), before():
                yield

        self._around = both
        try:
            yield
        finally:
            self._around = before

    @contextmanager
    def carrying(self, patches: PatchSet) -> Iterator[None]:
        """Inside the block the weights carry `patches`, what is resident staying so.

        A block inside another one's gives it back what it carried. Raises as `realize` does.
        """
        before = self._realized if self._blocks else None
        self._carry(patches)
        self._blocks += 1
        try:
            yield
        finally:
            self._blocks -= 1
            if before is not None:
                self._carry(before)

    def _carry(self, patches: PatchSet) -> None:
        self.realize(WeightsTarget(self.resident_modules, patches))

    def realize(self, target: WeightsTarget, shelf: PatchedShelf | None = None) -> RealizeReport:
        """Bring the module to `target`, moving the difference only: first what leaves, then what arrives.

        What leaves goes on `shelf`, if there is one, and what is found there need not be computed and moved again.
        When something raises (out of memory, say) what arrived leaves again and what left stays away: every module is
        either wholly on the device or wholly off it, and `resident()` tells the truth; call again with a target to go
        on. Raises PatchFailed for a patch that fits no parameter; nothing has moved then.
        """
        is_same = self._realized.digest == target.patches.digest
        if self._settled and is_same and self._carried.keys() == target.resident:
            return RealizeReport(0, 0, False)
        self.check(target.patches)
        with self._around(), without_uploader():
            steps = self._change(target, shelf)
            try:
                while True:
                    next(steps)
            except StopIteration as end:
                report: RealizeReport = end.value
                return report

    def realizing(self, target: WeightsTarget) -> Generator[int, None, RealizeReport]:
        """`realize` in steps: what leaves before the first, then one for each module that arrives, which yields the
        bytes that it brought over the bus. No run of these weights may be under way.

        Whoever asks for no more leaves every module wholly on the device or wholly off it, and `resident()` tells the
        truth; `realize` goes on from there. Another change of these weights ends the steps. Raises as `realize` does.
        """
        assert not self._blocks, f"{self.key} is changed step by step while a run is under way"
        is_same = self._realized.digest == target.patches.digest
        if self._settled and is_same and self._carried.keys() == target.resident:
            return RealizeReport(0, 0, False)
        self.check(target.patches)
        return (yield from self._change(target, None))

    def check(self, patches: PatchSet) -> None:
        """Raise PatchFailed when a patch is for no parameter, or does not fit it."""
        hosts = self.host_parameters
        unknown = sorted(patches.parameters - hosts.keys())
        if unknown:
            patch = patches.patches_for(unknown[0])[0]
            raise PatchFailed(f"{patch.name}: found no such parameter in {self.key}, expected one of its own")
        patches.check({name: tuple(hosts[name].shape) for name in patches.parameters})

    def _change(self, target: WeightsTarget, shelf: PatchedShelf | None) -> Generator[int, None, RealizeReport]:
        """A step for each module that arrives; bytes on the bus."""
        patches = target.patches
        self._settled = False
        self._changes += 1
        this = self._changes
        self._stream_memory = StreamMemory()
        switched = bool(self._carried) and self._realized.digest != patches.digest
        wanted = {n: self._wanted(own, patches, n in target.resident) for n, own in self.owned.items()}
        freed_bytes = 0
        for name in [n for n, d in self._carried.items() if n not in target.resident or d != wanted[n].merged]:
            freed_bytes += self._put_back(self.owned[name], shelf)
        self._realized = patches
        self._merged_bytes = merged_bytes(self.owned.values(), self.form, patches)
        arriving = [n for n in self.owned if n in target.resident and n not in self._carried]
        uploaded_bytes = 0
        try:
            for name in arriving:
                arrived_bytes = self._bring(self.owned[name], patches, wanted[name], shelf)
                uploaded_bytes += arrived_bytes
                yield arrived_bytes
                if self._changes != this:
                    return RealizeReport(uploaded_bytes, freed_bytes, switched)
            for name, own in self.owned.items():
                self._hook(own, patches, wanted[name])
        except GeneratorExit:
            raise  # nothing is wrong with what has arrived
        except BaseException:
            for name in self._carried.keys() & set(arriving):
                self._put_back(self.owned[name], None)
            raise
        self._settled = True
        return RealizeReport(uploaded_bytes, freed_bytes, switched)

    def shrink(self, kept: Iterable[str]) -> RealizeReport:
        """Keep only these modules on the device, with the patches they carry."""
        return self.realize(WeightsTarget(self.resident_modules & frozenset(kept), self._realized))

    def unload(self) -> RealizeReport:
        """Take every byte off the device."""
        return self.realize(WeightsTarget(frozenset(), PatchSet()))

    def _wanted(self, own: OwnWeights, patches: PatchSet, resident: bool) -> _Wanted:
        merged = [n for n, h in own.parameters.items() if resident and merges(h, own.full_name(n), self.form, patches)]
        live = tuple(n for n in own.parameters if n not in merged)
        return _Wanted(
            patches.digest_for(own.full_name(n) for n in merged),
            live,
            patches.digest_for(own.full_name(n) for n in live),
        )

    def _put_back(self, own: OwnWeights, shelf: PatchedShelf | None) -> int:
        """Host views in place of device copies, which go on `shelf`. Returns the bytes given back."""
        held_bytes = self.sizes[own.name].resident_bytes
        if shelf is not None:
            parameters = {name: own.module._parameters[name] for name in own.parameters}
            buffers = {name: own.module._buffers[name] for name in own.buffers}
            shelf.put((own.name, self._carried[own.name]), Shelved(parameters, buffers, held_bytes))
        for name, host in own.parameters.items():
            own.module._parameters[name] = nn.Parameter(host, requires_grad=False)
        for name, buffer in own.buffers.items():
            own.module._buffers[name] = buffer
        del self._carried[own.name]
        return held_bytes

    def _bring(self, own: OwnWeights, patches: PatchSet, wanted: _Wanted, shelf: PatchedShelf | None) -> int:
        """Device copies in place of host views, off the shelf if they are there. Returns the bytes uploaded."""
        shelved = None if shelf is None else shelf.take((own.name, wanted.merged))
        if shelved is None:
            return self._upload(own, patches, wanted)
        self._hook(own, patches, wanted)
        own.module._parameters.update(shelved.parameters)
        own.module._buffers.update(shelved.buffers)
        self._carried[own.name] = wanted.merged
        return 0

    def _upload(self, own: OwnWeights, patches: PatchSet, wanted: _Wanted) -> int:
        """Device copies in place of host views. Returns the bytes that crossed the bus."""
        arrived = {
            name: self._arrive(host, own.full_name(name), PatchSet() if name in wanted.live else patches)
            for name, host in own.parameters.items()
        }
        buffers = {name: self.tools.bring(host, self.device) for name, host in own.buffers.items()}
        self.tools.keep((*arrived.values(), *buffers.values()))
        self._hook(own, patches, wanted)
        for name, weight in arrived.items():
            own.module._parameters[name] = nn.Parameter(weight, requires_grad=False)
        own.module._buffers.update(buffers)
        self._carried[own.name] = wanted.merged
        return self.sizes[own.name].upload_bytes

    def _arrive(self, host: Tensor, name: str, patches: PatchSet) -> Tensor:
        functions = patches.functions(name)
        if not self.form.stays_stored(host):
            return apply_weight_functions(host, functions, self.device, self.form.compute_dtype, self.tools.bring)
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

    def _hook(self, own: OwnWeights, patches: PatchSet, wanted: _Wanted) -> None:
        """Let a module compute at each use what its bytes do not carry."""
        if self._hooked.get(own.name, UNPATCHED) == wanted.digest:
            return
        for name, host in own.parameters.items():
            functions = patches.functions(own.full_name(name)) if name in wanted.live else ()
            beside = self._side_path(own.module, host, patches, own.full_name(name)) if functions else None
            set_weight_functions(own.module, name, functions)
            if isinstance(own.module, nn.Linear) and name == "weight":
                set_side_path(own.module, beside)
        self._hooked[own.name] = wanted.digest

    def _side_path(self, module: nn.Module, host: Tensor, patches: PatchSet, parameter: str) -> SidePath | None:
        """The patches of a packed weight as a product beside its layer; None when they cannot be one, or need not.

        In compute dtype already on the host: no more bytes cross the bus than are computed with.
        """
        if not isinstance(module, nn.Linear) or not isinstance(host, PackedWeight):
            return None
        factors = patches.low_rank_factors(parameter, tuple(host.shape))
        if factors is None:
            return None
        return SidePath(*(factor.to(self.form.compute_dtype) for factor in factors))
