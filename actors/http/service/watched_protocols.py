"""uvicorn's protocols for calls and web sockets, with the limits of `Connections`.

The names of uvicorn that are used here, and that its documentation does not have: `cycle` with `more_body` and
`response_complete`, `flow` with `read_paused`, `scope` and `transport`, of protocols; `watched_protocols` tests them.
"""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from modelpool.actors.http.service.access import CALLER, Caller
from modelpool.actors.http.service.connections import Connections, Phase

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    _Http = HttpToolsProtocol
else:
    _Http = object

#: the answer to a connection that is refused
REFUSED = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"retry-after: 5\r\nconnection: close\r\ncontent-length: 44\r\n\r\n"
    b"Too many connections are open at the moment."
)
#: what a web socket is to `Connections`: a call that is answered
_SOCKET = object()


class WatchedCalls(_Http):
    """A connection for calls: mixed into a protocol of uvicorn's."""

    watching: Connections
    head_began_at: float | None = None
    received_bytes = 0
    is_unread = False
    _is_refused = False

    @property
    def call(self) -> object:
        """See `Watched`."""
        return self.cycle

    @property
    def is_paused(self) -> bool:
        """See `Watched`."""
        return self.flow.read_paused

    @property
    def phase(self) -> Phase:
        """See `Watched`."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return Phase.HEAD
        return Phase.BODY if cycle.more_body else Phase.ANSWER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        stream = cast("asyncio.Transport", transport)
        if not self.watching.admit(self, stream):
            self._is_refused = True
            stream.write(REFUSED)
            stream.close()
            return
        super().connection_made(stream)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if self._is_refused:
            return
        caller = None if self.scope is None else self.scope.get(CALLER)
        if isinstance(caller, Caller):
            caller.call.is_gone = True
        self.watching.forget(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        if self._is_refused:
            return
        self.received_bytes += len(data)
        before = self.cycle
        if self.head_began_at is None and self.phase is Phase.HEAD:
            self.head_began_at = self.loop.time()
        super().data_received(data)
        if self.cycle is not before:
            self.head_began_at = None

    def on_long_head(self) -> None:
        """See `HeaderLimit`."""
        self.watching.note_long_head()

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.is_unread = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.is_unread = False
        super().resume_writing()


class WatchedSocket(WebSocketsSansIOProtocol):
    """A web socket."""

    watching: Connections
    call: object = _SOCKET
    head_began_at: float | None = None
    received_bytes = 0
    is_unread = False
    is_paused = False
    phase = Phase.ANSWER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self.watching.admit(self, cast("asyncio.Transport", transport))
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self.watching.forget(self.transport)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.is_unread = True
        super().pause_writing()

    def resume_writing(self) -> None:
        """See `asyncio.Protocol`."""
        self.is_unread = False
        super().resume_writing()


def watched_protocols(watching: Connections) -> tuple[type[asyncio.Protocol], type[asyncio.Protocol]]:
    """Return the protocols of calls and of web sockets, with connections limited by `watching`: calls on httptools,
    which is faster than h11, where that is installed."""
    base: Any
    if find_spec("httptools") is None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        base = H11Protocol
    else:
        from modelpool.actors.http.service.header_limit import HeaderLimit

        base = HeaderLimit
    calls = type("WatchedHttp", (WatchedCalls, base), {"watching": watching})
    sockets = type("WatchedWebSocket", (WatchedSocket,), {"watching": watching})
    return calls, sockets
