"""Copies ahead of use: its results are right and safe to read, and guesses stay within their bytes.

With streams that only keep account of what happens before what. Proves the rules of the ring, that any order of asking
gives the right tensors, that a repeated order is guessed, that wrong guesses are dropped, and that a real model streams
through it bit for bit.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from modelpool.pool.devices.copier import Copier
from modelpool.pool.devices.copy_streams import CopyStreams, StreamMaker
from modelpool.pool.devices.pinned_memory import PinnedLedger, PinnedPages, StagingRing
from modelpool.pool.devices.sim import device as sim
from modelpool.pool.devices.uploads import (
    DirectUploader,
    OrderRecorder,
    StreamingUploader,
    StreamOrder,
    key_of,
    streamed_bytes,
)
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.devices.fake_streams import FakeEvent, FakeStream, Trace
from tests.pool.zoo import build, store_in

INDEX = 71  # of a simulated device that no other test uses
KIB = 1 << 10


@pytest.fixture
def device() -> torch.device:
    return opened()


def opened() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 26)
    return torch.device("sim", INDEX)


def weights(count: int, elements: int = 256) -> list[Tensor]:
    """Tensors of 1 KiB that can be told apart, views of one buffer, as tensors of a mapped file are."""
    return list(torch.arange(count * elements, dtype=torch.float32).view(count, elements))


class Watched(StreamingUploader):
    """Remembers the event of each copy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.done: dict[int, FakeEvent] = {}
        super().__init__(*args, **kwargs)

    def _start(self, host: Tensor) -> tuple[Tensor, Any]:
        copy, end = super()._start(host)
        self.done[id(copy)] = end.done
        return copy, end


def ask(uploader: Watched, trace: Trace, host: Tensor) -> None:
    """Ask for a copy and let the compute stream read it."""
    copy = uploader.upload(host)
    done = uploader.done.pop(id(copy)).seen
    assert done is not None
    assert all(trace.compute.seen.get(name, 0) >= steps for name, steps in done.items() if name != "compute"), (
        "not over"
    )
    trace.compute.steps += 1
    assert torch.equal(copy.cpu(), host)
    assert copy.device.type == "sim"


def test_streams_are_taken_by_turns_and_wait_for_the_compute_stream() -> None:
    trace = Trace()
    ring = CopyStreams(trace.maker, count=3)
    trace.compute.steps = 5
    taken = [ring.take() for _ in range(4)]
    assert [s.name for s in taken] == ["copy 0", "copy 1", "copy 2", "copy 0"]
    assert all(s.seen["compute"] == 5 for s in taken)


def test_a_copy_is_waited_for_by_its_reader(device: torch.device) -> None:
    trace = Trace()
    uploader = Watched(device, CopyStreams(trace.maker))
    ask(uploader, trace, weights(1)[0])
    (event,) = trace.events
    assert event.seen is not None
    assert trace.compute.seen.items() >= {("copy 0", 1)}


def test_the_second_pass_is_copied_ahead(device: torch.device) -> None:
    trace, hosts = Trace(), weights(5)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=2 * KIB)
    for host in hosts:
        ask(uploader, trace, host)
    assert (uploader.hits, uploader.misses, uploader.ahead_bytes) == (0, 5, 0)
    for host in hosts:
        ask(uploader, trace, host)
        assert uploader.ahead_bytes == 2 * KIB
    assert (uploader.hits, uploader.misses) == (4, 6), "all but the first, whose asking ends the first pass"
    for host in hosts:
        ask(uploader, trace, host)
    assert (uploader.hits, uploader.misses) == (9, 6)
    assert [key_of(h) for h in uploader.order.hosts] == [key_of(h) for h in hosts]
    assert streamed_bytes(uploader.order) == 5 * KIB
    uploader.close()
    assert (uploader.ahead_bytes, uploader.order) == (0, StreamOrder())
    ask(uploader, trace, hosts[3])


def test_an_order_that_is_known_already_is_used_from_the_start(device: torch.device) -> None:
    trace, hosts = Trace(), weights(4)
    uploader = Watched(device, CopyStreams(trace.maker), order=StreamOrder(tuple(hosts)))
    for host in hosts:
        ask(uploader, trace, host)
    assert (uploader.hits, uploader.misses) == (3, 1)


def test_nothing_is_copied_ahead_when_there_are_no_bytes_for_it(device: torch.device) -> None:
    trace, hosts = Trace(), weights(3)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=KIB - 1)
    for host in hosts * 3:
        ask(uploader, trace, host)
    assert (uploader.hits, uploader.misses, len(trace.copies)) == (0, 9, 9)


def test_memory_that_is_left_to_others_is_not_taken(device: torch.device) -> None:
    """Found in a review: members of a gang sent a module ahead in memory that copies from the host took, too."""
    trace, hosts = Trace(), weights(6)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=4 * KIB, order=StreamOrder(tuple(hosts)))
    ask(uploader, trace, hosts[0])
    assert uploader.ahead_bytes == 4 * KIB
    uploader.leave(3 * KIB)
    assert uploader.ahead_bytes == 0
    kept = uploader.upload_to_keep(torch.ones(KIB // 4))
    for host in hosts * 2:
        ask(uploader, trace, host)
        assert uploader.ahead_bytes == KIB, "beside a factor that found no room to be kept"
    assert uploader.kept(kept) is None
    uploader.leave(KIB)
    for host in hosts * 2:
        ask(uploader, trace, host)
        assert uploader.ahead_bytes == 0


def test_what_is_skipped_is_dropped(device: torch.device) -> None:
    trace, hosts = Trace(), weights(6)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=3 * KIB, order=StreamOrder(tuple(hosts)))
    ask(uploader, trace, hosts[0])  # 1, 2, 3 are under way
    ask(uploader, trace, hosts[3])
    assert uploader.hits == 1
    ask(uploader, trace, hosts[4])
    assert uploader.hits == 2
    ask(uploader, trace, hosts[2])  # back: what was under way followed another place
    ask(uploader, trace, hosts[3])
    assert uploader.hits == 3
    assert sim.memory_stats(INDEX).used_bytes == uploader.ahead_bytes == 3 * KIB


def test_a_tensor_that_is_no_weight_disturbs_nothing(device: torch.device) -> None:
    trace, hosts = Trace(), weights(4)
    uploader = Watched(device, CopyStreams(trace.maker), order=StreamOrder(tuple(hosts)))
    ask(uploader, trace, hosts[0])
    ask(uploader, trace, torch.ones(7))
    for host in hosts[1:]:
        ask(uploader, trace, host)
    assert uploader.hits == 3


@given(
    asked=st.lists(st.integers(0, 5), max_size=40),
    order=st.lists(st.integers(0, 5), max_size=8, unique=True),
    ahead_kib=st.integers(0, 5),
    streams=st.integers(1, 3),
    staged=st.booleans(),
)
def test_any_order_of_asking_gives_the_right_tensors(
    asked: list[int], order: list[int], ahead_kib: int, streams: int, staged: bool
) -> None:
    device, trace, hosts = opened(), Trace(), weights(6)
    ledger = PinnedLedger(KIB)
    staging = StagingRing.allocate(ledger, 300, 3, plain_buffer) if staged else None
    uploader = Watched(
        device,
        CopyStreams(trace.maker, streams),
        staging,
        ahead_bytes=ahead_kib * KIB,
        order=StreamOrder(tuple(hosts[i] for i in order)),
    )
    for index in asked:
        ask(uploader, trace, hosts[index])
        assert uploader.ahead_bytes <= ahead_kib * KIB
        assert sim.memory_stats(INDEX).used_bytes == uploader.ahead_bytes
    uploader.close()
    assert sim.memory_stats(INDEX).used_bytes == 0


def plain_buffer(size_bytes: int) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_copies_by_way_of_buffers_are_exact(dtype: torch.dtype, device: torch.device) -> None:
    trace = Trace()
    staging = StagingRing.allocate(PinnedLedger(1000), 64, 2, plain_buffer)
    uploader = Watched(device, CopyStreams(trace.maker), staging)
    for shape in ((3, 50), (64,), (), (0, 4)):
        host = torch.randint(0, 100, shape).to(dtype)
        copy = uploader.upload(host)
        assert (copy.dtype, copy.shape) == (dtype, host.shape)
        assert torch.equal(copy.cpu().view(torch.uint8), host.view(torch.uint8)) if shape else copy.cpu() == host
    turned = torch.randn(6, 5).t()  # not contiguous: copied as it is
    assert torch.equal(uploader.upload(turned).cpu(), turned)


def test_pages_that_are_pinned_need_no_buffer(device: torch.device) -> None:
    class Willing:
        def pin(self, address: int, size_bytes: int) -> bool:
            return True

        def unpin(self, address: int) -> None: ...

    trace, hosts = Trace(), weights(3, 4096)
    ledger = PinnedLedger(1 << 20)
    pages = PinnedPages(Willing(), ledger)
    staging = StagingRing.allocate(ledger, 64, 2, plain_buffer)
    uploader = Watched(device, CopyStreams(trace.maker), staging, pages)
    assert pages.pin(hosts[0])
    uploader.upload(hosts[0])
    assert len(trace.events) == 1
    uploader.upload(torch.ones(1000))
    assert len(trace.events) == 1 + 1 + -(-4000 // 64)


class PlainEvent:
    """Happens when it is recorded."""

    def __init__(self) -> None:
        self.is_recorded = threading.Event()

    def record(self, stream: object) -> None:
        self.is_recorded.set()

    def synchronize(self) -> None:
        assert self.is_recorded.is_set()

    def query(self) -> bool:
        return self.is_recorded.is_set()


class PlainStream:
    """A stream that does its work at once."""

    def wait_stream(self, stream: object) -> None: ...

    def wait_event(self, event: PlainEvent) -> None:
        assert event.is_recorded.is_set(), "it would wait for nothing"


def plain_streams() -> CopyStreams:
    compute_stream = PlainStream()
    return CopyStreams(
        StreamMaker(
            new_stream=PlainStream,
            new_event=PlainEvent,
            new_end=PlainEvent,
            current=lambda: compute_stream,
            on=lambda stream: nullcontext(),
            lend=lambda tensor, stream: None,
        )
    )


def test_the_copier_fills_buffers_while_kernels_are_launched(device: torch.device) -> None:
    """Found in a review: the thread that launches kernels filled each buffer, and waited for a free one."""
    hosts, may_fill, fillers = weights(6), threading.Event(), set()

    def fill(buffer: Tensor, host_bytes: Tensor) -> None:
        if not torch.equal(host_bytes, hosts[0].view(torch.uint8)):
            assert may_fill.wait(60)
        fillers.add(threading.current_thread().name)
        buffer.copy_(host_bytes)

    copier = Copier()
    staging = StagingRing.allocate(PinnedLedger(4 * KIB), KIB, 2, plain_buffer)
    order = StreamOrder(tuple(hosts))
    uploader = StreamingUploader(device, plain_streams(), staging, None, 4 * KIB, order, copier, fill)
    assert torch.equal(uploader.upload(hosts[0]).cpu(), hosts[0])
    assert uploader.ahead_bytes == 4 * KIB, "four are expected, and the buffers for them are not filled yet"
    may_fill.set()
    for host in hosts[1:] * 3:
        assert torch.equal(uploader.upload(host).cpu(), host)
    assert uploader.hits > uploader.misses
    assert {name.rpartition("_")[0] for name in fillers} == {"copy weights ahead"}
    uploader.close()
    assert sim.memory_stats(INDEX).used_bytes == 0, "jobs that were left out hold nothing"
    copier.close()
    copier.close()
    assert "copy weights ahead" not in {thread.name.rpartition("_")[0] for thread in threading.enumerate()}


def test_a_copy_that_the_copier_cannot_make_fails_for_who_requests_it(device: torch.device) -> None:
    def fill(buffer: Tensor, host_bytes: Tensor) -> None:
        raise OSError("the disk is gone")

    copier = Copier()
    staging = StagingRing.allocate(PinnedLedger(4 * KIB), KIB, 2, plain_buffer)
    uploader = StreamingUploader(device, plain_streams(), staging, copier=copier, fill=fill)
    with pytest.raises(OSError, match="the disk is gone"):
        uploader.upload(weights(1)[0])
    uploader.close()
    copier.close()
    gc.collect()  # the error and its frames, as after each failed run
    assert sim.memory_stats(INDEX).used_bytes == 0


def test_memory_of_copies_belongs_to_the_stream_that_reads_them(device: torch.device) -> None:
    """Found in a review: the allocator unmaps freed memory of segments that grow after waiting only for the stream that
    allocated it, and that was a copy stream, while a kernel of the compute stream may still have read the memory."""
    trace, hosts, allocated = Trace(), weights(4), []

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        with trace.maker.on(stream):
            before_bytes = sim.memory_stats(INDEX).used_bytes
            yield
            allocated.append(sim.memory_stats(INDEX).used_bytes - before_bytes)

    maker = replace(trace.maker, on=on)
    for staging in (None, StagingRing.allocate(PinnedLedger(KIB), 300, 3, plain_buffer)):
        uploader = Watched(device, CopyStreams(maker), staging, ahead_bytes=2 * KIB, order=StreamOrder(tuple(hosts)))
        for host in hosts:
            ask(uploader, trace, host)
        uploader.close()
    assert len(allocated) >= 8
    assert not any(allocated)


def test_memory_of_a_dropped_copy_is_written_again_only_after_the_copy(device: torch.device) -> None:
    trace, hosts = Trace(), weights(4)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=3 * KIB, order=StreamOrder(tuple(hosts)))
    ask(uploader, trace, hosts[0])  # the others are under way
    assert not any(trace.compute.seen.get(stream.name, 0) == stream.steps for stream in trace.streams)
    uploader.close()
    assert all(trace.compute.seen[stream.name] == stream.steps for stream in trace.streams)


def test_the_work_for_a_request_does_not_grow_with_the_copies_ahead(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: every request compared all copies ahead with the order, a hundred of SDXL's layers."""
    hosts, keys = weights(100), [0]

    def counted(host: Tensor) -> object:
        keys[0] += 1
        return key_of(host)

    monkeypatch.setattr("modelpool.pool.devices.uploads.key_of", counted)
    uploader = StreamingUploader(
        device, CopyStreams(Trace().maker), ahead_bytes=90 * KIB, order=StreamOrder(tuple(hosts))
    )
    uploader.upload(hosts[0])
    before = keys[0]
    for host in hosts[1:]:
        uploader.upload(host)
    assert keys[0] - before <= 6 * len(hosts)
    assert uploader.hits == 99
    uploader.close()


def test_what_every_pass_reads_is_kept_within_the_bytes_for_copies_ahead(device: torch.device) -> None:
    """Found in a review: both factors of each LoRA on packed weights were uploaded again in each step."""
    trace, hosts, factors = Trace(), weights(4), weights(5)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=4 * KIB, order=StreamOrder(tuple(hosts)))
    _keep_factors(uploader, trace, hosts, factors)
    uploader.close()
    assert uploader.kept(factors[0]) is None
    assert sim.memory_stats(INDEX).used_bytes == 0


def _keep_factors(uploader: Watched, trace: Trace, hosts: list[Tensor], factors: list[Tensor]) -> None:
    ask(uploader, trace, hosts[0])
    assert uploader.ahead_bytes == 3 * KIB
    kept = []
    for place, factor in enumerate(factors):
        assert uploader.kept(factor) is None
        kept.append(uploader.upload_to_keep(factor))
        assert torch.equal(kept[-1].cpu(), factor)
        assert (uploader.kept(factor) is kept[-1]) == (place < 3), "a quarter is left for copies ahead"
    assert uploader.ahead_bytes == KIB
    copies = len(trace.copies)
    assert all(uploader.kept(factor) is copy for factor, copy in zip(factors[:3], kept, strict=False))
    assert len(trace.copies) == copies
    for host in hosts[1:] * 2:
        ask(uploader, trace, host)
        assert uploader.ahead_bytes <= KIB


def test_an_order_ends_where_it_begins_again() -> None:
    rows, a, b = weights(3)
    recorder = OrderRecorder()
    assert [recorder.record(h) for h in (rows, a, b)] == [None, None, None]
    ended = recorder.record(a)
    assert ended is not None
    assert [key_of(h) for h in ended.hosts] == [key_of(a), key_of(b)]
    assert recorder.record(b) is None


def test_a_weight_that_is_used_twice_in_a_pass_does_not_end_it_for_good(device: torch.device) -> None:
    trace, (a, shared, b, c, d) = Trace(), weights(5)
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=2 * KIB)
    a_pass = (a, shared, b, shared, c, d)
    for host in a_pass * 3:
        ask(uploader, trace, host)
    hits = uploader.hits
    for host in a_pass:
        ask(uploader, trace, host)
    assert uploader.hits - hits >= 4


def test_an_address_that_is_used_again_brings_no_old_bytes(device: torch.device) -> None:
    """Tensors that live for one call may get the address of an earlier one."""
    trace, (a, b) = Trace(), weights(2)
    uploader = Watched(device, CopyStreams(trace.maker))
    for value in range(20):
        for host in (a, torch.full((256,), float(value)), b):
            ask(uploader, trace, host)


def test_a_direct_uploader_copies_at_once(device: torch.device) -> None:
    host = torch.randn(3)
    copy = DirectUploader(device).upload(host)
    assert copy.device == device
    assert torch.equal(copy.cpu(), host)


@pytest.mark.parametrize("family", ["unet", "sd35", "t5"])
def test_a_model_streams_through_it(family: str, device: torch.device) -> None:
    case = build(family, torch.float16)
    expected = case.run()
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    weight_bytes = sum(p.nbytes for p in case.module.parameters())
    trace, ahead_bytes = Trace(), weight_bytes // 4
    uploader = Watched(device, CopyStreams(trace.maker), ahead_bytes=ahead_bytes)
    with compute(device, torch.float32, uploader=uploader):
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(case.run(device), expected, strict=True))
            assert uploader.ahead_bytes <= ahead_bytes
    assert uploader.hits > uploader.misses
    uploader.close()
    assert sim.memory_stats(INDEX).used_bytes == 0


def test_a_fake_event_must_be_recorded_before_it_is_waited_for() -> None:
    with pytest.raises(AssertionError, match="never recorded"):
        Trace().compute.wait_event(FakeEvent())


def test_a_copy_ahead_that_finds_no_memory_costs_the_guess_only() -> None:
    sim.install()
    sim.configure(INDEX + 1, 3 * KIB)
    hosts, small = weights(6), torch.device("sim", INDEX + 1)
    order = StreamOrder(tuple(hosts))
    uploader = StreamingUploader(small, CopyStreams(Trace().maker), ahead_bytes=1 << 20, order=order)
    for host in hosts:
        assert torch.equal(uploader.upload(host).to("cpu"), host)
    uploader.close()


def test_another_view_of_the_same_bytes_is_another_tensor(device: torch.device) -> None:
    host = weights(1, 16)[0].view(4, 4)
    views = [host, host.t(), host.view(2, 8)]
    uploader = StreamingUploader(
        device, CopyStreams(Trace().maker), ahead_bytes=1 << 20, order=StreamOrder((host, host.clone()))
    )
    for view in [*views, *views]:
        assert torch.equal(uploader.upload(view).to("cpu"), view)
    uploader.close()
