"""Build modules without weights: parameters on the meta device, computed tables with values.

Knows no class.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from modelpool.pool.families.parts.forward import Arguments
from modelpool.pool.models.components.diffusion.uncached import without_caches
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.ops.attention_signatures import remember_signatures
from modelpool.pool.weights.ops.skip_init import uninitialised_on_meta, without_initialisation

#: functions with which torch's layers and diffusers' classes create parameters; tables are computed otherwise
_UNSET = frozenset({torch.empty, torch.zeros, torch.ones, torch.randn, torch.rand})


#: attributes in which torch keeps parameters, buffers and submodules
_HELD = frozenset({"_parameters", "_buffers", "_modules"})


def empty_module(cls: type[nn.Module], config: Arguments) -> nn.Module:
    """Return the module for `config` in evaluation mode, its parameters on the meta device, without gradients.

    Tables that no file carries and that the class computes on construction are on the CPU.

    Raises UnknownArchitecture if the class rejects the sizes.
    """
    try:
        with warnings.catch_warnings():
            # diffusers' classes use names that diffusers has deprecated
            warnings.filterwarnings("ignore", message=".* is deprecated and will be removed", category=FutureWarning)
            with uninitialised_on_meta():
                module = cls(**config)
            if any(table.is_meta for _, table in tables_of(module)):
                with without_initialisation(), _ParametersOnMeta():
                    module = cls(**config)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"diffusion model: {cls.__name__} cannot have these sizes: {error}") from error
    without_caches(module)
    remember_signatures(module)  # here, too: estimates call modules that have no patcher
    return module.eval().requires_grad_(False)


def tables_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of `module` that no file carries, with a name: non-persistent buffers, and plain
    attributes."""
    for name, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key in part._non_persistent_buffers_set:
                yield f"{name}.{key}", buffer
        for key, value in vars(part).items():
            # most attributes are flags and empty hook dictionaries
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
    """Creates parameters without values on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, on the meta device if it creates a parameter."""
        given = dict(kwargs or {})
        if func in _UNSET and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)
