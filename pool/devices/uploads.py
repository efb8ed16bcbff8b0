"""Weights on their way from the host to a device, each for one use.

An `Uploader` hands out a device copy of a host tensor. On CUDA the copies run on streams of their own, ahead of the
layers that need them: the order in which weights were asked for in one pass says what the next pass will ask for.
Elsewhere the same interface copies at once. A wrong guess costs a copy and nothing else. Does not know modules, dtypes
or patches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from modelpool.pool.devices.copy_streams import CopyStreams, Event, Stream
from modelpool.pool.devices.pinned_memory import PinnedPages, StagingRing

#: device memory that copies made ahead may take, unless told otherwise
AHEAD_BYTES = 256 << 20

#: tensors of one pass, at most; a model has some thousands
MOST_HOSTS = 1 << 16

#: which bytes of the host a tensor shows, and as what
HostKey: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class Uploader(Protocol):
    """Brings host tensors to one device."""

    @property
    def order(self) -> StreamOrder:
        """What one pass asked for, as far as it is known."""
        ...

    def upload(self, host: Tensor) -> Tensor:
        """A fresh copy of `host` on the device, in its own dtype, that the caller's stream may read. Not to be kept."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent."""
        ...


class DirectUploader:
    """Copies at once, for devices without streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.order = StreamOrder()

    def upload(self, host: Tensor) -> Tensor:
        """As `Uploader.upload`."""
        return host.to(self._device)

    def close(self) -> None:
        """As `Uploader.close`."""


@dataclass(frozen=True, slots=True)
class StreamOrder:
    """The host tensors of one pass in the order in which they were asked for. Holds them."""

    hosts: tuple[Tensor, ...] = ()

    def after(self, index: int) -> int:
        """The place that follows `index`; the first one after the last, because passes repeat."""
        return (index + 1) % len(self.hosts)


@dataclass(slots=True)
class OrderRecorder:
    """Makes orders out of what is asked for: one ends where a tensor of it is asked for again."""

    _hosts: list[Tensor] = field(default_factory=list)
    _places: dict[HostKey, int] = field(default_factory=dict)

    def see(self, host: Tensor) -> StreamOrder | None:
        """Note `host`. Returns the order that just ended, from the last time that `host` was asked for, if one did.

        What came before it was asked for once only: rows of a table, or the way into a loop.
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
class _Ahead:
    """A copy that was started before it was asked for. Holds `host`, so that its address stays its own."""

    host: Tensor
    copy: Tensor
    done: Event

    @property
    def key(self) -> HostKey:
        return key_of(self.host)


class StreamingUploader:
    """Copies on streams of its own, ahead of use. One for each run of a component: it guesses from the run's past.

    Holds host tensors that were asked for until `close`, and counts on nobody writing to them.
    Invariant: copies that are ahead take at most `ahead_bytes` of the device.
    """

    def __init__(
        self,
        device: torch.device,
        streams: CopyStreams,
        staging: StagingRing | None = None,
        pages: PinnedPages | None = None,
        ahead_bytes: int = AHEAD_BYTES,
        order: StreamOrder | None = None,
    ) -> None:
        self._device = device
        self._streams = streams
        self._staging = staging
        self._pages = pages
        self._most_ahead_bytes = ahead_bytes
        self._recorder = OrderRecorder()
        self._ahead: deque[_Ahead] = deque()
        self._ahead_bytes = 0
        self._places: dict[HostKey, int] = {}
        self.order = StreamOrder()
        self.hits = 0
        self.misses = 0
        if order is not None:
            self._follow(order)

    def upload(self, host: Tensor) -> Tensor:
        """As `Uploader.upload`; starts the copies that are likely to be asked for next."""
        key = key_of(host)
        found = self._claim(key)
        if found is None:
            self.misses += 1
            copy, done = self._start_now(host)
        else:
            self.hits += 1
            copy, done = found.copy, found.done
        self._streams.maker.current().wait_event(done)
        ended = self._recorder.see(host)
        if ended is not None and len(ended.hosts) >= len(self.order.hosts):  # a shorter one is a loop inside a pass
            self._follow(ended)
        place = self._places.get(key)
        if place is not None:
            self._look_ahead(place)
        return copy

    def close(self) -> None:
        """Drop the copies that nobody asked for, and what the order holds. Idempotent."""
        self._drop(len(self._ahead))
        self._follow(StreamOrder())
        self._recorder = OrderRecorder()

    @property
    def ahead_bytes(self) -> int:
        """Device memory that copies made ahead take now."""
        return self._ahead_bytes

    def _follow(self, order: StreamOrder) -> None:
        self.order = order
        self._places = {key_of(host): place for place, host in enumerate(order.hosts)}

    def _claim(self, key: HostKey) -> _Ahead | None:
        """The copy for `key`, if it is under way; those before it were guessed wrong and are dropped."""
        for index, ahead in enumerate(self._ahead):
            if ahead.key == key:
                self._drop(index)
                self._ahead.popleft()
                self._ahead_bytes -= ahead.host.nbytes
                return ahead
        return None

    def _drop(self, count: int) -> None:
        for _ in range(count):
            self._ahead_bytes -= self._ahead.popleft().host.nbytes

    def _look_ahead(self, place: int) -> None:
        """Start copies of what follows `place` in the order, as far as the bytes go."""
        hosts = self.order.hosts
        expected = self.order.after(place)
        for ahead in self._ahead:
            if ahead.key != key_of(hosts[expected]):
                self._drop(len(self._ahead))  # they follow another place
                expected = self.order.after(place)
                break
            expected = self.order.after(expected)
        while len(self._ahead) < len(hosts) - 1:
            host = hosts[expected]
            if self._ahead_bytes + host.nbytes > self._most_ahead_bytes:
                return
            try:
                copy, done = self._start(host)
            except torch.OutOfMemoryError:  # a guess is not worth a run
                self._drop(len(self._ahead))
                return
            self._ahead.append(_Ahead(host, copy, done))
            self._ahead_bytes += host.nbytes
            expected = self.order.after(expected)

    def _start_now(self, host: Tensor) -> tuple[Tensor, Event]:
        """As `_start`, for a copy that is needed: what is ahead makes room for it."""
        try:
            return self._start(host)
        except torch.OutOfMemoryError:
            if not self._ahead:
                raise
            self._drop(len(self._ahead))
        return self._start(host)

    def _start(self, host: Tensor) -> tuple[Tensor, Event]:
        """A copy that is under way, and the event of its end."""
        stream = self._streams.take()
        with self._streams.maker.on(stream):
            if self._goes_direct(host):
                copy = host.to(self._device, non_blocking=True)
            else:
                copy = self._by_staging(host, stream)
        done = self._streams.maker.new_event()
        done.record(stream)
        return copy, done

    def _goes_direct(self, host: Tensor) -> bool:
        if not self._staging or not host.is_contiguous():
            return True
        return self._pages is not None and self._pages.holds(host)

    def _by_staging(self, host: Tensor, stream: Stream) -> Tensor:
        """Copy through pinned buffers, piece by piece."""
        assert self._staging is not None
        copy = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        source, target = _bytes_of(host), _bytes_of(copy)
        step = self._staging.slot_bytes
        for begin in range(0, source.numel(), step):
            filled, slot = self._staging.stage(source[begin : begin + step])
            target[begin : begin + step].copy_(filled, non_blocking=True)
            copied = self._streams.maker.new_event()
            copied.record(stream)
            slot.busy = copied
        return copy


def key_of(host: Tensor) -> HostKey:
    """Which bytes of the host `host` shows, and as what: a copy of the one is a copy of every tensor with its key."""
    return host.data_ptr(), host.dtype, tuple(host.shape), host.stride()


def streamed_bytes(order: StreamOrder | Sequence[Tensor]) -> int:
    """Bytes that one pass brings to the device."""
    hosts = order.hosts if isinstance(order, StreamOrder) else order
    return sum(host.nbytes for host in hosts)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
