"""Reads names, memory and users of Nvidia cards by NVML, if its package is installed.

NVML creates no context on a card, so queries use no device memory. A missing package `pynvml` (distribution
nvidia-ml-py) or driver is not an error.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

PACKAGE = "pynvml"
#: of NVML
MIG_ENABLED = 1


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a card. `used_bytes` is None if the driver does not report it (some systems, some
    permissions)."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """A card, or an instance of a divided one (MIG), as reported by NVML. `generation` is its compute capability."""

    uuid: str
    name: str
    generation: tuple[int, int]
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...]


@dataclass(frozen=True, slots=True)
class NvmlReading:
    """Result of a query. `problem` explains why there are no cards."""

    cards: tuple[NvidiaCard, ...] = ()
    driver: str = ""
    problem: str = ""

    def card(self, uuid: str) -> NvidiaCard | None:
        """The card of this UUID, with or without its prefix "GPU-" or "MIG-"."""
        return next((card for card in self.cards if _bare(card.uuid) == _bare(uuid)), None)


def find_nvml() -> Any:
    """Return the module `pynvml`, or None if it is not installed."""
    return importlib.import_module(PACKAGE) if importlib.util.find_spec(PACKAGE) is not None else None


def read_nvml(nvml: Any) -> NvmlReading:
    """Query the cards of this machine with `nvml` (see `find_nvml`)."""
    if nvml is None:
        return NvmlReading(problem="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvmlReading(problem=f"NVML does not start ({error})")
    try:
        cards = tuple(card for index in range(nvml.nvmlDeviceGetCount()) for card in _cards(nvml, index))
        return NvmlReading(cards, driver=_text(nvml.nvmlSystemGetDriverVersion()))
    except nvml.NVMLError as error:
        return NvmlReading(problem=f"NVML does not answer ({error})")
    finally:
        nvml.nvmlShutdown()


def _cards(nvml: Any, index: int) -> Iterator[NvidiaCard]:
    """The card at `index`; if it is divided (MIG), its instances, as processes see these alone."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    generation = _generation(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    instances = list(_instances(nvml, handle))
    for each in instances or [handle]:
        yield _card(nvml, each, generation)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
        count = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) if current == MIG_ENABLED else 0
    except (AttributeError, nvml.NVMLError):
        return  # most cards cannot be divided, and old releases do not know it
    for place in range(count):
        with suppress(nvml.NVMLError):  # no instance at this place
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)


def _card(nvml: Any, handle: Any, generation: tuple[int, int]) -> NvidiaCard:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return NvidiaCard(
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        generation=generation,
        total_bytes=int(memory.total),
        free_bytes=int(memory.free),
        processes=_processes(nvml, handle),
    )


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    try:
        found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return ()  # not available on this system or to this user
    return tuple(GpuProcess(int(p.pid), _process_name(int(p.pid)), _bytes(p.usedGpuMemory)) for p in found)


def _process_name(pid: int) -> str:
    """Its name; in a container, host processes cannot be looked up."""
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "a process that is not visible from here"


def _generation(found: Any) -> tuple[int, int]:
    major, minor = found
    return int(major), int(minor)


def _bytes(value: Any) -> int | None:
    return None if value is None else int(value)


def _text(value: Any) -> str:
    """Older releases return bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
