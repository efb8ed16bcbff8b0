"""Detects the devices of this machine and problems with them, without using device memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from modelpool.pool.devices.accelerator_memory import memory_calls
from modelpool.pool.devices.capabilities import (
    DeviceCapabilities,
    capabilities_of,
    cuda_capabilities,
    detect_capabilities,
    weakest,
)
from modelpool.pool.devices.device_kinds import device_kind
from modelpool.pool.devices.kind_names import ACCELERATORS, AUTO, DeviceKind
from modelpool.pool.devices.memory_limits import HostMemory, host_memory
from modelpool.pool.devices.nvml import GpuProcess, NvmlReading, find_nvml, read_nvml
from modelpool.pool.devices.torch_modules import FindModule, device_count, device_module
from modelpool.pool.values.core.errors import UserError

#: paths by which drivers list cards, independent of the torch build
NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")
AMD_DRIVER = Path("/dev/kfd")


@dataclass(frozen=True, slots=True)
class DetectedDevice:
    """One device of this machine.

    free_bytes  free memory, including other processes' use; None if the device does not report it, or querying would
                use some: a driver queried through torch creates a context on the device
    users       the processes that use it, if known
    """

    kind: DeviceKind
    index: int
    capabilities: DeviceCapabilities
    free_bytes: int | None
    users: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """A suggestion or a problem. `is_broken`: nothing runs before it is fixed."""

    what: str
    remedy: str
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Detected:
    """The accelerators of this machine by preference, its host memory, and problems."""

    devices: tuple[DetectedDevice, ...]
    host: HostMemory
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """Version and build of torch. `cuda` and `rocm` are versions, None if it was built without."""

    version: str
    cuda: str | None
    rocm: str | None


def torch_build() -> TorchBuild:
    """Return the torch build of this process."""
    return TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)


def detect(
    nvml: NvmlReading,
    find_module: FindModule = device_module,
    host: HostMemory | None = None,
    nvidia_cards: Path = NVIDIA_CARDS,
    amd_driver: Path = AMD_DRIVER,
) -> Detected:
    """Return all accelerators that this process can use. Never fails if a package or driver is missing.

    Except for Apple devices, free memory is queried only through NVML.
    """
    devices: list[DetectedDevice] = []
    problems: list[Problem] = []
    memory = host or host_memory()
    for kind in ACCELERATORS:
        try:
            module = find_module(kind)
            count = device_count(module)
        except UserError as error:
            problems.append(Problem(str(error), "install the version that belongs to this torch, or remove it"))
            continue
        for index in range(count):
            try:
                devices.append(_device(kind, module, index, nvml, find_module))
            except (RuntimeError, UserError) as error:
                what = f"{kind.value}:{index} does not answer: {error}"
                problems.append(Problem(what, "free it or restart its driver; see the driver's own tool", True))
    problems += _unused_cards(devices, nvml, nvidia_cards, amd_driver)
    if nvml.problem and any(device.kind is DeviceKind.CUDA for device in devices):
        what = f"what is free on the cards and who uses them is not known: {nvml.problem}"
        problems.append(Problem(what, "pip install nvidia-ml-py"))
    return Detected(tuple(devices), memory, tuple(problems))


def capabilities_here(
    name: str, nvml: NvmlReading | None = None, find_module: FindModule = device_module
) -> DeviceCapabilities:
    """Return the capabilities of the devices of kind `name`, for size estimates without computing on one.

    The weakest of this machine; else the assumed ones (`capabilities_of`). Nvidia cards are queried by NVML where it is
    installed: the controller computes nothing, sees every card of its node, and must not initialise CUDA. Uses no
    device memory. `name` may be "auto" as in `device_kind`. Raises UnknownName.
    """
    if name in (AUTO, DeviceKind.CUDA.value) and find_module(DeviceKind.ROCM) is None:
        cards = (nvml or read_nvml(find_nvml())).cards
        if cards:
            return weakest(cuda_capabilities(card.name, card.generation, card.total_bytes) for card in cards)
    kind = device_kind(name, find_module)
    if kind.computes_on_host:
        return capabilities_of(kind.value)
    try:
        count = device_count(find_module(kind))
        found = [detect_capabilities(kind, index, find_module=find_module) for index in range(count)]
    except (RuntimeError, UserError):
        found = []
    return weakest(found) if found else capabilities_of(kind.value)


def _device(kind: DeviceKind, module: Any, index: int, nvml: NvmlReading, find_module: FindModule) -> DetectedDevice:
    capabilities = detect_capabilities(kind, index, find_module=find_module)
    uuid = ""
    if kind is DeviceKind.CUDA:
        uuid = str(getattr(module.get_device_properties(index), "uuid", ""))
    card = nvml.card(uuid) if uuid else None
    if card is not None:
        return DetectedDevice(kind, index, capabilities, card.free_bytes, card.processes)
    driver = memory_calls(kind, module, index).driver if kind is DeviceKind.MPS else None
    return DetectedDevice(kind, index, capabilities, None if driver is None else driver()[0])


def _unused_cards(
    devices: list[DetectedDevice], nvml: NvmlReading, nvidia_cards: Path, amd_driver: Path
) -> list[Problem]:
    """Cards of the system that torch does not see."""
    kinds = {device.kind for device in devices}
    problems = []
    if DeviceKind.CUDA not in kinds and (nvml.cards or _has_entries(nvidia_cards)):
        names = f" ({', '.join(card.name for card in nvml.cards)})" if nvml.cards else ""
        if torch.version.cuda is None:
            what = f"this machine has an Nvidia card{names}, and torch {torch.__version__} was built without CUDA"
            problems.append(Problem(what, "install torch built for CUDA: see pytorch.org/get-started"))
        else:
            what = f"this machine has an Nvidia card{names} that torch does not see"
            remedy = "check whether CUDA_VISIBLE_DEVICES hides it, and whether the driver is older than this CUDA"
            problems.append(Problem(what, f"{remedy} ({torch.version.cuda})"))
    if DeviceKind.ROCM not in kinds and DeviceKind.CUDA not in kinds and amd_driver.exists():
        if torch.version.hip is None:
            what = f"this machine has AMD's driver for ROCm, and torch {torch.__version__} was built without it"
            problems.append(Problem(what, "install torch built for ROCm: see pytorch.org/get-started"))
        else:
            what = "this machine has AMD's driver for ROCm, and torch sees no card"
            remedy = "add the user to the groups render and video; a card that this ROCm does not know may need "
            problems.append(Problem(what, remedy + "HSA_OVERRIDE_GFX_VERSION"))
    return problems


def _has_entries(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:
        return False
