"""A capture that fails leaves the thread on its stream and the allocator out of the capture's pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from modelpool.pool.devices.cuda_graphs import CudaGraphs
from modelpool.pool.devices.device_waits import FirstWait, WaitsForDevice
from modelpool.pool.devices.sim import device as sim
from tests.pool.devices.fake_cuda import REFUSAL, FakeCuda

INDEX = 63  # of a simulated device that no other test uses


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    fake.install(monkeypatch)
    return fake


def test_a_failed_capture_leaves_stream_and_allocator_as_before(cuda: FakeCuda) -> None:
    """Found in a review: the thread stayed on the capture stream, and all later memory came from the dead pool."""

    def interrupted() -> None:
        if cuda.allocating:
            raise KeyboardInterrupt

    def without_memory() -> None:
        if cuda.allocating:
            raise torch.OutOfMemoryError("CUDA out of memory")

    def refused_and_hidden() -> None:
        try:
            cuda.refuse()
        except RuntimeError:
            return  # as libraries that try several kernels

    cases: dict[str, tuple[Callable[[], None], type[BaseException]]] = {
        "refused": (cuda.refuse, torch.AcceleratorError),
        "refused, and the call goes on": (refused_and_hidden, torch.AcceleratorError),
        "interrupted": (interrupted, KeyboardInterrupt),
        "without memory": (without_memory, torch.OutOfMemoryError),
    }

    failures = []
    for name, (run, expected) in cases.items():
        begun = cuda.captures_begun
        with pytest.raises(expected):
            CudaGraphs(torch.device("cuda", 0)).capture(run)
        assert cuda.captures_begun == begun + 1
        if not cuda.is_as_before or cuda.pools:
            failures.append((name, cuda.streams, cuda.allocating, cuda.pools))
            cuda.streams, cuda.allocating, cuda.pools = ["compute"], set(), set()
    assert not failures
    graph = CudaGraphs(torch.device("cuda", 0)).capture(lambda: "made")
    assert (graph.output, cuda.is_as_before, len(cuda.pools)) == ("made", True, 1)


def test_a_refused_operation_is_what_is_raised(cuda: FakeCuda) -> None:
    """And not the driver's answer to the end of the capture."""
    with pytest.raises(torch.AcceleratorError, match=REFUSAL):
        CudaGraphs(torch.device("cuda", 0)).capture(cuda.refuse)


def test_a_first_run_that_fails_is_waited_for(cuda: FakeCuda) -> None:
    """What it read may be freed afterwards."""

    def run() -> None:
        raise ValueError("made up")

    with pytest.raises(ValueError, match="made up"):
        CudaGraphs(torch.device("cuda", 0)).capture(run)
    assert cuda.waits[-1] == ("compute", "capture")
    assert cuda.is_as_before


def test_a_call_that_reads_the_device_is_not_captured(cuda: FakeCuda) -> None:
    sim.install()
    sim.configure(INDEX, 1 << 20)
    device = torch.device("sim", INDEX)
    numbers, mask = torch.arange(4.0).to(device), torch.tensor([True, False, True, True]).to(device)
    reading: dict[str, Callable[[], object]] = {
        "a number": lambda: numbers.sum().item(),
        "a mask as an index": lambda: numbers[mask],
        "the places of a mask": lambda: mask.nonzero(),
        "a copy to the host": lambda: numbers.to("cpu"),
        "a copy from pageable memory": lambda: torch.ones(4).to(device),
    }

    for run in reading.values():
        with pytest.raises(WaitsForDevice, match="waits for the device in aten"):
            CudaGraphs(device).capture(run)
    assert cuda.captures_begun == 0

    def computing() -> Tensor:
        return torch.where(mask, numbers * 2, numbers)

    with FirstWait("sim") as first_wait:
        computing()
    assert not first_wait.operation


def test_a_graph_keeps_the_host_memory_that_it_copies_from(cuda: FakeCuda) -> None:
    """Found in a review: tables that a model computes on the host and sends, as rotary embeddings, were copied by each
    replay from pinned memory that torch's cache had handed out again."""

    def run() -> Tensor:
        table = torch.arange(4.0).cos()
        kept.append(table.data_ptr())
        return torch.empty(4, dtype=torch.float64).copy_(table, non_blocking=True) * 2  # a device of this machine

    kept: list[int] = []
    graph = CudaGraphs(torch.device("cuda", 0)).capture(run)
    assert kept[-1] in [tensor.data_ptr() for tensor in graph._read]
