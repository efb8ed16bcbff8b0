"""Modules without weights: parameters take no memory, tables that the class computes have their values.

Knows nothing of any class.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.models.diffusion.architecture import Arguments
from modelpool.pool.models.diffusion.uncached import without_caches
from modelpool.pool.ops.skip_init import without_initialisation

#: what torch's layers, and the classes of diffusers, make parameters with; tables are computed from other things
_UNSET = frozenset({torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand})


#: where torch keeps what a module is made of
_HELD = frozenset({"_parameters", "_buffers", "_modules"})


def empty_module(cls: type[nn.Module], config: Arguments) -> nn.Module:
    """The module for `config` in evaluation mode, its parameters on the meta device, without gradients.

    Tables that no file carries, and that the class computes when it is built, are on the CPU.
    Raises UnknownArchitecture when the class refuses the sizes.
    """
    try:
        with warnings.catch_warnings(), without_initialisation():
            # classes of diffusers use names of diffusers that it has deprecated
            warnings.filterwarnings("ignore", message=".* is deprecated and will be removed", category=FutureWarning)
            with torch.device("meta"):
                module = cls(**config)
            if any(table.is_meta for _, table in tables_of(module)):
                with _ParametersOnMeta():
                    module = cls(**config)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"diffusion model: {cls.__name__} cannot have these sizes: {error}") from error
    without_caches(module)
    return module.eval().requires_grad_(False)


def tables_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that `module` holds and no file carries, with a name: buffers, and attributes that are none."""
    for name, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key in part._non_persistent_buffers_set:
                yield f"{name}.{key}", buffer
        for key, value in vars(part).items():
            # most of what a module has are flags, and hooks that nobody set
            if isinstance(value, Tensor | list | tuple | dict) and key not in _HELD:
                yield from ((f"{name}.{key}", tensor) for tensor in _tensors_in(value))


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors_in(part)


class _ParametersOnMeta(TorchFunctionMode):
    """What is made without values to compute it from is made on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """As `func`, but for those that make parameters."""
        given = dict(kwargs or {})
        if func in _UNSET and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)
