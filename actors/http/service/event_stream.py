"""Server-sent events: how one is written, and comments that keep an idle connection open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

EVENT_STREAM = "text/event-stream"
#: silence after which a comment is sent: proxies close connections that are silent for a minute
PING_SECONDS = 15.0


def event(name: str, content: Mapping[str, Any], event_id: str = "") -> bytes:
    """Return one event."""
    head = f"id: {event_id}\n" if event_id else ""
    return f"{head}event: {name}\ndata: {json.dumps(content)}\n\n".encode()


async def with_pings(events: AsyncIterator[bytes], ping_seconds: float = PING_SECONDS) -> AsyncIterator[bytes]:
    """Yield `events`, and a comment after each time of silence."""
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(events))
            done, _ = await asyncio.wait((pending,), timeout=ping_seconds)
            if not done:
                yield b": ping\n\n"
                continue
            try:
                text = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield text
    finally:
        if pending is not None:
            pending.cancel()
