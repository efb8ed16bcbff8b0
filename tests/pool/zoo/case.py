"""One member of the zoo: a module, what to call it with, and what came out as a flat list of tensors."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Inputs = dict[str, Any]
#: makes a module and the keyword arguments to call it with
Maker = Callable[[], tuple[nn.Module, Inputs]]

SEED = 11


@dataclass(frozen=True)
class Case:
    """A built module and inputs for it, on the CPU."""

    module: nn.Module
    inputs: Inputs

    def input_tensors(self) -> list[Tensor]:
        """Every tensor of the inputs."""
        return [leaf for leaf in pytree.tree_leaves(self.inputs) if isinstance(leaf, Tensor)]

    def run(self, device: torch.device | None = None) -> list[Tensor]:
        """All tensors of the result, on the CPU."""
        inputs = self.inputs if device is None else pytree.tree_map_only(Tensor, lambda t: t.to(device), self.inputs)
        with torch.no_grad(), quiet_libraries():
            out = self.module(**inputs)
        return [t.to("cpu") for t in tensors_in(out)]


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """diffusers warns of its own deprecated names, torch of autocast on a CPU; neither is about the subject of the
    test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", message=r"In \w+ autocast", category=UserWarning)
        yield


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_in(v)]
    if dataclasses.is_dataclass(value) or type(value).__module__.startswith("diffusers."):
        return [t for v in vars(value).values() for t in tensors_in(v)]
    return []


def build_with(make: Maker, storage: torch.dtype) -> Case:
    """The case that `make` makes, with random weights that `storage` holds exactly, kept in float32."""
    torch.manual_seed(SEED)
    with quiet_libraries():
        module, inputs = make()
    for parameter in module.parameters():
        if not parameter.is_floating_point():
            continue
        spread = 0.3 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
        noise = torch.randn_like(parameter, dtype=torch.float32) * spread
        parameter.data = noise.to(storage).float()
    return Case(module.eval().requires_grad_(False), inputs)


def store_in(module: nn.Module, storage: torch.dtype) -> None:
    """Put the floating point parameters of `module` in `storage`; exact for what `build_with` made for it."""
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                owner._parameters[name] = nn.Parameter(parameter.data.to(storage), requires_grad=False)
