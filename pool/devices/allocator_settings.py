"""Chooses the settings of torch's CUDA allocator for a process: segments that grow, unless the user chose otherwise.

Plans count the bytes of tensors; the cap of the process counts the bytes that the allocator has reserved. Segments of
fixed size leave gaps between both when models of different sizes follow each other, and memory then runs out although
the plan holds. Segments that grow have no such gaps. Torch-free.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from modelpool.pool.devices.kind_names import DeviceKind

#: environment variables that torch reads at its first use of a device: the current name and the one before 2.9
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments"


def allocator_settings(kind: DeviceKind, environment: Mapping[str, str], platform: str = sys.platform) -> str | None:
    """Return the settings to apply before the first allocation on a device of `kind`; None to leave torch's. Pure.

    Settings of the user are kept, and none is added if they name a backend, or segments, themselves. Only Linux maps
    segments that grow.
    """
    if kind is not DeviceKind.CUDA or platform != "linux":
        return None
    given = next((environment[name] for name in VARIABLES if environment.get(name)), "")
    if EXPANDABLE in given or "backend" in given:
        return None
    return ",".join(part for part in (given, f"{EXPANDABLE}:True") if part)
