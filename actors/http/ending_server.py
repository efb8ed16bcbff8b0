"""`EndingServer`: a uvicorn server that ends in order: calls first, then the application, and then the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    import socket

#: time for open calls when the server ends; streams never end by themselves
CALL_SECONDS = 2.0
#: after which uvicorn goes on without calls that do not end when they are cancelled
SHUTDOWN_SECONDS = 4


class EndingServer(uvicorn.Server):
    """Cancels open calls after CALL_SECONDS, and waits for them.

    uvicorn itself does not wait for calls that it cancels: the application is closed while they run, and the end of the
    event loop cancels what they do last a second time.
    """

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server`."""
        cancelling = asyncio.get_running_loop().call_later(CALL_SECONDS, self._cancel_calls)
        try:
            await super().shutdown(sockets)
        finally:
            cancelling.cancel()

    def _cancel_calls(self) -> None:
        for task in tuple(self.server_state.tasks):
            task.cancel("the server ends")
