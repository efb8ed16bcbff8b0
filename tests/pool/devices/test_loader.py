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
from modelpool.pool.devices.uploads import StreamingUploader
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


def test_memory_of_a_copy_that_fails_is_not_written_when_it_is_used_again() -> None:
    """Found in a review: the third of several pieces could not be filled; the pieces before were still being copied
    when the memory was freed, and nobody waited for them. The same for an upload without a copier."""
    unsafe = []
    for way in ("loader", "uploader"):
        trace, calls = Trace(), 0
        loader = opened(trace)

        def failing(buffer: torch.Tensor, source: torch.Tensor) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise MemoryError("made up")
            buffer.copy_(source)

        host = torch.zeros(5 * SLOT_BYTES, dtype=torch.uint8)
        if way == "loader":
            loader.fill = failing  # type: ignore[method-assign]
            run = loader.bring
        else:
            staging = StagingRing.allocate(PinnedLedger(1 << 20), SLOT_BYTES, 3, torch.ByteTensor)
            run = StreamingUploader(loader._device, CopyStreams(trace.maker), staging, fill=failing).upload
        with pytest.raises(MemoryError):
            run(host)
        stream = next(s for s in trace.streams if s.name == trace.copies[-1])
        if trace.compute.seen.get(stream.name) != stream.steps:
            unsafe.append(way)
        loader.close()
    assert not unsafe, "the compute stream does not wait for the pieces"


def test_a_buffer_is_not_filled_again_while_threads_still_fill_it() -> None:
    """Found by looking for more of the kind: one part fails, or has no thread, while another is still written."""
    loader = opened(Trace())
    go, ended = threading.Event(), threading.Event()

    class Part:
        def __init__(self, fails: bool) -> None:
            self._fails = fails

        def copy_(self, source: object) -> None:
            if self._fails:
                go.set()
                raise MemoryError("made up")
            go.wait(10)
            threading.Event().wait(0.1)
            ended.set()

    class Parts:
        def numel(self) -> int:
            return SLOT_BYTES

        def chunk(self, count: int) -> list[Part]:
            return [Part(fails=True), Part(fails=False)]

    with pytest.raises(MemoryError):
        loader.fill(Parts(), Parts())  # type: ignore[arg-type]
    assert ended.is_set(), "a thread still writes the buffer"
    loader.close()
