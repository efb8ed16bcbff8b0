"""Digests of everything that a dry run reads: two modules with equal digests allocate and compute the same.

Covers classes, names, shapes, dtypes, configurations and plain attributes, at any depth, and the values of tensors that
are neither parameters nor buffers. Values of weights and buffers are left out: a dry run has stand-ins for them.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: types with a repr that states type and value
_SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})
#: types of torch with the name as the repr
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
#: attributes that every module has; empty ones are left out
_BASE = frozenset(nn.Module().__dict__)
#: written for the end of a group; no repr starts with it
_END = "\n)"


def structure_digest(*values: object) -> str | None:
    """Return a digest of `values`: modules, and values of any nesting. None if they contain an object with a meaning
    unknown here; such values must not be taken for equal to others.

    Values with different digests may still be equal. Reads no parameter and no buffer.
    """
    writer = _Writer()
    try:
        for value in values:
            writer.write(value)
    except _Unknown:
        return None
    return hashlib.sha256("\n".join(writer.parts).encode("utf-8", "surrogatepass")).hexdigest()


class _Unknown(Exception):
    """An object that may have more than its attributes."""


class _Writer:
    """Writes values as lines, so that different values are different lines. An object that occurs again is written as
    its number: shared layers differ from equal ones."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._numbers: dict[int, int] = {}

    def write(self, value: object) -> None:
        kind = type(value)
        if kind in _SIMPLE:
            self.parts.append(repr(value))
        elif kind is list or kind is tuple:
            self._group(kind, value)  # type: ignore[arg-type] # it is one of both
        elif isinstance(value, nn.Module | Tensor):
            self._once(value)
        elif isinstance(value, _NAMED):
            self.parts.append(repr(value))
        elif isinstance(value, Enum):
            self._group(kind, (value.name,))
        elif isinstance(value, np.bool_ | np.number):
            self._group(kind, (value.item(),))
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, dict):
            self._group(kind, (part for item in value.items() for part in item), _vars(value))
        elif isinstance(value, list | tuple):
            self._group(kind, value, _vars(value))
        elif isinstance(value, set | frozenset):
            self._group(kind, sorted(self._apart(item) for item in value), _vars(value))
        elif isinstance(value, CodeType):
            self._group(kind, (value.co_filename, value.co_qualname, value.co_firstlineno, value.co_code))
        elif isinstance(value, Mapping):
            self._group(kind, (part for item in value.items() for part in item))
        else:
            self._once(value)

    def _apart(self, value: object) -> str:
        """One line for a member of a set: sets have no order."""
        other = _Writer()
        if type(value) not in _SIMPLE and not isinstance(value, Enum | tuple | frozenset | type | torch.dtype):
            raise _Unknown
        other.write(value)
        return "\n".join(other.parts)

    def _group(self, kind: type, items: Iterable[object], attributes: Mapping[str, object] | None = None) -> None:
        self._class(kind)
        for item in items:
            self.write(item)
        for name, value in (attributes or {}).items():
            self.parts.append(f".{name}")
            self.write(value)
        self.parts.append(_END)

    def _class(self, kind: type) -> None:
        if "<locals>" in kind.__qualname__:
            raise _Unknown  # others may have this name
        self.parts.append(f"({kind.__module__}.{kind.__qualname__}")

    def _once(self, value: object) -> None:
        number = self._numbers.get(id(value))
        if number is not None:
            self.parts.append(f"#{number}")
            return
        self._numbers[id(value)] = len(self._numbers)
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
            self._content(value)
        else:
            self._object(value)

    def _module(self, module: nn.Module) -> None:
        self._class(type(module))
        for name, value in module.__dict__.items():
            if name in _BASE and name != "training" and not value:
                continue
            self.parts.append(f".{name}")
            if name in ("_parameters", "_buffers"):
                for own, tensor in value.items():
                    self.parts.append(f".{own}")
                    self._weight(tensor)
            else:
                self.write(value)
        self.parts.append(_END)

    def _weight(self, tensor: Tensor | None) -> None:
        """A parameter or buffer; its values are never read."""
        if tensor is None:
            self.parts.append("None")
        elif (number := self._numbers.get(id(tensor))) is not None:
            self.parts.append(f"#{number}")
        else:
            self._numbers[id(tensor)] = len(self._numbers)
            self._tensor(tensor)

    def _tensor(self, tensor: Tensor) -> None:
        self._class(type(tensor))
        self.parts.append(f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}")

    def _content(self, tensor: Tensor) -> None:
        """The values of a tensor that a dry run reads as it is."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            raise _Unknown
        self.parts.append(f"{tensor.device} {tensor.stride()}")
        if tensor.device.type == "cpu":
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            self.parts.append(hashlib.sha256(plain.view(torch.uint8).numpy().data).hexdigest())
        elif tensor.device.type != "meta":
            raise _Unknown

    def _object(self, value: object) -> None:
        if isinstance(value, partial):
            self._group(partial, (value.func, value.args, value.keywords), _vars(value))
        elif isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            arguments = (value.__defaults__, value.__kwdefaults__, cells)
            self._group(FunctionType, (value.__module__, value.__code__, *arguments))
        elif isinstance(value, MethodType):
            self._group(MethodType, (value.__func__, value.__self__))
        elif isinstance(value, BuiltinFunctionType):
            if not (value.__self__ is None or isinstance(value.__self__, ModuleType)):
                raise _Unknown
            self.parts.append(f"{value!r} of {value.__module__}")
        elif dataclasses.is_dataclass(value):
            self._group(type(value), (getattr(value, one.name) for one in dataclasses.fields(value)), _vars(value))
        elif _is_plain(type(value)):
            self._group(type(value), (), _vars(value))
        else:
            raise _Unknown


def _vars(value: Any) -> Mapping[str, object] | None:
    """Return the attributes of an object of a class with `__dict__`."""
    return getattr(value, "__dict__", None)


#: flag of classes that are written in Python
_HEAP_TYPE = 1 << 9


def _is_plain(kind: type) -> bool:
    """Whether the attributes of an object of this class are all of it: no class written in C, no slots."""
    bases = kind.__mro__[:-1]
    is_python = all(base.__flags__ & _HEAP_TYPE and not base.__dict__.get("__slots__") for base in bases)
    return is_python and kind.__dictoffset__ != 0
