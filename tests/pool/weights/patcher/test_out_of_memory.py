"""Proves that memory running out is recognised as what really is raised for it, on the host and on devices, and nothing
else is; that errors travel with their rungs; and that letting go of one frees what its frames held."""

from __future__ import annotations

import errno
import gc
import traceback
import weakref

import numpy as np
import pytest
import torch

from modelpool.pool.values.specs.spec import OomStep
from modelpool.pool.weights.patcher.out_of_memory import (
    ExhaustedMemory,
    OutOfHostMemory,
    RanOutOfMemory,
    exhausted_memory,
    release_frames,
)
from tests.each_case import each_case

SIM, CPU = torch.device("meta"), torch.device("cpu")  # any device with memory of its own


def raised_by(make: object) -> BaseException:
    assert callable(make)
    with pytest.raises(BaseException) as caught:
        make()
    return caught.value


@pytest.mark.parametrize(
    ("make", "whose"),
    [
        (lambda: torch.empty(1 << 60, dtype=torch.uint8), ExhaustedMemory.HOST),
        (lambda: np.empty(1 << 60, dtype=np.uint8), ExhaustedMemory.HOST),
        (lambda: bytearray(1 << 60), ExhaustedMemory.HOST),
        (lambda: (_ for _ in ()).throw(OSError(errno.ENOMEM, "Cannot allocate memory")), ExhaustedMemory.HOST),
        (lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory")), ExhaustedMemory.DEVICE),
        (lambda: torch.ones(2) @ torch.ones(3), None),
        (lambda: open("/nonexistent/file"), None),  # noqa: SIM115
    ],
    ids=["torch host", "numpy", "python", "kernel", "device", "shapes", "no file"],
)
def test_what_is_really_raised_is_recognised(make: object, whose: ExhaustedMemory | None) -> None:
    error = raised_by(make)
    assert exhausted_memory(error, SIM) is whose
    on_cpu = None if whose is None else ExhaustedMemory.DEVICE
    assert exhausted_memory(error, CPU) is on_cpu, "on a CPU the host's memory is the device's"


#: as devices print it
SAID = {
    "MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB). Tried to allocate 1.00 GB": "mps",
    "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity)": "npu",
    "MLU out of memory. Tried to allocate 1.00 GiB (MLU 0; 16.00 GiB total capacity)": "mlu",
    "Could not allocate tensor with 4915840 bytes. There is not enough GPU video memory available!": "privateuseone",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)": "xpu",
    "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.": "cuda",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`": "cuda",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`": "cuda",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED": "cuda",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED": "cuda",
    "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED": "cuda",
    "GET was unable to find an engine to execute this computation": "cuda",
    "FIND was unable to find an engine to execute this computation": "cuda",
    "HIP error: out of memory": "cuda",
    "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`": "cuda",
}


class NamedDevice:
    """A device of a kind that this torch may not know."""

    def __init__(self, kind: str) -> None:
        self.type = kind


@each_case("kind", [RuntimeError, torch.AcceleratorError])
@each_case("said", SAID)
def test_what_devices_say_in_other_errors_is_recognised(said: str, kind: type[RuntimeError]) -> None:
    """Found in a review: such runs skipped the ladder, and one AcceleratorError gave up the whole worker."""
    assert exhausted_memory(kind(said), NamedDevice(SAID[said])) is ExhaustedMemory.DEVICE
    assert exhausted_memory(kind(said)) is ExhaustedMemory.DEVICE, "on a device that is not known"
    assert exhausted_memory(kind(said), NamedDevice("sim")) is None, "these are another device's words"
    assert exhausted_memory(ValueError(said)) is None


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
    ],
)
def test_other_faults_of_a_device_are_not_taken_for_it(said: str) -> None:
    assert exhausted_memory(torch.AcceleratorError(said)) is None


@pytest.mark.parametrize("kind", [RanOutOfMemory, OutOfHostMemory])
def test_errors_say_which_rungs_were_climbed(kind: type[RanOutOfMemory] | type[OutOfHostMemory]) -> None:
    error = kind("no room", (OomStep.DROP_CACHES, OomStep.DIVIDE))
    assert error.oom_steps == (OomStep.DROP_CACHES, OomStep.DIVIDE)
    assert str(error) == "no room"
    assert isinstance(error, (torch.OutOfMemoryError, MemoryError))


def test_letting_go_frees_what_frames_hold_and_keeps_the_lines() -> None:
    class Tensorlike:
        pass

    held: list[weakref.ref[Tensorlike]] = []

    def inner() -> None:
        thing = Tensorlike()
        held.append(weakref.ref(thing))
        raise ValueError("inner")

    def outer() -> None:
        try:
            inner()
        except ValueError as error:
            raise RuntimeError("outer") from error

    gc.disable()
    try:
        error = raised_by(outer)
        assert held[0]() is not None
        release_frames(error)
        assert held[0]() is None
    finally:
        gc.enable()
    text = "".join(traceback.format_exception(error))
    assert "in inner" in text
    assert "in outer" in text
