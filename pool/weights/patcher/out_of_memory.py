"""Recognises out-of-memory errors of the device and of the host, and defines typed errors for them.

torch, numpy and the kernel each report it differently; here are two types. Does not know how to react
(`pool.weights.plan.oom_ladder`), nor who does (`pool.engine.engine`).
"""

from __future__ import annotations

import errno
import gc
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import MappingProxyType

import torch

from modelpool.pool.devices.device_kinds import DeviceMemory
from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.values.specs.spec import OomStep

#: messages of torch's host allocator, which raises a plain RuntimeError. Source: c10/core/impl/alloc_cpu.cpp
_HOST_ALLOCATOR_ERRORS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

_CUDA_ERRORS = (
    # memory that torch's allocator did not request: for the driver, pinned memory, graphs. AcceleratorError, but the
    # device continues: cudaErrorMemoryAllocation is not among those that CUDA's documentation says end the context
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # a handle without memory for its workspace is not created
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # renamed in cuDNN 9
    "CUDNN_STATUS_NOT_INITIALIZED",
    # torch tries the kernels for a convolution by turns and reports only that none ran: their workspaces did not fit.
    # Source: aten/src/ATen/native/cudnn/Conv_v8.cpp
    "GET was unable to find an engine to execute this computation",
    "FIND was unable to find an engine to execute this computation",
)
_ROCM_ERRORS = (
    "HIP error: out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate",
    "miopenStatusAllocFailed",
)
#: messages of devices in a plain RuntimeError or an AcceleratorError, where torch has no OutOfMemoryError. None of them
#: is in a torch for CPUs, against which the messages of the host were checked. Sources: for CUDA and ROCm torch's
#: aten/src/ATen/cuda/Exceptions.cpp and the status names in the documentation of cuBLAS, cuDNN, hipBLAS and MIOpen; for
#: the others the output of the vendors' packages, as reported to pytorch (MPS, XPU), vllm-ascend, microsoft/DirectML,
#: and the tests of torch_mlu. A library that could not be initialised may have other causes: the retries then fail with
#: the same message, which the last error repeats
_DEVICE_ERRORS: Mapping[DeviceKind, tuple[str, ...]] = MappingProxyType(
    {
        DeviceKind.CUDA: _CUDA_ERRORS,
        DeviceKind.ROCM: _ROCM_ERRORS,
        DeviceKind.XPU: ("XPU out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
        DeviceKind.MPS: ("MPS backend out of memory",),
        DeviceKind.NPU: ("NPU out of memory",),
        DeviceKind.MLU: ("MLU out of memory",),
        DeviceKind.DIRECTML: ("not enough GPU video memory available",),
    }
)

_UNITS = MappingProxyType({"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30})


class RanOutOfMemory(torch.OutOfMemoryError):
    """A run did not get the device memory it needed, though it fits the budget.

    oom_steps  measures that were tried, in order; together they were not enough
    """

    def __init__(self, message: str, oom_steps: tuple[OomStep, ...] = ()) -> None:
        super().__init__(message)
        self.oom_steps = oom_steps

    @property
    def rungs(self) -> tuple[OomStep, ...]:
        """Deprecated name of `oom_steps`."""
        return self.oom_steps


class OutOfHostMemory(MemoryError):
    """The host has no memory left for what a run needs there.

    oom_steps  measures that were tried before
    """

    def __init__(self, message: str, oom_steps: tuple[OomStep, ...] = ()) -> None:
        super().__init__(message)
        self.oom_steps = oom_steps

    @property
    def rungs(self) -> tuple[OomStep, ...]:
        """Deprecated name of `oom_steps`."""
        return self.oom_steps


class ExhaustedMemory(Enum):
    """The memory that is exhausted."""

    DEVICE = "device"
    HOST = "host"


def exhausted_memory(error: BaseException, device: torch.device | None = None) -> ExhaustedMemory | None:
    """Return which memory `error` reports as exhausted, in a process that computes on `device` (None: unknown); None
    for any other error. If the device is the CPU, its memory is the host's."""
    if isinstance(error, torch.OutOfMemoryError) or _is_device_error(error, device):
        return ExhaustedMemory.DEVICE
    is_host = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(message in str(error) for message in _HOST_ALLOCATOR_ERRORS))
    )
    if not is_host:
        return None
    return ExhaustedMemory.DEVICE if device is not None and device.type == "cpu" else ExhaustedMemory.HOST


def requested_bytes(error: BaseException) -> int:
    """Return the bytes of the allocation that failed with `error`; 0 if it does not tell. Source: the messages of c10's
    CUDACachingAllocator.cpp, "Tried to allocate 2.00 GiB"."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|[KMG]iB)", str(error))
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])


def _is_device_error(error: BaseException, device: torch.device | None) -> bool:
    if not isinstance(error, RuntimeError):  # AcceleratorError is one
        return False
    return any(
        message in str(error)
        for kind, signatures in _DEVICE_ERRORS.items()
        if device is None or device.type == kind.facts.torch_type
        for message in signatures
    )


def release_frames(error: BaseException) -> None:
    """Clear the frames of the functions that `error` passed through, which would keep device tensors alive as long as
    the error. The traceback can still be printed."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)


def release_unused(memory: DeviceMemory) -> None:
    """Return unused memory of this process to the device: garbage, and the allocator's cache.

    Never raises: it is called during error handling, and a lost device has nothing to release.
    """
    gc.collect()
    with suppress(RuntimeError):
        memory.release_cached()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield `error`, its causes and its contexts; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
