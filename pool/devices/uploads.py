"""Copies weights from the host to a device, each for a single use, ahead of use on CUDA.

An `Uploader` returns a device copy of a host tensor. On CUDA the copies run on separate streams, ahead of the layers
that need them: the order of requests in one pass predicts the next pass. Elsewhere the same interface copies
synchronously. A misprediction costs one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.devices.copier import Copier
from modelpool.pool.devices.copy_streams import CopyStreams, Event, Stream
from modelpool.pool.devices.pinned_memory import PinnedPages, StagingRing
from modelpool.pool.devices.staged_copies import Fill, copy_staged

#: default device memory for copies ahead of use
AHEAD_BYTES = 256 << 20

#: of that memory, at most this fraction is for copies that are kept for a run: the factors of LoRAs
KEPT_SHARE = 0.75

#: maximum tensors of one pass; a model has some thousands
MOST_HOSTS = 1 << 16

#: address and layout of a host tensor
HostKey: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class Uploader(Protocol):
    """Copies host tensors to one device."""

    @property
    def order(self) -> StreamOrder:
        """The order of one pass, as far as it is known."""
        ...

    def upload(self, host: Tensor) -> Tensor:
        """Return a new copy of `host` on the device, in its own dtype, readable by the current stream. Not to be
        kept."""
        ...

    def upload_to_keep(self, host: Tensor) -> Tensor:
        """As `upload`, for a small tensor that every pass reads and nobody writes: `kept` returns the copy from now on,
        if there is room for it."""
        ...

    def kept(self, host: Tensor) -> Tensor | None:
        """Return the copy of `host` that is kept, which must not be written; None if there is none."""
        ...

    def forget(self, hosts: Iterable[Tensor]) -> None:
        """Expect no more requests for `hosts` in this run."""
        ...

    def leave(self, size_bytes: int) -> None:
        """Leave so much of the memory for copies ahead of use to others, for the rest of this run."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent."""
        ...


class _KeptCopies:
    """Copies that stay on the device until the end of a run, within a limit."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        #: with the host tensors, so that their addresses are not reused
        self._kept: dict[HostKey, tuple[Tensor, Tensor]] = {}
        self.held_bytes = 0

    def limit(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes

    def has_room(self, host: Tensor) -> bool:
        return self.held_bytes + host.nbytes <= self._most_bytes

    def put(self, host: Tensor, copy: Tensor) -> None:
        self._kept[key_of(host)] = host, copy
        self.held_bytes += host.nbytes

    def get(self, host: Tensor) -> Tensor | None:
        found = self._kept.get(key_of(host))
        return None if found is None else found[1]

    def clear(self) -> None:
        self._kept.clear()
        self.held_bytes = 0


class DirectUploader:
    """Copies synchronously, for devices without streams."""

    def __init__(self, device: torch.device, kept_bytes: int = 0) -> None:
        self._device = device
        self._kept = _KeptCopies(kept_bytes)
        self.order = StreamOrder()

    def upload(self, host: Tensor) -> Tensor:
        """As `Uploader.upload`."""
        return host.to(self._device)

    def upload_to_keep(self, host: Tensor) -> Tensor:
        """As `Uploader.upload_to_keep`: within what was granted."""
        copy = self.upload(host)
        if self._kept.has_room(host):
            self._kept.put(host, copy)
        return copy

    def kept(self, host: Tensor) -> Tensor | None:
        """As `Uploader.kept`."""
        return self._kept.get(host)

    def forget(self, hosts: Iterable[Tensor]) -> None:
        """As `Uploader.forget`: nothing is expected."""

    def leave(self, size_bytes: int) -> None:
        """As `Uploader.leave`: nothing is copied ahead."""

    def close(self) -> None:
        """As `Uploader.close`."""
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The host tensors of one pass in order of use. Holds references to them."""

    hosts: tuple[Tensor, ...] = ()

    def after(self, index: int) -> int:
        """Return the position after `index`, wrapping to the first, because passes repeat."""
        return (index + 1) % len(self.hosts)


@dataclass(slots=True)
class OrderRecorder:
    """Records orders: one ends when a tensor of it is requested again."""

    _hosts: list[Tensor] = field(default_factory=list)
    _places: dict[HostKey, int] = field(default_factory=dict)

    def record(self, host: Tensor) -> StreamOrder | None:
        """Record `host`. Returns the order that just ended, starting at the previous request of `host`, if one did.

        Requests before that occurred only once: rows of a table, or the entry of a loop.
        """
        key = key_of(host)
        ended = None
        if key in self._places or len(self._hosts) == MOST_HOSTS:
            ended = StreamOrder(tuple(self._hosts[self._places.get(key, 0) :]))
            self._hosts.clear()
            self._places.clear()
        self._places[key] = len(self._hosts)
        self._hosts.append(host)
        return ended


@dataclass(frozen=True, slots=True)
class CopyEnd:
    """The end of a copy.

    done    happens on the device when the copy is done, once it is recorded
    issued  ends when the copier has recorded it; None if it is recorded already
    """

    done: Event
    issued: Future[None] | None = None

    def hold(self, reader: Stream) -> None:
        """Let `reader` wait for the copy, or for what there is of it if it failed. Raises what the copier raised."""
        try:
            if self.issued is not None:
                self.issued.result()
        finally:
            reader.wait_event(self.done)

    def drop(self, owner: Stream) -> None:
        """Leave out the copy; if it has begun, `owner`, the stream of its memory, waits for it before further work."""
        if self.issued is not None and self.issued.cancel():
            return
        with suppress(Exception):  # the error of a copy that nobody needs
            self.hold(owner)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A copy started before it was requested. Holds `host`, so that its address is not reused."""

    key: HostKey
    host: Tensor
    copy: Tensor
    end: CopyEnd


class StreamingUploader:
    """Copies on separate streams ahead of use. One for each run of a component: it predicts from the past of the run.

    Buffers are filled, and copies from them started, by the copier; the thread that requests a tensor waits only for
    one that was not copied ahead in time. Memory is allocated by the requesting thread on its own stream, which a copy
    stream has waited for by then (`pool.devices.copy_streams`).

    Holds requested host tensors until `close`; they must not be written. Invariant: copies ahead of use and kept copies
    together take at most `ahead_bytes` of the device; kept copies for which a plan granted memory do not count.
    """

    def __init__(
        self,
        device: torch.device,
        streams: CopyStreams,
        staging: StagingRing | None = None,
        pages: PinnedPages | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        order: StreamOrder | None = None,
        copier: Copier | None = None,
        fill: Fill = Tensor.copy_,
        kept_bytes: int = 0,
    ) -> None:
        """Without a `copier`, the requesting thread fills the buffers, by `fill`. `kept_bytes` were granted for kept
        copies; 0: they take at most `KEPT_SHARE` of the memory for copies ahead."""
        self._device = device
        self._streams = streams
        self._copier = copier
        self._fill = fill
        self._staging = staging
        self._pages = pages
        self._most_ahead_bytes = ahead_bytes
        self._recorder = OrderRecorder()
        #: in the order of the pass, without gaps once `_ahead_is_of_order`
        self._ahead: deque[_Ahead] = deque()
        self._ahead_is_of_order = True
        self._ahead_bytes = 0
        self._is_granted = kept_bytes > 0
        self._kept = _KeptCopies(kept_bytes or int(KEPT_SHARE * ahead_bytes))
        self._places: dict[HostKey, int] = {}
        self.order = StreamOrder()
        self.hits = 0
        self.misses = 0
        if order is not None:
            self._follow(order)

    def upload(self, host: Tensor) -> Tensor:
        """As `Uploader.upload`; starts the copies that are expected next."""
        key = key_of(host)
        found = self._claim(key)
        if found is None:
            self.misses += 1
            copy, end = self._start_now(host)
        else:
            self.hits += 1
            copy, end = found.copy, found.end
        end.hold(self._streams.maker.current())
        ended = self._recorder.record(host)
        if ended is not None and len(ended.hosts) >= len(self.order.hosts):  # a shorter one is a loop inside a pass
            self._follow(ended)
        place = self._places.get(key)
        if place is not None:
            self._look_ahead(place)
        return copy

    def upload_to_keep(self, host: Tensor) -> Tensor:
        """As `Uploader.upload_to_keep`."""
        if not self._kept.has_room(host):
            return self.upload(host)
        while self._ahead and not self._is_granted and self._taken_bytes + host.nbytes > self._most_ahead_bytes:
            self._drop_last()
        copy, end = self._start_now(host)
        end.hold(self._streams.maker.current())
        self._kept.put(host, copy)
        return copy

    def kept(self, host: Tensor) -> Tensor | None:
        """As `Uploader.kept`."""
        return self._kept.get(host)

    def forget(self, hosts: Iterable[Tensor]) -> None:
        """As `Uploader.forget`: they are copied ahead no more."""
        gone = {key_of(host) for host in hosts}
        self._drop(len(self._ahead))
        self._follow(StreamOrder(tuple(host for host in self.order.hosts if key_of(host) not in gone)))

    def leave(self, size_bytes: int) -> None:
        """As `Uploader.leave`. Copies that are kept already stay."""
        self._drop(len(self._ahead))
        self._most_ahead_bytes = max(0, self._most_ahead_bytes - size_bytes)
        if not self._is_granted:
            self._kept.limit(int(KEPT_SHARE * self._most_ahead_bytes))

    def close(self) -> None:
        """Drop unused copies and the references of the order, and wait for the copier. Idempotent."""
        self._drop(len(self._ahead))
        self._kept.clear()
        if self._copier is not None:
            self._copier.drain()
        self._follow(StreamOrder())
        self._recorder = OrderRecorder()

    @property
    def ahead_bytes(self) -> int:
        """Device memory of copies ahead of use."""
        return self._ahead_bytes

    @property
    def _taken_bytes(self) -> int:
        """Of the memory for copies ahead of use."""
        return self._ahead_bytes + (0 if self._is_granted else self._kept.held_bytes)

    def _follow(self, order: StreamOrder) -> None:
        self._ahead_is_of_order = False
        self.order = order
        self._places = {key_of(host): place for place, host in enumerate(order.hosts)}

    def _claim(self, key: HostKey) -> _Ahead | None:
        """The copy for `key`, if it was started; copies before it were mispredicted and are dropped."""
        for index, ahead in enumerate(self._ahead):
            if ahead.key == key:
                self._drop(index)
                self._ahead.popleft()
                self._ahead_bytes -= ahead.host.nbytes
                return ahead
        return None

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._dropped(self._ahead.popleft())

    def _drop_last(self) -> None:
        self._dropped(self._ahead.pop())

    def _dropped(self, ahead: _Ahead) -> None:
        ahead.end.drop(self._streams.maker.current())
        self._ahead_bytes -= ahead.host.nbytes

    def _look_ahead(self, place: int) -> None:
        """Start copies of the tensors after `place`, within the byte limit."""
        hosts = self.order.hosts
        expected = self.order.after(place)
        # copies ahead follow one another, so the first tells whether they were started from this position
        known = list(self._ahead)[: 1 if self._ahead_is_of_order else None]
        if any(ahead.key != key_of(hosts[(expected + n) % len(hosts)]) for n, ahead in enumerate(known)):
            self._drop(len(self._ahead))
        self._ahead_is_of_order = True
        expected = (expected + len(self._ahead)) % len(hosts)
        while len(self._ahead) < len(hosts) - 1:
            host = hosts[expected]
            if self._taken_bytes + host.nbytes > self._most_ahead_bytes:
                return
            try:
                copy, end = self._start(host)
            except torch.OutOfMemoryError:  # a prediction must not fail a run
                self._drop(len(self._ahead))
                return
            self._ahead.append(_Ahead(key_of(host), host, copy, end))
            self._ahead_bytes += host.nbytes
            expected = self.order.after(expected)

    def _start_now(self, host: Tensor) -> tuple[Tensor, CopyEnd]:
        """As `_start`, for a required copy: on out-of-memory, copies ahead are dropped first."""
        try:
            return self._start(host)
        except torch.OutOfMemoryError:
            if not self._ahead:
                raise
            self._drop(len(self._ahead))
        return self._start(host)

    def _start(self, host: Tensor) -> tuple[Tensor, CopyEnd]:
        """A copy in flight, and its end."""
        is_direct = self._goes_direct(host)
        copy = torch.empty_like(host, device=self._device, requires_grad=False)
        stream, done = self._streams.take(), self._streams.maker.new_event()

        def issue() -> None:
            with self._streams.maker.on(stream):
                try:
                    if is_direct:
                        copy.copy_(host, non_blocking=True)
                    else:
                        self._by_staging(host, copy, stream)
                finally:
                    done.record(stream)

        if not is_direct and self._copier is not None:
            return copy, CopyEnd(done, self._copier.submit(issue))
        try:
            issue()
        except BaseException:  # pieces may still be copied into the memory, which is freed now
            self._streams.maker.current().wait_event(done)
            raise
        return copy, CopyEnd(done)

    def _goes_direct(self, host: Tensor) -> bool:
        if not self._staging or not host.is_contiguous():
            return True
        return self._pages is not None and self._pages.holds(host)

    def _by_staging(self, host: Tensor, copy: Tensor, stream: Stream) -> None:
        """Copy through pinned buffers in pieces."""
        assert self._staging is not None
        copy_staged(self._staging, _bytes_of(host), _bytes_of(copy), self._streams.maker, stream, self._fill)


def key_of(host: Tensor) -> HostKey:
    """Return the key of the bytes and layout of `host`: tensors with equal keys have equal copies."""
    return host.data_ptr(), host.dtype, tuple(host.shape), host.stride()


def streamed_bytes(order: StreamOrder | Sequence[Tensor]) -> int:
    """Return the bytes that one pass copies to the device."""
    hosts = order.hosts if isinstance(order, StreamOrder) else order
    return sum(host.nbytes for host in hosts)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
