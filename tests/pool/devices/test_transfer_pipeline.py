"""The road to a device: without CUDA it copies directly, with streams it copies ahead, and it gives everything back."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.devices import loader
from modelpool.pool.devices.copy_streams import CopyStreams, cuda_streams
from modelpool.pool.devices.memory_limits import HostMemory
from modelpool.pool.devices.pinned_memory import PinnedLedger, PinnedPages, StagingRing
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.devices.uploads import DirectUploader, StreamingUploader
from tests.pool.devices.fake_streams import Trace

INDEX = 54  # of a simulated device that no other test uses


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_without_streams_copies_are_direct(kind: str) -> None:
    sim.install()
    sim.configure(INDEX, 1 << 20)
    device = torch.device("cpu") if kind == "cpu" else torch.device("sim", INDEX)
    with TransferPipeline.open(device, HostMemory(1 << 30, 1 << 30)) as pipeline:
        assert not pipeline.pin(torch.zeros(3))
        assert pipeline.ahead_bytes == 0
        uploader = pipeline.uploader()
        assert isinstance(uploader, DirectUploader)
        assert torch.equal(uploader.upload(torch.arange(3)).cpu(), torch.arange(3))
        assert uploader.order.hosts == ()
        uploader.close()


def test_an_order_is_handed_from_run_to_run() -> None:
    sim.install()
    sim.configure(INDEX, 1 << 20)
    trace, ledger = Trace(), PinnedLedger(1 << 20)
    staging = StagingRing.allocate(ledger, 64, 2, lambda size: torch.empty(size, dtype=torch.uint8))
    pipeline = TransferPipeline(torch.device("sim", INDEX), CopyStreams(trace.maker), staging, None, ahead_bytes=1000)
    hosts = list(torch.arange(40.0).view(4, 10))
    first = pipeline.uploader()
    for host in hosts * 2:
        first.upload(host)
    order = first.order
    first.close()
    second = pipeline.uploader(order)
    assert isinstance(second, StreamingUploader)
    for host in hosts:
        assert torch.equal(second.upload(host).cpu(), host)
    assert (second.hits, second.misses) == (3, 1)
    second.close()
    pipeline.close()
    pipeline.close()
    assert ledger.pinned_bytes == 0


def road_with_streams(trace: Trace) -> TransferPipeline:
    sim.install()
    sim.configure(INDEX, 1 << 20)
    staging = StagingRing.allocate(PinnedLedger(1 << 20), 64, 2, lambda size: torch.empty(size, dtype=torch.uint8))
    return TransferPipeline(torch.device("sim", INDEX), CopyStreams(trace.maker), staging, None)


def test_what_goes_on_beside_is_waited_for_when_it_is_caught_up_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before; what stays is lent to the stream that computes, which may be far ahead or behind."""
    monkeypatch.setattr(loader, "LEAST_STAGED_BYTES", 64)
    trace = Trace()
    pipeline = road_with_streams(trace)
    side = "copy 2"  # the first two are the ring's
    trace.lending.add(side)
    hosts = [torch.arange(200.0), torch.arange(3.0)]
    trace.compute.steps += 5
    for _ in range(2):
        with pipeline.overlapping():
            copies = [pipeline.bring(host) for host in hosts]
            pipeline.keep(copies)
            with pipeline.overlapping():  # one inside another is one
                pass
    assert all(torch.equal(copy.cpu(), host) for copy, host in zip(copies, hosts, strict=True))
    assert not trace.compute.seen, "what computes waited for nothing"
    assert not any("compute" in stream.seen for stream in trace.streams), "nor was it waited for"
    assert [name for _, name in trace.lent] == ["compute"] * 4
    assert all(kept is copy for (kept, _), copy in zip(trace.lent[2:], copies, strict=True))
    pipeline.catch_up()
    (stream,) = [stream for stream in trace.streams if stream.name == side]
    assert trace.compute.seen[side] == stream.steps
    assert all(trace.compute.seen[name] > 0 for name in ("copy 0", "copy 1")), "what the side waited for is over too"
    pipeline.bring(hosts[0])
    pipeline.keep([hosts[0]])
    assert len(trace.lent) == 4, "outside, memory is the compute stream's own"
    pipeline.close()


def test_a_full_ring_says_so() -> None:
    trace = Trace()
    pipeline = road_with_streams(trace)
    assert not pipeline.is_full
    uploader = pipeline.uploader()
    for host in (torch.arange(16.0), torch.arange(16.0)):
        uploader.upload(host)
    for event in trace.events:
        event.is_over = False
    assert pipeline.is_full
    for event in trace.events:
        event.is_over = True
    assert not pipeline.is_full
    uploader.close()
    pipeline.close()


def test_closing_unpins() -> None:
    class Driver:
        pinned = 0

        def pin(self, address: int, size_bytes: int) -> bool:
            self.pinned += 1
            return True

        def unpin(self, address: int) -> None:
            self.pinned -= 1

    driver = Driver()
    with TransferPipeline(torch.device("cpu"), pages=PinnedPages(driver, PinnedLedger(1 << 20))) as pipeline:
        assert pipeline.pin(torch.zeros(100))
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
    with TransferPipeline(device, CopyStreams(trace.maker), staging, pages, ahead_bytes=1000) as pipeline:
        assert not pipeline.pin(torch.zeros(100))
        hosts = list(torch.arange(40.0).view(4, 10))
        for _ in range(2):
            uploader = pipeline.uploader()
            for host in hosts:
                assert torch.equal(uploader.upload(host).cpu(), host)
            uploader.close()
        assert pipeline.why_unpinned == (
            "0 of 2 staging buffers: no more memory can be pinned (no memory can be locked); "
            "the driver does not pin the pages of mapped files here"
        )
    assert ledger.pinned_bytes == 0
    assert TransferPipeline(device).why_unpinned == ""


def test_only_events_that_a_thread_waits_for_at_length_let_it_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that sleeps hears of an end too late for buffers, of which one is copied in half a millisecond."""
    made: list[dict[str, bool]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **named: made.append(named))
    maker = cuda_streams(torch.device("cuda"))
    maker.new_event()
    maker.new_end()
    assert made == [{}, {"blocking": True}]
