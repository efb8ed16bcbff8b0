"""Computes the bytes that the weights of a module take: resident, on the bus, and as scratch while they move.

Pure functions of host weights, their form and a patch set, used by the patcher that moves the weights and by the
catalog that describes them to the scheduler. Reads shapes and dtypes only; touches no weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from modelpool.pool.values.specs.spec import ComponentKey, ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.ops.packed import PackedWeight, stored_bytes
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.patches.stochastic_rounding import rounding_scratch_bytes
from modelpool.pool.weights.plan.eviction_plan import ModuleBytes
from modelpool.pool.weights.quant.quantize import requantize_scratch_bytes

#: patches are computed in float32
PATCH_ITEM_BYTES = 4


@dataclass(frozen=True, slots=True)
class ModuleWeights:
    """The parameters and buffers that one module directly holds (not its children), on the host."""

    name: str
    module: nn.Module
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]

    def full_name(self, own_name: str) -> str:
        """Return the name of a parameter from the root of the tree."""
        return f"{self.name}.{own_name}" if self.name else own_name


def module_weights(root: nn.Module) -> Iterator[ModuleWeights]:
    """Yield every module of the tree that directly holds weights, in tree order."""
    for name, module in root.named_modules():
        parameters = {n: p.data for n, p in module._parameters.items() if p is not None}
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        if parameters or buffers:
            yield ModuleWeights(name, module, parameters, buffers)


def module_bytes(weights: Iterable[ModuleWeights], form: WeightForm) -> tuple[ModuleBytes, ...]:
    """Return the sizes of every module with weights, in order. Buffers are kept as they are."""
    return tuple(
        ModuleBytes(
            owner.name,
            sum(form.resident_bytes(p) for p in owner.parameters.values())
            + sum(b.nbytes for b in owner.buffers.values()),
            sum(stored_bytes(p) for p in owner.parameters.values()) + sum(b.nbytes for b in owner.buffers.values()),
        )
        for owner in weights
    )


def component_spec(key: ComponentKey, role: Role, weights: Iterable[ModuleWeights], form: WeightForm) -> ComponentSpec:
    """Return the total sizes of a component, as the plan needs them."""
    modules = module_bytes(weights, form)
    return ComponentSpec(key, role, sum(m.resident_bytes for m in modules), sum(m.upload_bytes for m in modules))


def component_use(
    key: ComponentKey, weights: Iterable[ModuleWeights], form: WeightForm, patches: PatchSet, passes: int = 1
) -> ComponentUse:
    """Return what a run with `patches` needs in addition to the weights."""
    held = tuple(weights)
    return ComponentUse(
        component=key,
        scratch_bytes=scratch_bytes(held, form, patches),
        patch_digest=patches.digest,
        patched_bytes=merged_bytes(held, form, patches),
        passes=passes,
    )


def merged_bytes(weights: Iterable[ModuleWeights], form: WeightForm, patches: PatchSet) -> int:
    """Return the resident bytes of the modules that have patches merged in: what another patch set uploads again."""
    touched = patches.parameters
    return sum(
        sum(form.resident_bytes(p) for p in owner.parameters.values())
        for owner in weights
        if any(owner.full_name(n) in touched and merges(owner, n, form, patches) for n in owner.parameters)
    )


def merges(owner: ModuleWeights, own_name: str, form: WeightForm, patches: PatchSet) -> bool:
    """Whether patches are merged into the resident copy of a parameter.

    Patches that change its shape never are: resident bytes must be those that the plan knows. Nor are those that are
    products next to their layer.
    """
    weight, name = owner.parameters[own_name], owner.full_name(own_name)
    shape = tuple(weight.shape)
    if not form.merges(weight) or patches.patched_shape(name, shape) != shape:
        return False
    return not form.patches_at_run_time or product_rank(owner, own_name, form, patches) is None


def product_rank(owner: ModuleWeights, own_name: str, form: WeightForm, patches: PatchSet) -> int | None:
    """Return the rank of the product next to a linear layer that the patches of a parameter are computed as; None if
    they are not."""
    if own_name != "weight" or not isinstance(owner.module, nn.Linear):
        return None
    weight, rank = owner.parameters[own_name], patches.rank(owner.full_name(own_name))
    return rank if rank is not None and form.adds_products(weight, rank) else None


def product_bytes(weights: Iterable[ModuleWeights], form: WeightForm, patches: PatchSet) -> int:
    """Return the bytes of the factors of all products next to layers, in compute dtype: what a run keeps on the device
    if there is room, and brings there at each pass otherwise."""
    ranks = (
        (owner.parameters["weight"], product_rank(owner, "weight", form, patches))
        for owner in weights
        if "weight" in owner.parameters
        and owner.full_name("weight") in patches.parameters
        and not merges(owner, "weight", form, patches)
    )
    return sum(rank * sum(weight.shape) * form.compute_dtype.itemsize for weight, rank in ranks if rank is not None)


def scratch_bytes(weights: Iterable[ModuleWeights], form: WeightForm, patches: PatchSet) -> int:
    """Return the working set of the module with the largest one, streamed or while it loads.

    A streamed module holds the compute-dtype copies of all its parameters at once, plus, for the parameter in
    conversion, its storage copy and, if it is patched, its float32 copy and the factors of one patch.
    """
    return max((_module_scratch(owner, form, patches) for owner in weights), default=0)


def _module_scratch(owner: ModuleWeights, form: WeightForm, patches: PatchSet) -> int:
    gathers_first = isinstance(owner.module, nn.Embedding) and not patches.functions(owner.full_name("weight"))
    held_bytes = 0
    if not gathers_first:
        held_bytes = sum(
            form.computed_bytes(p) * _patched_numel(p, owner.full_name(n), patches) // max(p.numel(), 1)
            for n, p in owner.parameters.items()
        )
    under_way = max(
        (
            _in_conversion(p, form, patches, owner.full_name(n))
            # computed in the order of the file, then copied
            + (form.computed_bytes(p) if form.reorders(owner.module, p) else 0)
            for n, p in owner.parameters.items()
        ),
        default=0,
    )
    return held_bytes + under_way


def _in_conversion(weight: Tensor, form: WeightForm, patches: PatchSet, name: str) -> int:
    """Return the bytes in addition to the compute-dtype copy while that copy is computed."""
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
    if form.stays_stored(weight) and form.merges(weight):  # rounded back into storage, from float32
        back_bytes = (
            requantize_scratch_bytes(weight) if isinstance(weight, PackedWeight) else rounding_scratch_bytes(weight)
        )
        working_bytes = max(working_bytes, numel * PATCH_ITEM_BYTES + back_bytes)
    return storage_bytes + float_bytes + working_bytes


def _patched_numel(weight: Tensor, name: str, patches: PatchSet) -> int:
    return math.prod(patches.patched_shape(name, tuple(weight.shape)))
