"""Copies that stay: whatever way they go they are exact, and nobody reads them before they are there.

On streams that keep account of what happens before what, into memory of the compute stream. Proves that sizes around
the buffers' are copied whole, that the reader waits, that pinned pages go without the ring, that small and scattered
tensors go directly, and that threads end with `close`.
"""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modelpool.pool.devices import loader as loader_module
from modelpool.pool.devices.copy_streams import CopyStreams
from modelpool.pool.devices.loader import FILL_THREADS, Loader
from modelpool.pool.devices.pinned_memory import PinnedLedger, PinnedPages, StagingRing
from modelpool.pool.devices.sim import device as sim
from tests.pool.devices.fake_streams import Trace

INDEX = 58  # of a simulated device that no other test uses
SLOT_BYTES = 64


class Driver:
    """Pins whatever it is asked to."""

    def pin(self, address: int, size_bytes: int) -> bool:
        return True

    def unpin(self, address: int) -> None:
        """Nothing was done."""


def opened(trace: Trace, pages: PinnedPages | None = None) -> Loader:
    sim.install()
    sim.configure(INDEX, 1 << 26)
    ledger = PinnedLedger(1 << 20)
    staging = StagingRing.allocate(ledger, SLOT_BYTES, 3, lambda size: torch.empty(size, dtype=torch.uint8))
    return Loader(torch.device("sim", INDEX), CopyStreams(trace.maker), staging, pages)


@pytest.fixture(autouse=True)
def everything_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "LEAST_STAGED_BYTES", 1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 5 * SLOT_BYTES), min_size=1, max_size=6))
def test_copies_are_exact_and_waited_for(sizes: list[int]) -> None:
    trace = Trace()
    loader = opened(trace)
    kept = []
    for size in sizes:
        host = torch.randint(0, 256, (size,), dtype=torch.uint8)
        kept.append((host, loader.bring(host)))
        stream = trace.copies[-1]
        steps = next(s.steps for s in trace.streams if s.name == stream)
        assert trace.compute.seen[stream] == steps, "the reader does not wait for the copy"
        trace.compute.steps += 1
    loader.close()
    assert all(torch.equal(copy.cpu(), host) and copy.device.type == "sim" for host, copy in kept)


def test_pinned_pages_need_no_ring() -> None:
    trace = Trace()
    pages = PinnedPages(Driver(), PinnedLedger(1 << 20))
    loader = opened(trace, pages)
    host = torch.arange(1000.0)
    assert pages.pin(host)
    assert torch.equal(loader.bring(host).cpu(), host)
    assert not _threads(), "nothing had to be filled"
    assert len(trace.events) == 1, "one event, for the whole copy"


def test_scattered_tensors_go_directly() -> None:
    trace = Trace()
    loader = opened(trace)
    scattered = torch.arange(64.0).view(8, 8).T
    assert torch.equal(loader.bring(scattered).cpu(), scattered)
    assert not trace.copies
    assert not trace.events


def test_small_tensors_share_buffers_and_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in a review: each of them, and each factor of a LoRA, was a blocking copy from pageable memory."""
    monkeypatch.setattr(loader_module, "LEAST_STAGED_BYTES", 1000)
    trace = Trace()
    sim.install()
    sim.configure(INDEX, 1 << 26)
    staging = StagingRing.allocate(PinnedLedger(1 << 20), 1024, 2, lambda size: torch.empty(size, dtype=torch.uint8))
    loader = Loader(torch.device("sim", INDEX), CopyStreams(trace.maker), staging)
    hosts = [torch.arange(8) + value for value in range(20)]
    copies = [loader.bring(host) for host in hosts]
    assert not trace.copies, "they are copied on the stream that reads them"
    assert not any(event.synchronized for event in trace.events), "16 of 64 bytes are in the first buffer"
    more = [loader.bring(host) for host in hosts]
    assert [event.synchronized for event in trace.events[:17]] == [True] * 16 + [False], "before it is filled again"
    for host, copy, other in zip(hosts, copies, more, strict=True):
        assert torch.equal(copy.cpu(), host)
        assert torch.equal(other.cpu(), host)
    assert not _threads()


def test_threads_end_with_close() -> None:
    loader = opened(Trace())
    loader.bring(torch.arange(1000))
    assert 0 < len(_threads()) <= FILL_THREADS
    loader.close()
    loader.close()
    assert not _threads()


def _threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("fill pinned buffers")]
