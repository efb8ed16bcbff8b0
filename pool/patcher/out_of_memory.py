"""Running out of memory, on a device and on the host: how it is recognised, and the errors that say so.

torch, numpy and the kernel each have their own word for it; here are two. Does not know what to do about it
(`pool.plan.oom_ladder`), nor who does it (`pool.engine.engine`).
"""

from __future__ import annotations

import errno
import gc
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from types import MappingProxyType

import torch

from modelpool.pool.devices.kind_names import DeviceKind
from modelpool.pool.devices.kinds import DeviceMemory
from modelpool.pool.specs.spec import Rung

#: what torch's host allocator says; it raises a plain RuntimeError. Source: c10/core/impl/alloc_cpu.cpp
_HOST_ALLOCATOR_WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")

_CUDA_WORDS = (
    # what torch's allocator did not ask for: the driver's own needs, pinned memory, graphs. AcceleratorError, but the
    # device goes on: cudaErrorMemoryAllocation is not among those that CUDA's documentation says end the context
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # a handle that finds no room for its workspace is not made
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # its name since cuDNN 9
    "CUDNN_STATUS_NOT_INITIALIZED",
)
_ROCM_WORDS = (
    "HIP error: out of memory",
    "HIPBLAS_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_NOT_INITIALIZED when calling `hipblasCreate",
    "miopenStatusAllocFailed",
)
#: what devices say in a plain RuntimeError or an AcceleratorError, where torch has no OutOfMemoryError for it. Nothing
#: of it is in a torch for CPUs, against which the words of the host were checked. Sources: for CUDA and ROCm torch's
#: aten/src/ATen/cuda/Exceptions.cpp and the status names in the documentation of cuBLAS, cuDNN, hipBLAS and MIOpen; for
#: the others what their makers' packages print, as reported to pytorch (MPS, XPU), vllm-ascend, microsoft/DirectML, and
#: the tests of torch_mlu. That a library could not be initialised may have other causes: the tries that follow then
#: fail with the same words, which the last error repeats
_DEVICE_WORDS: Mapping[DeviceKind, tuple[str, ...]] = MappingProxyType(
    {
        DeviceKind.CUDA: _CUDA_WORDS,
        DeviceKind.ROCM: _ROCM_WORDS,
        DeviceKind.XPU: ("XPU out of memory", "UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"),
        DeviceKind.MPS: ("MPS backend out of memory",),
        DeviceKind.NPU: ("NPU out of memory",),
        DeviceKind.MLU: ("MLU out of memory",),
        DeviceKind.DIRECTML: ("not enough GPU video memory available",),
    }
)


class RanOutOfMemory(torch.OutOfMemoryError):
    """A run did not find the device memory it needed, though it fits the budget.

    rungs  what was done about it, in order; all of it was not enough
    """

    def __init__(self, message: str, rungs: tuple[Rung, ...] = ()) -> None:
        super().__init__(message)
        self.rungs = rungs


class OutOfHostMemory(MemoryError):
    """The host has no memory left for what a run needs there.

    rungs  what was done about memory before it
    """

    def __init__(self, message: str, rungs: tuple[Rung, ...] = ()) -> None:
        super().__init__(message)
        self.rungs = rungs


class Exhausted(Enum):
    """Whose memory."""

    DEVICE = "device"
    HOST = "host"


def exhausted(error: BaseException, device: torch.device | None = None) -> Exhausted | None:
    """Whose memory `error` says is exhausted, in a process that computes on `device` (None: it is not known on which);
    None when it is about something else. Where the device is the CPU, its memory is the host's."""
    if isinstance(error, torch.OutOfMemoryError) or _device_says_so(error, device):
        return Exhausted.DEVICE
    is_host = (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and any(words in str(error) for words in _HOST_ALLOCATOR_WORDS))
    )
    if not is_host:
        return None
    return Exhausted.DEVICE if device is not None and device.type == "cpu" else Exhausted.HOST


def _device_says_so(error: BaseException, device: torch.device | None) -> bool:
    if not isinstance(error, RuntimeError):  # AcceleratorError is one
        return False
    return any(
        words in str(error)
        for kind, told in _DEVICE_WORDS.items()
        if device is None or device.type == kind.facts.torch_type
        for words in told
    )


def let_go(error: BaseException) -> None:
    """Drop what the functions that `error` came out of had in hand: device tensors, which their frames would hold for
    as long as the error lives. Its lines can still be printed."""
    for one in _chain(error):
        traceback.clear_frames(one.__traceback__)


def give_back_unused(memory: DeviceMemory) -> None:
    """Let the device have back what this process holds of it without using it: garbage, and the allocator's cache.

    Never raises: it is called when things go wrong already, and a device that is gone has nothing to give back.
    """
    gc.collect()
    with suppress(RuntimeError):
        memory.release_cached()


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from, and what was being handled; each once."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__]
