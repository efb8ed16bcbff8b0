"""Work on a device that is not the first one of the process: kernels of libraries run on the current device, wherever
their tensors are, and a thread begins with the first one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from modelpool.pool.devices.copy_streams import CopyStreams
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.engine.compute_thread import ComputeThread
from modelpool.pool.weights.quant import kitchen_dispatch
from modelpool.pool.weights.quant.formats import WEIGHT
from tests.pool.devices.fake_streams import Trace

SECOND = torch.device("cuda", 1)


@dataclass
class Cuda:
    """The current device, as `torch.cuda.device` and streams of the second device set it."""

    current: int = 0

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        try:
            yield
        finally:
            self.current = before


def test_runs_compute_with_their_device_as_the_current_one() -> None:
    """Found in a review: only runs in a thread of their own had it."""
    cuda, maker = Cuda(), Trace().maker
    streams = CopyStreams(replace(maker, on=lambda stream: cuda.device(SECOND)))
    thread = ComputeThread(TransferPipeline(torch.device("cpu"), streams))
    try:
        found = [thread.call(lambda: cuda.current)]
        thread.renew()
        found.append(thread.call(lambda: cuda.current))
    finally:
        thread.close()
    assert found == [1, 1]
    assert cuda.current == 0, "the caller has the device that it had"


def test_weights_are_packed_and_unpacked_on_their_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are also loaded outside of runs."""
    cuda, found = Cuda(), []
    monkeypatch.setattr(torch.cuda, "device", cuda.device)
    monkeypatch.setattr(kitchen_dispatch, "UNPACKERS", {"a": lambda *given: found.append(cuda.current)})
    monkeypatch.setattr(kitchen_dispatch, "QUANTIZERS", {"a": lambda *given: found.append(cuda.current)})
    monkeypatch.setattr(kitchen_dispatch, "fp8_stochastic", lambda *given: found.append(cuda.current))
    with FakeTensorMode():
        weight = torch.empty(4, 4, device=SECOND)
    kitchen_dispatch.unpack("a", {WEIGHT: weight}, {}, torch.float16)
    kitchen_dispatch.quantize("a", weight, {}, None)
    kitchen_dispatch.round_to_fp8(weight, torch.float8_e4m3fn, 1)
    assert found == [1, 1, 1]
    assert cuda.current == 0
