"""torch's modules for devices that no test machine has: the same functions over plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.torch_modules import FindModule
from modelpool.pool.values.core.errors import UserError

GIB = 1 << 30


@dataclass
class Properties:
    """What drivers tell of a device; each kind has some of these."""

    name: str
    total_memory: int
    major: int = 8
    minor: int = 0
    gcnArchName: str = ""
    uuid: str = ""
    is_integrated: bool = False


@dataclass
class UsualModule:
    """As torch.cuda, torch.xpu, torch_npu and torch_mlu: two devices of one card's properties.

    foreign_bytes  in use by other processes
    """

    properties: Properties
    bfloat16: bool = True
    foreign_bytes: int = 0
    allocated_bytes: int = 0
    cached_bytes: int = 0
    peak_bytes: int = 0
    shares: dict[int, float] = field(default_factory=dict)
    count: int = 2
    is_lost: bool = False

    def is_available(self) -> bool:
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, index: int) -> str:
        return self.properties.name

    def get_device_properties(self, index: int) -> Properties:
        if self.is_lost:
            raise RuntimeError("device error: unspecified failure")
        return self.properties

    def is_bf16_supported(self) -> bool:
        return self.bfloat16

    def mem_get_info(self, index: int) -> tuple[int, int]:
        size_bytes = self.properties.total_memory
        return size_bytes - self.foreign_bytes - self.memory_reserved(index), size_bytes

    def memory_allocated(self, index: int) -> int:
        return self.allocated_bytes

    def memory_reserved(self, index: int) -> int:
        return self.allocated_bytes + self.cached_bytes

    def max_memory_allocated(self, index: int) -> int:
        return self.peak_bytes

    def reset_peak_memory_stats(self, index: int) -> None:
        self.peak_bytes = self.allocated_bytes

    def set_per_process_memory_fraction(self, share: float, index: int) -> None:
        assert 0 < share <= 1
        self.shares[index] = share

    def get_per_process_memory_fraction(self, index: int) -> float:
        return self.shares.get(index, 1.0)

    def empty_cache(self) -> None:
        self.cached_bytes = 0


@dataclass
class AppleModule:
    """As torch.mps: no index anywhere, no peak, no properties."""

    recommended_bytes: int = 12 * GIB
    allocated_bytes: int = 0
    cached_bytes: int = 0
    share: float | None = None

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def recommended_max_memory(self) -> int:
        return self.recommended_bytes

    def current_allocated_memory(self) -> int:
        return self.allocated_bytes

    def driver_allocated_memory(self) -> int:
        return self.allocated_bytes + self.cached_bytes

    def set_per_process_memory_fraction(self, share: float) -> None:
        self.share = share

    def empty_cache(self) -> None:
        self.cached_bytes = 0


class DirectMlModule:
    """As torch_directml: names and devices, and nothing of memory."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def device_name(self, index: int) -> str:
        return "Some GPU\0"

    def device(self, index: int) -> Any:
        import torch

        return torch.device("privateuseone", index)


def only(**modules: Any) -> FindModule:
    """A machine with these modules, by the name of their kind, and no other. A string is what loading one complains."""

    def find(kind: DeviceKind) -> Any:
        found = modules.get(kind.value)
        if isinstance(found, str):
            raise UserError(found)
        return found

    return find


def every_accelerator() -> dict[DeviceKind, Any]:
    """One module of each kind, with devices."""
    usual = {
        DeviceKind.CUDA: Properties("NVIDIA GeForce RTX 4090", 24 * GIB, 8, 9),
        DeviceKind.ROCM: Properties("AMD Radeon RX 7900 XTX", 24 * GIB, gcnArchName="gfx1100:sramecc-"),
        DeviceKind.XPU: Properties("Intel(R) Arc(TM) A770", 16 * GIB),
        DeviceKind.NPU: Properties("Ascend910B", 64 * GIB),
        DeviceKind.MLU: Properties("MLU590", 80 * GIB, major=5),
    }
    modules: dict[DeviceKind, Any] = {kind: UsualModule(properties) for kind, properties in usual.items()}
    return {**modules, DeviceKind.MPS: AppleModule(), DeviceKind.DIRECTML: DirectMlModule()}
