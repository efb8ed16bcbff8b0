"""`StreamChecker`: a happens-before checker for streams, on the simulated device.

Every operation on a tensor of the device is a step of the stream that is current in its thread. Each stream, each event
and the host have a vector clock: the last step of every stream that is over before they go on. Findings:

- races: a read of bytes which another stream writes, or a write over bytes which another stream reads or writes,
  without a wait;
- reuse: a freed block may be handed out again at once by the allocator of its own stream, which is the worst case.
  Whoever touches the new block first must have waited for the accesses to the freed one, but for streams it was lent to
  (`record_stream`): the allocator waits for these;
- unmapping: `empty_cache` and every allocation may unmap freed memory of segments that grow. The stream that owns it
  must have waited for the accesses of all other streams that it was not lent to;
- pinned buffers: the host may write a part only after it knows that all copies from it are over;
- copies to the host that nobody waits for, and waits for events that were never recorded.

`query` of an event is random, but truthful: True teaches the host what it implies. `leave_out` leaves out waits of a
caller, to prove that a missing one is found.
"""

from __future__ import annotations

import collections
import os
import random
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch

from modelpool.pool.devices.copier import Copier
from modelpool.pool.devices.copy_streams import CopyStreams, StreamMaker
from modelpool.pool.devices.pinned_memory import PinnedLedger, StagingRing
from modelpool.pool.devices.sim import device as sim_device
from modelpool.pool.devices.sim import tensor as sim_tensor
from modelpool.pool.devices.sim.ledger import SimAllocation, SimLedger
from modelpool.pool.devices.sim.operations import OpKind, plan_of
from modelpool.pool.devices.transfer_pipeline import TransferPipeline

#: frames above a wait in which its caller is looked for: `suppress` and generators are between them
CALLER_DEPTH = 4
_aten = torch.ops.aten


class Clock(dict[str, int]):
    """The last step of each stream that is over."""

    def learn(self, other: Mapping[str, int]) -> None:
        """Take over what `other` knows."""
        for name, step in other.items():
            if self.get(name, 0) < step:
                self[name] = step


class CheckedStream:
    """A stream. `seen` is over before its next step."""

    def __init__(self, checker: StreamChecker, name: str) -> None:
        self._checker, self.name, self.steps, self.seen = checker, name, 0, Clock()

    def now(self) -> dict[str, int]:
        """All that is over after its work so far."""
        return {**self.seen, self.name: self.steps}

    def wait_stream(self, other: CheckedStream) -> None:
        with self._checker.lock:
            if not self._checker.leaves_out("wait_stream"):
                self.seen.learn(other.now())

    def wait_event(self, event: CheckedEvent) -> None:
        with self._checker.lock:
            if self._checker.leaves_out("wait_event"):
                return
            if event.clock is None:  # on CUDA, this waits for nothing
                self._checker.report("wait for an event that was never recorded")
                return
            self.seen.learn(event.clock)

    def synchronize(self) -> None:
        with self._checker.lock:
            self._checker.host.learn(self.now())


class CheckedEvent:
    """An event."""

    def __init__(self, checker: StreamChecker) -> None:
        self._checker = checker
        self.clock: dict[str, int] | None = None

    def record(self, stream: CheckedStream | None = None) -> None:
        with self._checker.lock:
            if not self._checker.leaves_out("record"):
                self.clock = (stream or self._checker.current()).now()

    def synchronize(self) -> None:
        with self._checker.lock:
            if self.clock is not None and not self._checker.leaves_out("synchronize"):
                self._checker.host.learn(self.clock)

    def query(self) -> bool:
        with self._checker.lock:
            if self.clock is None:
                return True  # as on CUDA: an event that was not recorded is over
            if all(self._checker.host.get(name, 0) >= step for name, step in self.clock.items()):
                return True
            if self._checker.chance.random() < self._checker.over:
                self._checker.host.learn(self.clock)
                return True
            return False


class TrackedAllocation(SimAllocation):
    """Memory of the device with its accesses.

    write  the last stream that wrote it, and the step
    reads  the last step of each stream that has read it since
    lent   names of streams that the allocator waits for before it hands the memory out again
    prior  accesses to freed memory of the same stream when it was allocated
    """

    __slots__ = ("checker", "lent", "owner", "prior", "reads", "write")

    def __init__(self, ledger: SimLedger, size_bytes: int) -> None:
        super().__init__(ledger, size_bytes)
        checker = self.checker = StreamChecker.active
        self.write: tuple[str, int] | None = None
        self.reads: dict[str, int] = {}
        self.lent: set[str] = set()
        if checker is not None:
            with checker.lock:
                self.owner = checker.current()
                checker.take_freed()
                self.prior = dict(checker.freed_accesses.get(self.owner.name, {}))
                checker.check_unmapping(self.owner)

    def __del__(self) -> None:
        # without a lock: the garbage collector may run this while its thread holds one
        checker = getattr(self, "checker", None)
        if checker is not None and hasattr(self, "owner"):
            done = dict(self.reads)
            if self.write is not None:
                done[self.write[0]] = max(done.get(self.write[0], 0), self.write[1])
            checker.freed.append((self.owner.name, {n: s for n, s in done.items() if n not in self.lent}))
        super().__del__()


class StreamChecker:
    """The streams of one device and what was found. Only one is active in a process: the one that `watching` names."""

    active: StreamChecker | None = None

    def __init__(self, seed: int = 0, over: float = 0.3) -> None:
        """`over` is the share of queries about pending events that say they are over."""
        self.lock = threading.RLock()
        self.chance, self.over = random.Random(seed), over
        self.host = Clock()
        self.streams = [CheckedStream(self, "compute")]
        #: accesses to freed memory, by the stream that owns the memory
        self.freed_accesses: dict[str, Clock] = {}
        self.freed: collections.deque[tuple[str, dict[str, int]]] = collections.deque()
        self.findings: Counter[str] = Counter()
        self.operations = 0
        #: waits that were left out
        self.left_out = 0
        self._local = threading.local()
        self._rules: dict[str, Callable[[FrameType | None], bool]] = {}
        #: begin, end, stream and step of each copy from a pinned buffer
        self._copies: list[tuple[int, int, str, int]] = []
        self._buffers: list[tuple[int, int]] = []
        self._unmapped: dict[tuple[str, str], int] = {}
        self.maker = StreamMaker(
            new_stream=self.new_stream,
            new_event=lambda: CheckedEvent(self),
            new_end=lambda: CheckedEvent(self),
            current=self.current,
            on=self.on,
            lend=self.lend,
        )

    @contextmanager
    def watching(self) -> Iterator[StreamChecker]:
        """Check what happens in the block."""
        StreamChecker.active = self
        try:
            yield self
        finally:
            StreamChecker.active = None

    def pipeline(
        self,
        device: torch.device,
        ahead_bytes: int,
        slot_bytes: int = 1 << 14,
        slots: int = 4,
        has_copier: bool = True,
    ) -> TransferPipeline:
        """Return a pipeline to the device over checked streams and a small ring."""
        ledger = PinnedLedger(1 << 30)
        staging = StagingRing.allocate(ledger, slot_bytes, slots, lambda size: torch.empty(size, dtype=torch.uint8))
        self.watch_ring(staging)
        return TransferPipeline(
            device, CopyStreams(self.maker, 2), staging, None, ahead_bytes, Copier() if has_copier else None
        )

    def watch_ring(self, staging: StagingRing) -> None:
        """Check what the host writes into the buffers of a ring."""
        for slot in staging._slots:
            begin = slot.buffer.data_ptr()
            self._buffers.append((begin, begin + slot.buffer.nbytes))

    def leave_out(self, kind: str, caller: str, every: int = 1) -> None:
        """Leave out each `every`-th call of `kind` (wait_stream, wait_event, record, synchronize, lend) from a function
        named `caller`."""
        count = [0]

        def rule(frame: FrameType | None) -> bool:
            for _ in range(CALLER_DEPTH):
                if frame is None:
                    return False
                if frame.f_code.co_name == caller and "modelpool" in frame.f_code.co_filename:
                    count[0] += 1
                    return count[0] % every == 0
                frame = frame.f_back
            return False

        self._rules[kind] = rule

    def leaves_out(self, kind: str) -> bool:
        """Whether the call of `kind` under way is one to leave out."""
        rule = self._rules.get(kind)
        found = rule is not None and rule(sys._getframe(2))
        self.left_out += found
        return found

    def new_stream(self) -> CheckedStream:
        """Add a stream."""
        self.streams.append(CheckedStream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def current(self) -> CheckedStream:
        """The current stream of this thread."""
        return getattr(self._local, "stream", None) or self.streams[0]

    @contextmanager
    def on(self, stream: CheckedStream) -> Iterator[None]:
        """Make `stream` the current one."""
        before = getattr(self._local, "stream", None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def lend(self, tensor: torch.Tensor, stream: CheckedStream) -> None:
        """As record_stream, for the parts of a wrapper."""
        if self.leaves_out("lend"):
            return
        parts = getattr(tensor, "parts", None)
        for part in (tensor,) if parts is None else parts.values():
            found = allocation_of(part)
            if found is not None:
                found.lent.add(stream.name)

    def take_freed(self) -> None:
        """Note the accesses to what was freed since the last call."""
        while self.freed:
            owner, done = self.freed.popleft()
            self.freed_accesses.setdefault(owner, Clock()).learn(done)

    def report(self, what: str) -> None:
        """Count a finding, with the place in the product."""
        here = (os.sep + "sim" + os.sep, __file__)
        places = [
            f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()
            if "modelpool" in frame.filename and not any(each in frame.filename for each in here)
        ]
        self.findings[f"{what} ({' < '.join(reversed(places[-3:]))})"] += 1

    def check_unmapping(self, owner: CheckedStream) -> None:
        """Check that freed memory of `owner` may be unmapped now."""
        for name, step in self.freed_accesses.get(owner.name, {}).items():
            if not self.knows(owner, name, step) and self._unmapped.get((owner.name, name), 0) < step:
                self._unmapped[owner.name, name] = step
                self.report(f"unmapping: memory of {owner.name} was freed while {name} may use it")

    def empty_cache(self) -> None:
        """Unmap all freed memory."""
        with self.lock:
            self.take_freed()
            for stream in self.streams:
                self.check_unmapping(stream)

    def knows(self, stream: CheckedStream, name: str, step: int) -> bool:
        """Whether a step of the stream `name` is over before the next step of `stream`: a kernel is launched after what
        the host knows to be over."""
        return name == stream.name or stream.seen.get(name, 0) >= step or self.host.get(name, 0) >= step

    def access(
        self, reads: Iterable[TrackedAllocation], writes: Iterable[TrackedAllocation]
    ) -> tuple[CheckedStream, int]:
        """Count a step of the current stream and check its accesses."""
        stream = self.current()
        stream.steps += 1
        self.operations += 1
        writes = {found for found in writes if found.checker is self}
        reads = {found for found in reads if found.checker is self}
        for found in reads | writes:
            if found.write is None:
                for name, step in found.prior.items():
                    if not self.knows(stream, name, step):
                        self.report(f"reuse: {stream.name} touches memory that {name} may still use")
                        break
            elif not self.knows(stream, *found.write):
                does = "writes" if found in writes else "reads"
                self.report(f"race: {stream.name} {does} what {found.write[0]} writes")
        for found in writes:
            for name, step in found.reads.items():
                if not self.knows(stream, name, step):
                    self.report(f"race: {stream.name} writes what {name} reads")
            unknown = {n: s for n, s in found.reads.items() if not self.knows(stream, n, s)}
            found.write, found.reads = (stream.name, stream.steps), unknown
        for found in reads:
            found.reads[stream.name] = stream.steps
        return stream, stream.steps

    def note_copy(self, source: torch.Tensor, stream: CheckedStream, step: int) -> None:
        """Note a copy to the device, if it is from a buffer of a ring."""
        begin, end = source.data_ptr(), source.data_ptr() + source.nbytes
        if any(low <= begin and end <= high for low, high in self._buffers):
            self._copies = [copy for copy in self._copies if self.host.get(copy[2], 0) < copy[3]]
            self._copies.append((begin, end, stream.name, step))

    def check_filling(self, target: torch.Tensor) -> None:
        """Check that the host may write a part of a buffer."""
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        with self.lock:
            for low, high, name, step in self._copies:
                if low < end and begin < high and self.host.get(name, 0) < step:
                    self.report("pinned: the host writes a buffer that is being copied from")
                    return


def allocation_of(tensor: object) -> TrackedAllocation | None:
    """The tracked memory of a tensor of the device."""
    if not isinstance(tensor, sim_tensor.SimTensor):
        return None
    found = getattr(tensor._inner.untyped_storage(), "sim_allocation", None)
    return found if isinstance(found, TrackedAllocation) and found.checker is not None else None


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations on the simulated device reach the active checker until the end of the test."""
    run, copy_from, make = sim_tensor.run, sim_tensor.copy_from, sim_tensor.make_on_device
    busy = threading.local()

    def checked_run(op: Any, args: Any, kwargs: Any) -> Any:
        checker = StreamChecker.active
        if checker is None or getattr(busy, "on", False):
            return run(op, args, kwargs)
        busy.on = True
        try:
            result = run(op, args, kwargs)
        finally:
            busy.on = False
        _note(checker, op, args, kwargs, result)
        return result

    def checked_copy_from(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        checker = StreamChecker.active
        result = copy_from(source, target)
        if checker is not None and not getattr(busy, "on", False):
            with checker.lock:
                stream, _ = checker.access(_known(source), _known(target))
                checker.host.learn(stream.now())  # torch.tensor(..., device=) and the like wait
        return result

    def checked_make(devices: Any, plan: Any, args: Any, kwargs: Any) -> Any:
        result = make(devices, plan, args, kwargs)
        checker = StreamChecker.active
        if checker is not None and "empty" not in str(plan.op):
            with checker.lock:
                checker.access((), _known(result))
        return result

    stage = StagingRing.stage

    def checked_stage(self: StagingRing, host_bytes: torch.Tensor, fill: Any = torch.Tensor.copy_) -> Any:
        def checked_fill(buffer: torch.Tensor, source: torch.Tensor) -> object:
            if StreamChecker.active is not None:
                StreamChecker.active.check_filling(buffer)
            return fill(buffer, source)

        return stage(self, host_bytes, checked_fill)

    sim_device.install()
    monkeypatch.setattr(sim_tensor, "SimAllocation", TrackedAllocation)
    monkeypatch.setattr(sim_tensor, "_dispatched", lambda: True)
    for module in (sim_tensor, sim_device):
        monkeypatch.setattr(module, "run", checked_run)
        monkeypatch.setattr(module, "copy_from", checked_copy_from)
        monkeypatch.setattr(module, "make_on_device", checked_make)
    monkeypatch.setattr(StagingRing, "stage", checked_stage)


def _note(checker: StreamChecker, op: Any, args: Any, kwargs: Any, result: Any) -> None:
    """Count an operation that was carried out."""
    kind = plan_of(op).kind
    reads, writes, sources, to_host = _arguments(op, args, kwargs)
    made = {found for tensor in _tensors_in([result]) for found in _known(tensor)}
    fresh = made - reads - writes
    is_view = not writes and not fresh and kind not in (OpKind.READ_SCALAR, OpKind.CONVERT)
    if kind is OpKind.CONVERT and not fresh:
        to_host = to_host or not made & reads
        is_view = bool(made & reads)
    if is_view or kind is OpKind.SAME_CLASS:
        return
    waits = not (kwargs.get("non_blocking") or (op is _aten.copy_.default and len(args) > 2 and args[2]))
    with checker.lock:
        stream, step = checker.access(reads, writes | fresh)
        for source in sources:
            checker.note_copy(source, stream, step)
        if to_host and not waits:
            checker.report("a copy to the host that nobody waits for")
        crosses = to_host or (bool(sources) and kind in (OpKind.COPY, OpKind.CONVERT))
        if kind is OpKind.READ_SCALAR or (crosses and waits):
            checker.host.learn(stream.now())


def _arguments(
    op: Any, args: Any, kwargs: Any
) -> tuple[set[TrackedAllocation], set[TrackedAllocation], list[torch.Tensor], bool]:
    """Memory that an operation reads and writes, its tensors on the host, and whether it writes one of these."""
    reads: set[TrackedAllocation] = set()
    writes: set[TrackedAllocation] = set()
    sources: list[torch.Tensor] = []
    to_host = False
    schema = op._schema.arguments
    given = [(schema[place], value) for place, value in enumerate(args)]
    given += [(argument, kwargs[argument.name]) for argument in schema if argument.name in kwargs]
    for argument, value in given:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _tensors_in([value]):
            found = _known(tensor)
            (writes if is_written else reads).update(found)
            if not isinstance(tensor, sim_tensor.SimTensor) and tensor.device.type == "cpu":
                to_host = to_host or is_written
                if not is_written:
                    sources.append(tensor)
    return reads, writes, sources, to_host


def _known(tensor: object) -> set[TrackedAllocation]:
    found = allocation_of(tensor)
    return set() if found is None else {found}


def _tensors_in(values: Iterable[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)
