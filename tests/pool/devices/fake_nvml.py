"""NVML's functions over plain numbers."""

# ruff: noqa: N802 - NVML's own names

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 1 << 30


class FakeError(Exception):
    """As pynvml.NVMLError."""


@dataclass
class FakeNvml:
    """Two cards; the first is used by this process and by one of another machine's numbers.

    fails_in   the function that raises
    instances  of the first card, which is divided (MIG); an instance at every second place
    """

    fails_in: str = ""
    is_old: bool = False
    instances: int = 0
    open_count: int = 0
    NVMLError: type[Exception] = field(default=FakeError)

    def _answer(self, function: str, value: Any) -> Any:
        if function == self.fails_in:
            raise FakeError(f"{function} failed")
        return value.encode() if self.is_old and isinstance(value, str) else value

    def nvmlInit(self) -> None:
        self._answer("nvmlInit", None)
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._answer("nvmlSystemGetDriverVersion", "580.1")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:
        if handle:
            raise FakeError("Not Supported")
        return [int(self.instances > 0), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> int:
        if place % 2 or place // 2 >= self.instances:
            raise FakeError("Not Found")
        return 100 + place

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.open_count == 1
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        if handle >= 100:
            return self._answer("nvmlDeviceGetUUID", f"MIG-{handle}")
        return self._answer("nvmlDeviceGetUUID", f"GPU-card-{handle}")

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return self._answer("nvmlDeviceGetName", "NVIDIA GeForce RTX 4090")

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return self._answer("nvmlDeviceGetCudaComputeCapability", [[8, 9], [7, 5]][handle])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        if handle >= 100:
            return SimpleNamespace(total=10 * GIB, free=9 * GIB)
        return self._answer("nvmlDeviceGetMemoryInfo", SimpleNamespace(total=24 * GIB, free=(20 + handle) * GIB))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=3 * GIB)
        hidden = SimpleNamespace(pid=1 << 30, usedGpuMemory=None)
        return self._answer("nvmlDeviceGetComputeRunningProcesses", [mine, hidden] if handle == 0 else [])
