"""Device kinds of a pool and their fixed properties. Torch-free.

`pool.devices.detection` finds which of them this machine has.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from modelpool.pool.devices.tested_versions import minor_version


class DeviceKind(Enum):
    """The kind of device on which a worker computes. The values are the names in configurations."""

    CUDA = "cuda"
    """Nvidia GPUs."""
    ROCM = "rocm"
    """AMD GPUs, which torch calls cuda as well."""
    XPU = "xpu"
    """Intel GPUs."""
    MPS = "mps"
    """Apple GPUs."""
    NPU = "npu"
    """Huawei Ascend."""
    MLU = "mlu"
    """Cambricon."""
    DIRECTML = "directml"
    """Any GPU under Windows, by DirectX."""
    SIM = "sim"
    """A simulated GPU (`pool.devices.sim.device`)."""
    CPU = "cpu"

    @property
    def facts(self) -> KindFacts:
        """Fixed properties of this kind."""
        return FACTS[self]

    @property
    def computes_on_host(self) -> bool:
        """Whether the CPU computes."""
        return self in (DeviceKind.SIM, DeviceKind.CPU)


@dataclass(frozen=True, slots=True)
class KindFacts:
    """Fixed properties of one device kind.

    title               display name
    torch_type          its name in `torch.device`
    package             the required package besides torch; None if torch is enough
    reports_memory      its memory size can be queried
    shares_host_memory  its memory is host memory
    """

    title: str
    torch_type: str
    package: str | None = None
    reports_memory: bool = True
    shares_host_memory: bool = False


FACTS: Mapping[DeviceKind, KindFacts] = MappingProxyType(
    {
        DeviceKind.CUDA: KindFacts("Nvidia GPU (CUDA)", "cuda"),
        DeviceKind.ROCM: KindFacts("AMD GPU (ROCm)", "cuda"),
        DeviceKind.XPU: KindFacts("Intel GPU (XPU)", "xpu"),
        DeviceKind.MPS: KindFacts("Apple GPU (MPS)", "mps", shares_host_memory=True),
        DeviceKind.NPU: KindFacts("Ascend NPU", "npu", package="torch_npu"),
        DeviceKind.MLU: KindFacts("Cambricon MLU", "mlu", package="torch_mlu"),
        DeviceKind.DIRECTML: KindFacts(
            "GPU by DirectML", "privateuseone", package="torch_directml", reports_memory=False
        ),
        DeviceKind.SIM: KindFacts("simulated GPU", "sim"),
        DeviceKind.CPU: KindFacts("CPU", "cpu", shares_host_memory=True),
    }
)

#: accelerator kinds by preference
ACCELERATORS = (
    DeviceKind.CUDA,
    DeviceKind.ROCM,
    DeviceKind.XPU,
    DeviceKind.MPS,
    DeviceKind.NPU,
    DeviceKind.MLU,
    DeviceKind.DIRECTML,
)

#: kinds that Ray counts as its resource "GPU", assigns to workers and hides from other processes
RAY_COUNTS = (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.XPU)
#: the name in configurations that leaves the choice of the kind to `choose_kind`
AUTO = "auto"
#: the first version of torch that allows device types in Python, as the simulated one is
SIMULATES_SINCE = (2, 10)
#: expected instead of "sim" before that version
NO_SIMULATION = '"cpu": simulated GPUs need torch 2.10 or newer'
#: expected instead of a kind of `RAY_COUNTS`
NO_GPU = "sim or cpu on a machine without GPUs in Ray"


def one_worker(kind: DeviceKind) -> str:
    """Return the expected number of workers for a kind that Ray does not count, in words."""
    return f"1: Ray cannot assign a separate {kind.facts.title} to each worker"


def host_kind() -> DeviceKind:
    """The kind of a machine without GPUs: simulated GPUs, or the CPU where the installed torch cannot simulate them."""
    try:
        installed = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # as on a driver's machine
        return DeviceKind.SIM
    return DeviceKind.SIM if minor_version(installed) >= SIMULATES_SINCE else DeviceKind.CPU


def choose_kind(
    wanted: DeviceKind | None, found: Collection[DeviceKind], has_gpus: bool, is_disabled: bool = False
) -> DeviceKind:
    """Return the device kind of workers. Depends on the arguments, and on the version of torch where there is no GPU;
    used by the pool's plan, its workers and `modelpool doctor`.

    wanted       kind requested by the user; None: GPUs that Ray counts, else `host_kind`
    found        kinds that torch finds in this process. ROCm also answers to the name "cuda"; if it finds none, GPUs
                 are assumed to be Nvidia's
    has_gpus     Ray has GPUs of one of `RAY_COUNTS`
    is_disabled  the policy disables devices
    """
    if is_disabled:
        return DeviceKind.CPU
    if wanted is None and not has_gpus:
        return host_kind()
    if wanted is None:
        return next((kind for kind in RAY_COUNTS if kind in found), DeviceKind.CUDA)
    is_rocm = DeviceKind.ROCM in found and DeviceKind.CUDA not in found
    return DeviceKind.ROCM if wanted is DeviceKind.CUDA and is_rocm else wanted
