"""The road to a device: without CUDA it copies directly, with streams it copies ahead, and it gives everything back."""

from __future__ import annotations

import pytest
import torch

from pool.devices import sim
from pool.devices.copy_streams import CopyStreams
from pool.devices.memory_limits import HostMemory
from pool.devices.pinned_memory import PinnedLedger, PinnedPages, StagingRing
from pool.devices.upload_road import UploadRoad
from pool.devices.uploads import DirectUploader, StreamingUploader
from tests.pool.devices.fake_streams import Trace

INDEX = 54  # of a simulated device that no other test uses


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_without_streams_copies_are_direct(kind: str) -> None:
    sim.install()
    sim.configure(INDEX, 1 << 20)
    device = torch.device("cpu") if kind == "cpu" else torch.device("sim", INDEX)
    with UploadRoad.open(device, HostMemory(1 << 30, 1 << 30)) as road:
        assert not road.pin(torch.zeros(3))
        assert road.ahead_bytes == 0
        uploader = road.uploader()
        assert isinstance(uploader, DirectUploader)
        assert torch.equal(uploader.upload(torch.arange(3)).cpu(), torch.arange(3))
        assert uploader.order.hosts == ()
        uploader.close()


def test_an_order_is_handed_from_run_to_run() -> None:
    sim.install()
    sim.configure(INDEX, 1 << 20)
    trace, ledger = Trace(), PinnedLedger(1 << 20)
    staging = StagingRing.allocate(ledger, 64, 2, lambda size: torch.empty(size, dtype=torch.uint8))
    road = UploadRoad(torch.device("sim", INDEX), CopyStreams(trace.maker), staging, None, ahead_bytes=1000)
    hosts = list(torch.arange(40.0).view(4, 10))
    first = road.uploader()
    for host in hosts * 2:
        first.upload(host)
    order = first.order
    first.close()
    second = road.uploader(order)
    assert isinstance(second, StreamingUploader)
    for host in hosts:
        assert torch.equal(second.upload(host).cpu(), host)
    assert (second.hits, second.misses) == (3, 1)
    second.close()
    road.close()
    road.close()
    assert ledger.pinned_bytes == 0


def test_closing_unpins() -> None:
    class Driver:
        pinned = 0

        def pin(self, address: int, size_bytes: int) -> bool:
            self.pinned += 1
            return True

        def unpin(self, address: int) -> None:
            self.pinned -= 1

    driver = Driver()
    with UploadRoad(torch.device("cpu"), pages=PinnedPages(driver, PinnedLedger(1 << 20))) as road:
        assert road.pin(torch.zeros(100))
        assert driver.pinned == 1
    assert driver.pinned == 0


def test_where_nothing_can_be_pinned_copies_go_without_and_the_reason_is_kept() -> None:
    class Refusing:
        def pin(self, address: int, size_bytes: int) -> bool:
            return False

        def unpin(self, address: int) -> None:
            raise AssertionError("nothing was pinned")

    def no_buffer(size_bytes: int) -> torch.Tensor:
        raise RuntimeError("no memory can be locked")

    sim.configure(INDEX, 1 << 20)
    ledger, trace = PinnedLedger(1 << 20), Trace()
    staging = StagingRing.allocate(ledger, 64, 2, no_buffer)
    pages = PinnedPages(Refusing(), ledger)
    device = torch.device("sim", INDEX)
    with UploadRoad(device, CopyStreams(trace.maker), staging, pages, ahead_bytes=1000) as road:
        assert not road.pin(torch.zeros(100))
        hosts = list(torch.arange(40.0).view(4, 10))
        for _ in range(2):
            uploader = road.uploader()
            for host in hosts:
                assert torch.equal(uploader.upload(host).cpu(), host)
            uploader.close()
        assert road.why_unpinned == (
            "0 of 2 staging buffers: no more memory can be pinned (no memory can be locked); "
            "the driver does not pin the pages of mapped files here"
        )
    assert ledger.pinned_bytes == 0
    assert UploadRoad(device).why_unpinned == ""
