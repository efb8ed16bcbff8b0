"""How many bytes the weights of a module take: resident, on the bus, and as scratch while they move.

Pure functions of host weights, a compute dtype and a patch set, used by the patcher that moves the weights and by the
catalog that tells the scheduler about them. Reads shapes and dtypes only; touches no weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pool.patches.patch_set import PatchSet
from pool.residency import ModuleBytes
from pool.spec import ComponentKey, ComponentSpec, ComponentUse, Role

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


def resident_bytes(weight: Tensor, compute_dtype: torch.dtype) -> int:
    """Bytes of `weight` on the device: floating point in compute dtype, the rest as it is."""
    return weight.numel() * (compute_dtype.itemsize if weight.is_floating_point() else weight.dtype.itemsize)


def module_bytes(weights: Iterable[OwnWeights], compute_dtype: torch.dtype) -> tuple[ModuleBytes, ...]:
    """The sizes of every module with weights, in the order given."""
    return tuple(
        ModuleBytes(
            own.name,
            sum(resident_bytes(p, compute_dtype) for p in own.parameters.values())
            + sum(b.nbytes for b in own.buffers.values()),
            sum(p.nbytes for p in own.parameters.values()) + sum(b.nbytes for b in own.buffers.values()),
        )
        for own in weights
    )


def component_spec(
    key: ComponentKey, role: Role, weights: Iterable[OwnWeights], compute_dtype: torch.dtype
) -> ComponentSpec:
    """The sizes of all of them together, as the plan needs them."""
    modules = module_bytes(weights, compute_dtype)
    return ComponentSpec(key, role, sum(m.resident_bytes for m in modules), sum(m.upload_bytes for m in modules))


def component_use(
    key: ComponentKey, weights: Iterable[OwnWeights], compute_dtype: torch.dtype, patches: PatchSet, passes: int = 1
) -> ComponentUse:
    """What a run with `patches` needs beside the weights themselves."""
    held = tuple(weights)
    touched = patches.parameters
    patched_bytes = sum(
        sum(resident_bytes(p, compute_dtype) for p in own.parameters.values())
        for own in held
        if not touched.isdisjoint(own.parameter_names)
    )
    return ComponentUse(
        component=key,
        scratch_bytes=scratch_bytes(held, compute_dtype, patches),
        patch_digest=patches.digest,
        patched_bytes=patched_bytes,
        passes=passes,
    )


def scratch_bytes(weights: Iterable[OwnWeights], compute_dtype: torch.dtype, patches: PatchSet) -> int:
    """The working set of the hungriest module, streamed or while it loads.

    A streamed module holds the compute-dtype copies of all its parameters at once, and for the one under way its
    storage copy and, when it is patched, its float32 copy and the factors of one patch.
    """
    return max((_module_scratch(own, compute_dtype, patches) for own in weights), default=0)


def _module_scratch(own: OwnWeights, compute_dtype: torch.dtype, patches: PatchSet) -> int:
    gathers_first = isinstance(own.module, nn.Embedding) and not patches.functions(own.full_name("weight"))
    held_bytes = 0 if gathers_first else sum(resident_bytes(p, compute_dtype) for p in own.parameters.values())
    under_way = max(
        (_in_conversion(p, compute_dtype, patches, own.full_name(n)) for n, p in own.parameters.items()), default=0
    )
    return held_bytes + under_way


def _in_conversion(weight: Tensor, compute_dtype: torch.dtype, patches: PatchSet, name: str) -> int:
    """Bytes beside the compute-dtype copy while that copy is being made."""
    functions = patches.functions(name)
    storage_bytes = 0 if weight.dtype == compute_dtype and not functions else weight.nbytes
    if not functions:
        return storage_bytes
    float_bytes = weight.numel() * PATCH_ITEM_BYTES if compute_dtype != torch.float32 else 0
    return storage_bytes + float_bytes + max(f.value.working_bytes for f in functions)
