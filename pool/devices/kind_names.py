"""The kinds of device that a pool runs on, and what is always so of each. Torch-free.

Knows names; does not know which of them this machine has (`pool.devices.detection`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class DeviceKind(Enum):
    """Where a worker computes. The values are the names in configurations."""

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
        """What is always so of this kind."""
        return FACTS[self]

    @property
    def computes_on_host(self) -> bool:
        """The arithmetic is the CPU's."""
        return self in (DeviceKind.SIM, DeviceKind.CPU)


@dataclass(frozen=True, slots=True)
class KindFacts:
    """What is always so of one kind.

    title               for people
    torch_type          what `torch.device` calls it
    package             the package beside torch that brings it; None where torch itself does
    tells_memory        it can be asked how much memory it has
    shares_host_memory  its memory is the host's
    """

    title: str
    torch_type: str
    package: str | None = None
    tells_memory: bool = True
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
            "GPU by DirectML", "privateuseone", package="torch_directml", tells_memory=False
        ),
        DeviceKind.SIM: KindFacts("simulated GPU", "sim"),
        DeviceKind.CPU: KindFacts("CPU", "cpu", shares_host_memory=True),
    }
)

#: kinds of accelerator, in the order in which one is chosen where a machine has several
ACCELERATORS = (
    DeviceKind.CUDA,
    DeviceKind.ROCM,
    DeviceKind.XPU,
    DeviceKind.MPS,
    DeviceKind.NPU,
    DeviceKind.MLU,
    DeviceKind.DIRECTML,
)

#: kinds that Ray counts as its resource "GPU", gives to workers and hides from the others
RAY_COUNTS = (DeviceKind.CUDA, DeviceKind.ROCM, DeviceKind.XPU)
#: the name in configurations that leaves the choice of the kind to `choose_kind`
AUTO = "auto"


def choose_kind(
    wanted: DeviceKind | None, seen: Collection[DeviceKind], has_gpus: bool, is_disabled: bool = False
) -> DeviceKind:
    """The kind that workers run on. Pure; the pool's plan, its workers and `modelpool doctor` all ask here.

    wanted       what a person asked for; None leaves it to the machine: GPUs that Ray counts, else simulated ones
    seen         kinds that torch finds where it is asked. ROCm answers to the name "cuda" too; where nothing is seen
                 GPUs are taken for Nvidia's
    has_gpus     Ray has GPUs to give, of one of `RAY_COUNTS`
    is_disabled  the policy says that no device is used
    """
    if is_disabled:
        return DeviceKind.CPU
    if wanted is None and not has_gpus:
        return DeviceKind.SIM
    if wanted is None:
        return next((kind for kind in RAY_COUNTS if kind in seen), DeviceKind.CUDA)
    is_rocm = DeviceKind.ROCM in seen and DeviceKind.CUDA not in seen
    return DeviceKind.ROCM if wanted is DeviceKind.CUDA and is_rocm else wanted
