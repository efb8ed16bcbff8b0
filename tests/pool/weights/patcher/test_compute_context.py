"""Runs use the tools of their component: a road for weights that stream and a kernel for linear layers.

Proves, with a road that records: streamed weights come over it at each use, resident ones once, to stay; each run's
uploader is closed, also when the run raises; what one run asked for is known to the next. And that nothing of it
changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.uploads import StreamOrder
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.ops.low_rank_linear import LowRankPath, set_low_rank_path
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher, WeightsTarget
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.patches.patch_set import PatchSet
from tests.pool.toy import make_toy

IDS_BL = torch.tensor([[1, 4, 9], [2, 30, 5]])


class RecordingUploader:
    """Copies at once and tells what it was asked for."""

    def __init__(self, known: StreamOrder | None) -> None:
        self.known = known
        self.asked: list[Tensor] = []
        self.closed = False
        self.held: dict[int, Tensor] = {}

    @property
    def order(self) -> StreamOrder:
        return StreamOrder(tuple(self.asked))

    def upload(self, host: Tensor) -> Tensor:
        assert not self.closed
        self.asked.append(host)
        return host.to("sim:0")

    def upload_to_keep(self, host: Tensor) -> Tensor:
        self.held[host.data_ptr()] = self.upload(host)
        return self.held[host.data_ptr()]

    def kept(self, host: Tensor) -> Tensor | None:
        return self.held.get(host.data_ptr())

    def close(self) -> None:
        self.closed = True


class RecordingRoad:
    """Hands out recording uploaders."""

    def __init__(self) -> None:
        self.uploaders: list[RecordingUploader] = []
        self.brought: list[Tensor] = []
        self.kept: list[Tensor] = []

    def bring(self, host: Tensor) -> Tensor:
        self.brought.append(host)
        return host.to("sim:0")

    def keep(self, arrived: Iterable[Tensor]) -> None:
        self.kept += arrived

    def mark(self) -> None:
        """There are no streams."""

    def uploader(self, order: StreamOrder | None = None, kept_bytes: int = 0) -> RecordingUploader:
        self.uploaders.append(RecordingUploader(order))
        return self.uploaders[-1]


@pytest.fixture(autouse=True)
def _device() -> None:
    from modelpool.pool.devices.sim import device as sim

    sim.install()
    sim.configure(0, 1 << 30)


def patcher_with(tools: RunTools | None) -> ModelPatcher:
    device = torch.device("sim:0")
    return ModelPatcher.of(
        ComponentKey("toy"), Role.DIFFUSION_MODEL, make_toy(3), device, WeightForm(torch.float32), tools
    )


def patcher_hosts(patcher: ModelPatcher) -> list[Tensor]:
    return [patched.tensor for patched in patcher.get_key_patches().values()]


def output(patcher: ModelPatcher) -> Tensor:
    with patcher.running() as module:
        return module(IDS_BL.to(patcher.device)).to("cpu")


def test_streamed_weights_come_over_the_road_and_the_next_run_knows_their_order() -> None:
    pipeline = RecordingRoad()
    patcher = patcher_with(RunTools(pipeline=pipeline))
    expected = output(patcher_with(None))
    assert torch.equal(output(patcher), expected)
    assert torch.equal(output(patcher), expected)
    first, second = pipeline.uploaders
    assert first.known is None
    hosts = {p.data_ptr() for p in patcher.module.parameters()}
    assert len({h.data_ptr() for h in first.asked} & hosts) >= len(hosts) - 1  # of the table, rows are asked for
    assert second.known is not None
    assert [h.data_ptr() for h in second.known.hosts] == [h.data_ptr() for h in first.asked]
    assert first.closed
    assert second.closed


def test_resident_weights_come_over_the_road_once_to_stay() -> None:
    pipeline = RecordingRoad()
    patcher = patcher_with(RunTools(pipeline=pipeline))
    patcher.realize(WeightsTarget(frozenset(m.name for m in patcher.modules()), PatchSet()))
    brought = [host.data_ptr() for host in pipeline.brought]
    assert {host.data_ptr() for host in patcher_hosts(patcher)} <= set(brought)
    assert len(brought) == len(set(brought)), "each once"
    assert {kept.data_ptr() for kept in pipeline.kept} >= {p.data_ptr() for p in patcher.module.parameters()}
    assert torch.equal(output(patcher), output(patcher_with(None)))
    assert pipeline.uploaders == []


def test_an_uploader_is_closed_when_the_run_raises() -> None:
    pipeline = RecordingRoad()
    patcher = patcher_with(RunTools(pipeline=pipeline))
    with pytest.raises(ZeroDivisionError), patcher.running():
        raise ZeroDivisionError
    assert pipeline.uploaders[0].closed


def test_a_linear_kernel_is_asked_first_and_may_decline() -> None:
    asked = []

    def kernel(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        asked.append(weight)
        return None

    patcher = patcher_with(RunTools(linear=kernel))
    assert torch.equal(output(patcher), output(patcher_with(None)))
    assert len(asked) == 2


def test_the_factors_beside_a_packed_layer_are_uploaded_once_in_a_run() -> None:
    """Found in a review: both of them crossed the bus at each layer in each step."""
    sim.install()
    sim.configure(0, 1 << 20)
    layer = torch.nn.Linear(6, 4, bias=False).requires_grad_(False)
    x_NI = torch.randn(3, 6)
    path = LowRankPath(torch.randn(4, 2), torch.randn(2, 6))
    expected = x_NI @ (layer.weight + path.up_OR @ path.down_RI).T
    swap_to_casting(layer)
    set_low_rank_path(layer, path)
    layer.to("sim:0")
    uploader = RecordingUploader(None)
    with compute(torch.device("sim:0"), torch.float32, uploader=uploader):
        for _ in range(3):
            torch.testing.assert_close(layer(x_NI.to("sim:0")).cpu(), expected)
    assert len(uploader.asked) == 2
