"""Web sockets: keys, origins, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import websockets

from modelpool.actors.http.comfy.comfy_prompts import MOST_WAITING, Socket
from tests.actors.http.asgi import RefusingPool
from tests.actors.http.conftest import served

KEY = "k" * 20


def test_a_socket_needs_the_key_too(tmp_path: Path) -> None:
    async def first_message(address: str, **headers: str) -> Any:
        async with websockets.connect(f"{address}/ws?clientId=me", additional_headers=headers) as socket:
            return json.loads(await socket.recv())

    with served(RefusingPool(), tmp_path, keys={"ann": KEY}) as server:
        address = server.replace("http", "ws")
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-API-Key": KEY, "Origin": "null"}):
            with pytest.raises(websockets.InvalidStatus):
                asyncio.run(first_message(address, **headers))
        assert asyncio.run(first_message(address, Authorization=f"Bearer {KEY}"))["data"]["sid"] == "me"


def test_a_client_that_does_not_read_is_closed_and_keeps_nothing() -> None:
    async def fill() -> None:
        socket = Socket("me", "ann")
        for value in range(MOST_WAITING):
            socket.put("progress", {"value": value})
        assert socket.messages.qsize() == MOST_WAITING
        socket.put("progress", {"value": -1})
        assert socket.messages.qsize() == 1
        assert await socket.messages.get() is None

    asyncio.run(fill())
