"""`HeaderLimit`: uvicorn's HTTP protocol on httptools, with a bound on what precedes and follows the body of a call.

httptools keeps any number of headers of any length before a call reaches the application and its keys: a
caller without a key could fill the memory of the server. uvicorn's other protocol, on h11, has such a bound.
"""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: bytes of a head, and of the trailers of a body, that have arrived and are not complete
MOST_HEADER_BYTES = 1 << 16


class HeaderLimit(HttpToolsProtocol):
    """One connection."""

    #: bytes since the head of a call, a part of its body or its end was complete
    _open_bytes = 0

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._open_bytes += len(data)
        super().data_received(data)
        if self._open_bytes > MOST_HEADER_BYTES and not self.transport.is_closing():
            self.on_long_head()
            self.send_400_response(f"The headers have more than {MOST_HEADER_BYTES} bytes.")

    def on_long_head(self) -> None:
        """Note that a head, or the trailers, have too many bytes; by default, nothing."""

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._open_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._open_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """See httptools."""
        self._open_bytes = 0
        super().on_message_complete()
