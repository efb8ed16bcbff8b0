"""Finds torch's module for each device kind without importing packages that are not installed.

Knows how vendor packages register their devices with torch; `device_count` of the module tells whether there are
devices.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.values.core.errors import UserError

#: finds the module of a device kind, or None; tests pass their own
FindModule = Callable[[DeviceKind], Any]


def device_module(kind: DeviceKind) -> Any:
    """Return torch's module for devices of this kind, or None if torch has none or its package is not installed.

    Raises UserError if the package is installed but cannot be loaded: its version may belong to another torch.
    """
    match kind:
        case DeviceKind.CUDA:
            return None if torch.version.hip else torch.cuda
        case DeviceKind.ROCM:
            return torch.cuda if torch.version.hip else None
        case DeviceKind.SIM | DeviceKind.CPU:
            return None
    package = kind.facts.package
    if package is None:
        return getattr(torch, kind.facts.torch_type, None)
    if importlib.util.find_spec(package) is None:
        return None
    try:
        module = importlib.import_module(package)  # registers the device type with torch
    except Exception as error:  # any error of a vendor package makes it unusable
        raise UserError(f"{package}: is installed and cannot be loaded ({type(error).__name__}: {error})") from error
    return module if kind is DeviceKind.DIRECTML else getattr(torch, kind.facts.torch_type, None)


def device_count(module: Any) -> int:
    """Return the number of devices of `module`; 0 for None and without a driver."""
    if module is None:
        return 0
    is_available = getattr(module, "is_available", None)
    if is_available is not None and not is_available():
        return 0
    return int(module.device_count())


def device_name(kind: DeviceKind, module: Any, index: int) -> str:
    """Return the vendor name of device `index`; the kind's title if unknown."""
    for ask in ("get_device_name", "device_name"):  # torch's name for it, and torch_directml's
        if hasattr(module, ask):
            return str(getattr(module, ask)(index)).rstrip("\0 ") or kind.facts.title
    return kind.facts.title


def as_current(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current one of the thread: kernels of other libraries run there,
    wherever their tensors are. Nothing for devices other than CUDA."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def torch_device(kind: DeviceKind, module: Any, index: int) -> torch.device:
    """Return the torch device."""
    if kind is DeviceKind.DIRECTML:
        found: torch.device = module.device(index)  # only the module knows the name it registered
        return found
    return torch.device(kind.facts.torch_type, index)
