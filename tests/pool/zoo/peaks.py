"""What a case of the zoo holds on a simulated device beside its weights: estimated without one, and measured there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.weights.ops.cast import apply_weight_functions
from modelpool.pool.weights.ops.casting_classes import restore_classes, swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.tracing.activation_bytes import peak_bytes
from tests.pool.zoo.case import Case, Inputs, quiet_libraries


@dataclass(frozen=True)
class Peak:
    """Bytes beside weights."""

    estimated_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """How far the estimate is above what was measured, as a part of that."""
        return self.estimated_bytes / self.measured_bytes - 1.0


def peaks_of(case: Case, sizes: dict[str, Inputs], dtype: torch.dtype, device: torch.device) -> dict[str, Peak]:
    """The peak of each size in `dtype`, by a dry run and on the simulated `device`. The case keeps its weights."""
    estimated = {name: estimated_bytes(case.module, inputs, dtype) for name, inputs in sizes.items()}
    with _resident(case.module, dtype, device), compute(device, dtype), torch.no_grad():
        return {name: Peak(estimated[name], _measured(case.module, i, dtype, device)) for name, i in sizes.items()}


def estimated_bytes(module: nn.Module, inputs: Inputs, dtype: torch.dtype) -> int:
    """By a dry run."""
    with quiet_libraries():
        return peak_bytes(module, dtype, call_on_meta(inputs, dtype))


def call_on_meta(inputs: Inputs, dtype: torch.dtype) -> Callable[[nn.Module], object]:
    """A call with `inputs` made on the meta device: numbers that are not floating point keep their values."""

    def arrived(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.empty(tensor.shape, dtype=dtype, device="meta")
        return tensor.to("meta")

    return lambda module: module(**pytree.tree_map_only(Tensor, arrived, inputs))


def _measured(module: nn.Module, inputs: Inputs, dtype: torch.dtype, device: torch.device) -> int:
    host = pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)
    before_bytes = sim.memory_stats(device.index).used_bytes
    sim.reset_peak(device.index)
    with quiet_libraries():
        module(**pytree.tree_map_only(Tensor, lambda t: t.to(device), host))
    return sim.memory_stats(device.index).peak_bytes - before_bytes


@contextmanager
def _resident(module: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """All weights on `device`, floating point parameters in `dtype`, and casting classes."""
    owned = [(m, dict(m._parameters), dict(m._buffers)) for m in module.modules()]
    swap_to_casting(module)
    for owner, parameters, buffers in owned:
        for name, parameter in parameters.items():
            if parameter is not None:
                weight = apply_weight_functions(parameter.data, (), device, dtype)
                owner._parameters[name] = nn.Parameter(weight, requires_grad=False)
        owner._buffers.update({name: None if b is None else b.to(device) for name, b in buffers.items()})
    try:
        yield
    finally:
        for owner, parameters, buffers in owned:
            owner._parameters.update(parameters)
            owner._buffers.update(buffers)
        restore_classes(module)
