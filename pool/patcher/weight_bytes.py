"""How many bytes the weights of a module take: resident, on the bus, and as scratch while they move.

Pure functions of host weights, their form and a patch set, used by the patcher that moves the weights and by the
catalog that tells the scheduler about them. Reads shapes and dtypes only; touches no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelpool.pool.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.patcher.weight_form import WeightForm
from modelpool.pool.patches.patch_set import PatchSet
from modelpool.pool.patches.stochastic_rounding import rounding_scratch_bytes
from modelpool.pool.plan.residency import ModuleBytes
from modelpool.pool.quant.quantize import requantize_scratch_bytes
from modelpool.pool.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role

#: patches are computed in float32
PATCH_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class OwnWeights:
    """The parameters and buffers that one module holds itself (not its children), on the host."""

    name: str
    module: nn.Module
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def full_name(self, own_name: str) -> str:
        """The name of a parameter from the root of the tree."""
        return f"{self.name}.{own_name}" if self.name else own_name

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Full names of all parameters."""
        return tuple(self.full_name(n) for n in self.parameters)


def own_weights(root: nn.Module) -> Iterator[OwnWeights]:
    """Every module of the tree that holds weights of its own, in tree order."""
    for name, module in root.named_modules():
        parameters = {n: p.data for n, p in module._parameters.items() if p is not None}
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        if parameters or buffers:
            yield OwnWeights(name, module, parameters, buffers)


def module_bytes(weights: Iterable[OwnWeights], form: WeightForm) -> tuple[ModuleBytes, ...]:
    """The sizes of every module with weights, in the order given. Buffers are kept as they are."""
    return tuple(
        ModuleBytes(
            own.name,
            sum(form.resident_bytes(p) for p in own.parameters.values()) + sum(b.nbytes for b in own.buffers.values()),
            sum(stored_bytes(p) for p in own.parameters.values()) + sum(b.nbytes for b in own.buffers.values()),
        )
        for own in weights
    )


def component_spec(key: ComponentKey, role: Role, weights: Iterable[OwnWeights], form: WeightForm) -> ComponentSpec:
    """The sizes of all of them together, as the plan needs them."""
    modules = module_bytes(weights, form)
    return ComponentSpec(key, role, sum(m.resident_bytes for m in modules), sum(m.upload_bytes for m in modules))


def component_use(
    key: ComponentKey, weights: Iterable[OwnWeights], form: WeightForm, patches: PatchSet, passes: int = 1
) -> ComponentUse:
    """What a run with `patches` needs beside the weights themselves."""
    held = tuple(weights)
    return ComponentUse(
        component=key,
        scratch_bytes=scratch_bytes(held, form, patches),
        patch_digest=patches.digest,
        patched_bytes=merged_bytes(held, form, patches),
        passes=passes,
    )


def merged_bytes(weights: Iterable[OwnWeights], form: WeightForm, patches: PatchSet) -> int:
    """Resident bytes of the modules that have patches merged in: what another patch set uploads anew."""
    touched = patches.parameters
    return sum(
        sum(form.resident_bytes(p) for p in own.parameters.values())
        for own in weights
        if any(
            own.full_name(n) in touched and merges(p, own.full_name(n), form, patches)
            for n, p in own.parameters.items()
        )
    )


def merges(weight: Tensor, name: str, form: WeightForm, patches: PatchSet) -> bool:
    """Patches are merged into the resident copy of `weight`, the parameter `name`.

    Those that change its shape never are: what is resident has the bytes that the plan knows of.
    """
    shape = tuple(weight.shape)
    return form.merges(weight) and patches.patched_shape(name, shape) == shape


def scratch_bytes(weights: Iterable[OwnWeights], form: WeightForm, patches: PatchSet) -> int:
    """The working set of the hungriest module, streamed or while it loads.

    A streamed module holds the compute-dtype copies of all its parameters at once, and for the one under way its
    storage copy and, when it is patched, its float32 copy and the factors of one patch.
    """
    return max((_module_scratch(own, form, patches) for own in weights), default=0)


def _module_scratch(own: OwnWeights, form: WeightForm, patches: PatchSet) -> int:
    gathers_first = isinstance(own.module, nn.Embedding) and not patches.functions(own.full_name("weight"))
    held_bytes = 0
    if not gathers_first:
        held_bytes = sum(
            form.computed_bytes(p) * _patched_numel(p, own.full_name(n), patches) // max(p.numel(), 1)
            for n, p in own.parameters.items()
        )
    under_way = max((_in_conversion(p, form, patches, own.full_name(n)) for n, p in own.parameters.items()), default=0)
    return held_bytes + under_way


def _in_conversion(weight: Tensor, form: WeightForm, patches: PatchSet, name: str) -> int:
    """Bytes beside the compute-dtype copy while that copy is being made."""
    functions = patches.functions(name)
    storage_bytes = stored_bytes(weight) if functions or form.converts(weight) else 0
    if isinstance(weight, PackedWeight):
        storage_bytes += weight.scratch_bytes(torch.float32 if functions else form.compute_dtype)
    if not functions:
        return storage_bytes
    numel = _patched_numel(weight, name, patches)
    grown_bytes = weight.numel() * PATCH_ITEM_BYTES if numel != weight.numel() else 0
    float_bytes = grown_bytes + (numel * PATCH_ITEM_BYTES if form.compute_dtype != torch.float32 else 0)
    shape = tuple(weight.shape)
    working_bytes = max(f.working_bytes_for(shape) for f in functions)
    if form.stays_stored(weight) and form.merges(weight):  # it goes back into storage, from float32
        back_bytes = (
            requantize_scratch_bytes(weight) if isinstance(weight, PackedWeight) else rounding_scratch_bytes(weight)
        )
        working_bytes = max(working_bytes, numel * PATCH_ITEM_BYTES + back_bytes)
    return storage_bytes + float_bytes + working_bytes


def _patched_numel(weight: Tensor, name: str, patches: PatchSet) -> int:
    return math.prod(patches.patched_shape(name, tuple(weight.shape)))
