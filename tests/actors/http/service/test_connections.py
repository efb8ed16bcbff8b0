"""Connections that wait, say nothing or do not read: they end after their time, and make room for others."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import uvloop
import websockets

from benchmarks.http_connections import observe
from modelpool.actors.config.serve_section import ServeSection
from modelpool.actors.http.server import server_config
from modelpool.actors.http.service.connections import ConnectionLimits, Connections, Phase, raised_open_files
from modelpool.actors.http.service.limit_log import LimitLog

#: far longer than any limit of these tests
SOON_SECONDS = 30
LARGE_BYTES = 16 << 20
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\n"
BODY = HEAD + b"Content-Length: 100000\r\n\r\n"
SHORT = {"head_seconds": 1, "body_seconds": 1, "idle_seconds": 1, "unread_seconds": 1}


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer a call with as many bytes as its path says, when its body has come; fill a web socket."""
    if scope["type"] == "lifespan":
        return
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.accept"})
        while True:
            await send({"type": "websocket.send", "bytes": bytes(1 << 14)})
            await asyncio.sleep(0.001)
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    status = 201 if scope["path"] == "/api/jobs" else 200
    content = bytes(LARGE_BYTES if scope["path"] == "/large" else 3)
    length = (b"content-length", str(len(content)).encode())
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    await send({"type": "http.response.body", "body": content})


@asynccontextmanager
async def serving(log: LimitLog, **settings: Any) -> AsyncIterator[int]:
    """A server with these settings; yields its port."""
    config = server_config(app, ServeSection(**settings), log)
    config.lifespan = "off"
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        await running


async def is_ended(port: int, content: bytes, byte: bytes = b"", ticks: int = SOON_SECONDS * 20) -> bool:
    """Whether the server ends a connection that sends this, and then a byte from time to time."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        for _ in range(ticks):
            writer.write(byte)
            try:
                await asyncio.wait_for(reader.read(), 0.05)
                return True
            except TimeoutError:
                continue
        return False
    except OSError:
        return True
    finally:
        writer.close()


async def never_reads(port: int, content: bytes, log: LimitLog) -> bool:
    """Whether the server ends a connection that does not read."""
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    peer.setblocking(False)
    await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
    peer.send(content)
    before = log.count("unread_seconds")
    with peer:
        for _ in range(SOON_SECONDS * 20):
            if log.count("unread_seconds") > before:
                return True
            await asyncio.sleep(0.05)
    return False


SOCKET = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_waits_for_ever_is_ended(run: Any) -> None:
    """Of 1,100 half-open connections, none was ever ended, and every later call was reset."""
    log = LimitLog()

    async def talk() -> None:
        async with serving(log, **SHORT) as port:
            cases: dict[str, tuple[Awaitable[bool], str]] = {
                "nothing": (is_ended(port, b""), "idle_seconds"),
                "after a call": (is_ended(port, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"), "idle_seconds"),
                "half a head": (is_ended(port, HEAD), "head_seconds"),
                "a slow head": (is_ended(port, HEAD + b"a: ", b"y"), "head_seconds"),
                "half a body": (is_ended(port, BODY), "body_seconds"),
                "a slow body": (is_ended(port, BODY, b"y"), "body_seconds"),
                "an answer": (never_reads(port, b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n", log), "unread_seconds"),
                "a web socket": (never_reads(port, SOCKET, log), "unread_seconds"),
            }
            found = await asyncio.gather(*(case for case, _ in cases.values()))
            assert dict(zip(cases, found, strict=True)) == dict.fromkeys(cases, True)
            counted = {limit: log.count(limit) for _, limit in cases.values()}
            # uvicorn ends a connection after a call by itself
            assert all(counted.values()), counted

    run(talk())


def test_what_is_in_use_stays() -> None:
    """A body that arrives, an answer that takes long and a web socket that reads exceed no limit."""
    log = LimitLog()

    async def talk() -> None:
        async with serving(log, **SHORT) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD + b"Content-Length: 200000\r\n\r\n")
            async with websockets.connect(f"ws://127.0.0.1:{port}/ws", max_size=None) as peer:
                for _ in range(20):
                    writer.write(bytes(10_000))
                    await asyncio.wait_for(peer.recv(), SOON_SECONDS)
                    await asyncio.sleep(0.15)
                peer.transport.abort()
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
            writer.close()

    uvloop.run(talk())
    assert [limit for limit in SHORT if log.count(limit)] == []


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_no_call_fails_beside_connections_that_wait(run: Any) -> None:
    log = LimitLog()

    async def talk() -> None:
        async with serving(log, connections=300) as port:
            observed = await observe(port, {"idle": 180, "half-open": 180, "slow": 50}, clients=10, seconds=3)
            assert observed.failures == []
            assert min(map(len, observed.seconds.values())) >= 10, "each client has made calls"
            assert log.count("connections") > 0
            assert log.open_connections is not None
            assert log.open_connections() <= 300

    run(talk())


class FakeTransport(asyncio.Transport):
    """A transport of a peer at an address."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.address = address
        self.is_aborted = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self.address, 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return self.is_aborted

    def abort(self) -> None:
        self.is_aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


class FakeWatched:
    """A connection in one phase."""

    def __init__(self, address: str, phase: Phase) -> None:
        self.transport = FakeTransport(address)
        self.phase = phase
        self.call: object = None
        self.head_began_at: float | None = None
        self.received_bytes = 0
        self.is_unread = self.is_paused = False


def admitted(found: Connections, address: str, phase: Phase = Phase.HEAD) -> FakeWatched | None:
    watched = FakeWatched(address, phase)
    return watched if found.admit(watched, watched.transport) else None


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop with a clock that tests move on."""

    passed_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.passed_seconds


def with_clock(test: Callable[[Callable[[float], None]], None]) -> None:
    """Run a test on a loop with a clock that it moves on."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ClockLoop)

        def pass_time(seconds: float) -> None:
            loop.passed_seconds += seconds

        test(pass_time)

    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        runner.run(run())


def test_an_address_has_a_share_of_the_connections() -> None:
    def test(pass_time: Any) -> None:
        found = Connections(ConnectionLimits(100, 3, frozenset({"10.0.0.9"})), LimitLog())
        assert all(admitted(found, "127.0.0.1") and admitted(found, "10.0.0.9") for _ in range(10))
        first = [admitted(found, "10.0.0.1", Phase.ANSWER) for _ in range(3)]
        assert all(first)
        assert admitted(found, "10.0.0.1") is None, "all of this address are in use"
        assert admitted(found, "10.0.0.2") is not None
        waiting = [admitted(found, "10.0.0.3") for _ in range(3)]
        pass_time(10)
        assert admitted(found, "10.0.0.3") is not None
        assert [each.transport.is_aborted for each in waiting if each] == [True, False, False]
        assert len(found) == 20 + 3 + 1 + 3

    with_clock(test)


def test_the_oldest_that_waits_makes_room() -> None:
    def test(pass_time: Any) -> None:
        log = LimitLog()
        found = Connections(ConnectionLimits(4), log)
        answered = admitted(found, "a", Phase.ANSWER)
        half_open, idle = admitted(found, "b"), admitted(found, "c")
        slow = admitted(found, "d", Phase.BODY)
        assert answered is not None
        assert half_open is not None
        assert idle is not None
        assert slow is not None
        idle.call = object()
        pass_time(10)
        ended = []
        for _ in range(3):
            assert admitted(found, "e", Phase.ANSWER)
            ended.append([each.transport.is_aborted for each in (answered, half_open, idle, slow)])
            pass_time(10)
        assert ended == [[False, True, False, False], [False, True, True, False], [False, True, True, True]]
        assert admitted(found, "f") is None
        assert log.count("connections") == 4

    with_clock(test)


def test_a_limit_writes_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    log = LimitLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            log.acted("connections", "ended one")
        now = 20.0
        log.acted("connections", "ended one")
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "limit connections: ended one", "limit connections: ended one (99 more since the last line)"
    ]  # fmt: skip
    (family,) = log.families()
    assert [(sample.labels, sample.value) for sample in family.samples] == [(("connections",), 101.0)]


def test_connections_are_fewer_than_open_files() -> None:
    cases = {1024: 384, 20_000: 4096, 100: 16, raised_open_files(): None}
    for files, expected in cases.items():
        most = ConnectionLimits.of(ServeSection(), files).most
        assert expected in (None, most), files
