"""`UnreadBody`: reads the rest of a body that a call did not read, before its connection is closed.

A connection that is closed while its client still sends is reset, and the client loses the answer that says why it was
refused: Python's urllib closes each connection, and sends the whole body before it reads. Connections that stay open
need nothing: the server skips the body there.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

#: how long the rest of a body is read after its answer. Not bounded in bytes, which are not kept: a body that is
#: refused for its size is larger than any bound of sizes
MOST_SKIPPED_SECONDS = 2.0


class UnreadBody:
    """Stands between a server and an application for one call: `receive` and `send` are passed to the application."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.lower(): value.lower() for name, value in scope["headers"]}
        self._receive, self._send = receive, send
        asked = {word.strip() for word in headers.get(b"connection", b"").split(b",")}
        self._closes = b"close" in asked or (scope["http_version"] == "1.0" and b"keep-alive" not in asked)
        # a client that asks first sends nothing after a refusal, unless the application has begun to read
        has_body = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        self._is_read = not has_body or b"expect" in headers

    async def receive(self) -> Message:
        """Return the next message of the client."""
        message = await self._receive()
        self._is_read = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        """Pass on a message of the application; before the last one, the rest of the body is read."""
        if message["type"] == "http.response.start":
            self._closes = self._closes or any(
                name.lower() == b"connection" and value.lower() == b"close" for name, value in message["headers"]
            )
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if not is_last or self._is_read or not self._closes:
            await self._send(message)
            return
        await self._send({**message, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(MOST_SKIPPED_SECONDS):
                await self._skip()
        await self._send({"type": "http.response.body", "body": b""})

    def leave(self) -> None:
        """Read nothing more of the body: the server ends."""
        self._is_read = True

    async def _skip(self) -> None:
        while not self._is_read:
            await self.receive()
