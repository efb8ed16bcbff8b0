"""What precedes and follows the body of a call has a bound, before anybody's key is checked."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
import uvloop
from uvicorn.server import ServerState

from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.server import server_config
from modelpool.actors.http.service.header_limit import MOST_HEADER_BYTES, HeaderLimit
from modelpool.actors.http.service.limit_log import LimitLog

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
LINE = b"a: " + b"y" * 8000 + b"\r\n"
COUNT = 20 * MOST_HEADER_BYTES // len(LINE)


async def count_body(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers how many bytes it was sent."""
    count, more = 0, True
    while more:
        message = await receive()
        count, more = count + len(message.get("body", b"")), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{count} bytes".encode()})


def cases() -> Iterator[tuple[str, list[bytes], bytes]]:
    """The bytes to send, and a part of the answer; b"" if the connection is ended soon."""
    chunk = b"10\r\n" + b"z" * 16 + b"\r\n"
    yield "body", [HEAD + b"Content-Length: 3\r\n\r\nabc"], b"3 bytes"
    yield "large body", [HEAD + b"Content-Length: 1000000\r\n\r\n", b"z" * 1000000], b"1000000 bytes"
    yield "chunks", [HEAD + b"Transfer-Encoding: chunked\r\n\r\n", chunk * 9999, b"0\r\n\r\n"], b"159984 bytes"
    yield "long head", [HEAD, LINE, LINE, b"Content-Length: 3\r\n\r\nabc"], b"3 bytes"
    yield "calls", [(HEAD + b"Content-Length: 3\r\n\r\nabc") * 2000], b"3 bytes"
    yield "headers", [HEAD, *[LINE] * COUNT], b""
    yield "one header", [HEAD + b"a: ", *[b"y" * 8000] * COUNT], b""
    yield "address", [b"GET /", *[b"y" * 8000] * COUNT], b""
    yield "trailers", [HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n", *[LINE] * COUNT], b""


async def answer_to(port: int, parts: list[bytes]) -> tuple[bytes, int]:
    """Return the beginning of the answer, b"" if there is none, and how much was sent before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    sent = 0
    try:
        for part in parts:
            writer.write(part)
            sent += len(part)
            await writer.drain()
            await asyncio.sleep(0)
        return await asyncio.wait_for(reader.read(400), 10), sent
    except OSError:
        return b"", sent
    finally:
        writer.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_caller_without_a_key_cannot_fill_the_memory(run: Any) -> None:
    """httptools kept 100 MiB of headers; h11, which was used before, ends such a connection after 64 KiB."""

    async def talk() -> None:
        log = LimitLog()
        protocol = server_config(count_body, ServeSection(), log).http
        assert issubclass(protocol, HeaderLimit)
        config = uvicorn.Config(count_body, http=protocol, log_level="critical", lifespan="off", ws="none")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0, family=socket.AF_INET)
        port = server.sockets[0].getsockname()[1]
        for name, parts, expected in cases():
            before = log.count("header_bytes")
            answer, sent = await answer_to(port, parts)
            if expected:
                assert expected in answer, name
            else:
                assert b" 200 " not in answer, name
                assert sent < sum(map(len, parts)) / 2, name
            assert log.count("header_bytes") == before + (not expected), name
        server.close()

    run(talk())
