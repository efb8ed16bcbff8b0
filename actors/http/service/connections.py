"""`Connections`: the open connections of a server, with limits in number and time, before anybody's key is known.

A connection costs an open file, whoever it belongs to, and whether it says something or not. Those that only wait are
closed first: when there are too many, a new connection takes the place of the one that has waited longest. Knows no
HTTP library; `watched_protocols` tells it what its connections wait for.
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.service.limit_log import LimitLog

#: interval of looking at all connections
SWEEP_SECONDS = 1.0
#: a body that arrives has at least this rate, over `body_seconds`
LEAST_BODY_BYTES_PER_SECOND = 1024
#: a connection that is closed and does not take what was sent to it is ended after this time
CLOSE_SECONDS = 5.0
#: one that was opened, or has called, within this time is the last to make room for others
YOUNG_SECONDS = 2.0
#: a body that arrives slower than this may make room for others
SLOW_BODY_BYTES_PER_SECOND = 16 << 10
#: of the connections, those that make room at once when there are too many: looking for them looks at all
_ROOM_SHARE = 32
#: open files besides connections: files of the pool, of Ray, and of outputs that are sent; each connection may send one
OTHER_FILES, FILES_PER_CONNECTION = 256, 2
#: the most open files that are asked for, where the system permits any number
_MOST_FILES = 1 << 20


class Phase(Enum):
    """What a connection is used for: it waits for a call, a call arrives, or is answered (also: a web socket)."""

    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"


class Watched(Protocol):
    """A connection, as its protocol sees it.

    call            identifies the current or last call; None before the first
    head_began_at   when the first byte of a call came that is not complete; None if none came
    received_bytes  since it was opened
    is_unread       whether the peer does not take sent data, and the server has stopped sending
    is_paused       whether the server does not take what the peer sends
    """

    head_began_at: float | None
    received_bytes: int
    is_unread: bool

    @property
    def call(self) -> object: ...
    @property
    def transport(self) -> asyncio.Transport: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def phase(self) -> Phase: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """See `ServeSection`. `most_of_address` is 0 for any number; `exempt` addresses, and addresses of this machine,
    have any number."""

    most: int
    most_of_address: int = 0
    exempt: frozenset[str] = frozenset()
    head_seconds: float = 20.0
    body_seconds: float = 10.0
    idle_seconds: float = 75.0
    unread_seconds: float = 60.0

    @classmethod
    def of(cls, settings: ServeSection, open_files: int) -> ConnectionLimits:
        """Return the limits of a process that may have `open_files`."""
        return cls(
            max(16, min(settings.connections, (open_files - OTHER_FILES) // FILES_PER_CONNECTION)),
            settings.connections_per_address,
            frozenset(settings.trusted_proxies),
            settings.head_seconds,
            settings.body_seconds,
            settings.idle_seconds,
            settings.unread_seconds,
        )


@dataclass(slots=True, eq=False)
class _Connection:
    """An open connection; `since` is when its phase began, or progress was last seen: `bytes` received by then, or
    `bytes` that wait to be sent."""

    watched: Watched
    address: str
    opened_at: float
    since: float
    phase: Phase = Phase.HEAD
    call: object = None
    bytes: int = 0
    closing_at: float | None = None


class Connections:
    """One for each server. Belongs to one event loop."""

    def __init__(self, limits: ConnectionLimits, log: LimitLog) -> None:
        self.limits = limits
        self._log = log
        #: by transport: a web socket continues the transport of a call
        self._open: dict[asyncio.Transport, _Connection] = {}
        self._by_address: Counter[str] = Counter()
        self._sweeping: asyncio.TimerHandle | None = None
        log.open_connections = self.__len__

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, watched: Watched, transport: asyncio.Transport) -> bool:
        """Count a connection, in the place of one that waits if there are too many. False if it is refused."""
        if (known := self._open.get(transport)) is not None:
            known.watched = watched
            return True
        now = asyncio.get_running_loop().time()
        address = _address_of(transport)
        if not self._has_room(address, now):
            return False
        self._open[transport] = _Connection(watched, address, now, now)
        self._by_address[address] += 1
        if self._sweeping is None:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._sweep)
        return True

    def forget(self, transport: asyncio.Transport) -> None:
        """Count a connection no more. Idempotent."""
        found = self._open.pop(transport, None)
        if found is None:
            return
        self._by_address[found.address] -= 1
        if not self._by_address[found.address]:
            del self._by_address[found.address]

    def note_long_head(self) -> None:
        """Count a connection that is ended for the bytes of a head."""
        self._log.acted("header_bytes", "ended a connection whose head had too many bytes")

    def _has_room(self, address: str, now: float) -> bool:
        limits = self.limits
        bound = limits.most_of_address
        if bound and self._by_address[address] >= bound and not _is_local(address) and address not in limits.exempt:
            of_address = [each for each in self._open.values() if each.address == address]
            if not self._make_room(of_address, now, "connections_per_address", f"{bound} of one address"):
                return False
        if len(self._open) < limits.most:
            return True
        return self._make_room(self._open.values(), now, "connections", f"{limits.most} in all")

    def _make_room(self, among: Iterable[_Connection], now: float, limit: str, found: str) -> bool:
        """End some connections that wait, the longest first. False if there is none."""
        known = list(among)
        ranked = sorted(
            ((rank, each.since, place) for place, each in enumerate(known) if (rank := _rank(each, now)) is not None)
        )
        if not ranked:
            self._log.acted(limit, f"found {found}, all in use; a new one is refused")
            return False
        lowest = ranked[0][0]
        ended = [place for rank, _, place in ranked[: max(1, len(known) // _ROOM_SHARE)] if rank == lowest]
        for place in ended:
            self._log.acted(limit, f"found {found}; ended the one that had waited longest, for a new one")
            self._end(known[place])
        return True

    def _end(self, connection: _Connection) -> None:
        transport = connection.watched.transport
        self.forget(transport)
        transport.abort()

    def _sweep(self) -> None:
        """Look at all connections, and end those that have waited too long."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for transport, connection in tuple(self._open.items()):
            limit = self._exceeded(transport, connection, now)
            if limit:
                self._log.acted(limit, _ENDED[limit])
                self._end(connection)
        self._sweeping = loop.call_later(SWEEP_SECONDS, self._sweep) if self._open else None

    def _exceeded(self, transport: asyncio.Transport, connection: _Connection, now: float) -> str:
        """Return the limit that a connection exceeds, or ""."""
        watched = connection.watched
        if transport.is_closing():
            connection.closing_at = connection.closing_at or now
            return "unread_seconds" if now - connection.closing_at > CLOSE_SECONDS else ""
        _note_phase(connection, now)
        match connection.phase:
            case Phase.HEAD if watched.head_began_at is not None:
                return "head_seconds" if now - watched.head_began_at > self.limits.head_seconds else ""
            case Phase.HEAD:
                return "idle_seconds" if now - connection.since > self.limits.idle_seconds else ""
            case Phase.BODY:
                return self._slow_body(connection, now)
        return self._unread(transport, connection, now)

    def _slow_body(self, connection: _Connection, now: float) -> str:
        watched, passed = connection.watched, now - connection.since
        if not watched.is_paused:
            if passed < self.limits.body_seconds:
                return ""
            if watched.received_bytes - connection.bytes < passed * LEAST_BODY_BYTES_PER_SECOND:
                return "body_seconds"
        connection.since, connection.bytes = now, watched.received_bytes
        return ""

    def _unread(self, transport: asyncio.Transport, connection: _Connection, now: float) -> str:
        waiting = transport.get_write_buffer_size() if connection.watched.is_unread else 0
        if not waiting or waiting != connection.bytes:
            connection.since, connection.bytes = now, waiting
        return "unread_seconds" if now - connection.since > self.limits.unread_seconds else ""


#: what a limit in time does, for the log
_ENDED = {
    "head_seconds": "ended a connection whose call did not arrive",
    "body_seconds": f"ended a connection whose body arrived at less than {LEAST_BODY_BYTES_PER_SECOND} bytes/s",
    "idle_seconds": "ended a connection without a call",
    "unread_seconds": "ended a connection whose peer did not read",
}


def raised_open_files() -> int:
    """Raise the number of files that this process may open as far as the system permits it, and return it."""
    if sys.platform == "win32":  # which has no such number
        return _MOST_FILES
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has a lower bound that it does not name
            return soft
        return wanted
    return _MOST_FILES if soft == resource.RLIM_INFINITY else soft


def _note_phase(connection: _Connection, now: float) -> None:
    watched = connection.watched
    phase, call = watched.phase, watched.call
    if phase is not connection.phase or call is not connection.call:
        connection.phase, connection.call, connection.since = phase, call, now
        connection.bytes = watched.received_bytes


def _rank(connection: _Connection, now: float) -> int | None:
    """Return when a connection makes room for a new one, lower ones first; None if it does not."""
    _note_phase(connection, now)
    watched = connection.watched
    age_seconds = now - connection.since
    if watched.transport.is_closing():
        return 0
    match connection.phase:
        case Phase.HEAD:
            has_called = watched.call is not None and watched.head_began_at is None
            return (1 if not has_called else 2) if age_seconds > YOUNG_SECONDS else 4
        case Phase.BODY if not watched.is_paused and now - connection.opened_at > YOUNG_SECONDS:
            arrived = watched.received_bytes - connection.bytes
            return 3 if arrived < max(age_seconds, 1.0) * SLOW_BODY_BYTES_PER_SECOND else None
        case Phase.ANSWER if watched.is_unread and age_seconds > YOUNG_SECONDS:
            return 3
    return None


def _address_of(transport: asyncio.Transport) -> str:
    """Return the address of the peer; "" for a local socket without one."""
    peer = transport.get_extra_info("peername")
    return str(peer[0]) if isinstance(peer, tuple | list) and peer else ""


def _is_local(address: str) -> bool:
    """Whether the peer is this machine: programs of many users, or a proxy."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return not address
