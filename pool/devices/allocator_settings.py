"""Chooses the settings of torch's CUDA allocator for a process: segments that grow, unless the user chose otherwise.

Plans count the bytes of tensors; the cap of the process counts the bytes that the allocator has reserved. Segments of
fixed size leave gaps between both when models of different sizes follow each other, and memory then runs out although
the plan holds. Segments that grow have no such gaps.

Some systems refuse them: at the first allocation, or later under load as WSL 2 does, where they are not used. Elsewhere
the first allocation is a small one that shows it (`prepare_segments`). Torch-free.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Callable, Mapping

from modelpool.pool.devices.kind_names import DeviceKind

_LOG = logging.getLogger(__name__)

#: environment variables that torch reads at its first use of a device: the current name and the one before 2.9
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments"
#: size of the first allocation of a process
PROBE_BYTES = 2 << 20


def allocator_settings(
    kind: DeviceKind, environment: Mapping[str, str], system: str = sys.platform, release: str | None = None
) -> str | None:
    """Return the settings to apply before the first allocation on a device of `kind`; None to leave torch's. Pure.

    Settings of the user are kept, and none is added if they name a backend, or segments, themselves. Only Linux maps
    segments that grow. `release` is the release of its kernel; None: of this machine.
    """
    if kind is not DeviceKind.CUDA or system != "linux" or is_wsl(platform.release() if release is None else release):
        return None
    given = _given(environment)
    if EXPANDABLE in given or "backend" in given:
        return None
    return ",".join(part for part in (given, f"{EXPANDABLE}:True") if part)


def is_wsl(release: str) -> bool:
    """Whether a kernel of this release is the Linux of Windows. Its CUDA driver may refuse segments that grow, also
    after it took some: pytorch issue 192330 and microsoft/WSL issue 41176."""
    return "microsoft" in release.lower()


def prepare_segments(
    kind: DeviceKind,
    probe: Callable[[], object],
    change: Callable[[str], object],
    environment: Mapping[str, str],
    release: str | None = None,
) -> str:
    """Apply `allocator_settings` by `change`, and make the first allocation by `probe`: if the system refuses it with
    segments that grow, the process uses segments of fixed size, and a warning says so.

    Returns the settings in effect; "" for torch's own. Raises what `probe` raises without segments that grow.
    """
    chosen = allocator_settings(kind, environment, release=release)
    if chosen is not None:
        change(chosen)
    settings = _given(environment) if chosen is None else chosen
    if kind is not DeviceKind.CUDA or re.search(_GROWING, settings) is None:
        return settings
    try:
        probe()
    except RuntimeError as refused:
        settings = re.sub(_GROWING, f"{EXPANDABLE}:False", settings)
        change(settings)
        probe()
        _LOG.warning(
            "this system refuses memory segments that grow (%s:True): %s. This process uses segments of fixed size: "
            "gaps between them may make runs slower or run out of memory where a plan leaves little room",
            EXPANDABLE,
            refused,
        )
    return settings


_GROWING = rf"{EXPANDABLE}\s*:\s*True"


def _given(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in VARIABLES if environment.get(name)), "")
