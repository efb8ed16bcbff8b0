"""Connections that only wait, beside clients that work: no call of these may fail.

    python -m benchmarks.http_connections
    python -m benchmarks.http_connections --idle 100 --half-open 100 --slow 50 --clients 5 --seconds 5

A server of a pool of fakes runs in a process of its own, with the limits of its defaults. Idle connections have made
one call, half-open ones have sent a part of a head, slow ones send a byte of a body in a second; each that the server
ends is opened again. Clients ask for `GET /` and submit jobs in turns, over connections that they keep; like usual
clients, they open a new connection for a call whose old one the server closed before it answered anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.http_load import native_body, served

#: between two bytes of a slow connection
BYTE_SECONDS = 1.0
#: until a connection that the server has ended is opened again
REOPEN_SECONDS = 0.2
#: no call takes longer, except one that fails
ANSWER_SECONDS = 10.0
#: connections that are opened at a time
OPENED_AT_ONCE = 200
_HEAD = b"POST /api/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_PAGE = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@dataclass
class Observed:
    """What working clients have seen, and how often the server ended connections of each kind."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {"GET /": [], "POST /api/jobs": []})
    failures: list[str] = field(default_factory=list)
    reopened: int = 0
    ended: Counter[str] = field(default_factory=Counter)


async def stay(kind: str, port: int, observed: Observed, opening: asyncio.Semaphore) -> None:
    """Keep one connection of a kind open, for ever."""
    while True:
        writer = None
        try:
            async with opening:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if kind == "idle":
                writer.write(_PAGE)
            elif kind == "half-open":
                writer.write(_HEAD)
            else:
                writer.write(_HEAD + b"Content-Length: 1000000\r\n\r\n")
            reading = asyncio.create_task(_read_all(reader))
            while not reading.done():
                await asyncio.wait((reading,), timeout=BYTE_SECONDS)
                if kind == "slow" and not reading.done():
                    writer.write(b" ")
        except OSError:
            pass
        finally:
            if writer is not None:
                writer.close()
        observed.ended[kind] += 1
        await asyncio.sleep(REOPEN_SECONDS)


async def _read_all(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    except OSError:
        return


class Client:
    """A client that keeps its connection."""

    def __init__(self, port: int, observed: Observed) -> None:
        self._port = port
        self._observed = observed
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, name: str, content: bytes) -> int:
        """Make one call, and return its status. Raises OSError, EOFError and TimeoutError."""
        began = time.monotonic()
        try:
            is_old = self._streams is not None
            status = await asyncio.wait_for(self._asked(content), ANSWER_SECONDS)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            if not is_old:
                raise
            self._observed.reopened += 1
            status = await asyncio.wait_for(self._asked(content), ANSWER_SECONDS)
        self._observed.seconds[name].append(time.monotonic() - began)
        return status

    async def _asked(self, content: bytes) -> int:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(content)
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        await reader.readexactly(length)
        return int(head.split(" ", 2)[1])

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def work(number: int, port: int, observed: Observed, until: float) -> None:
    """Call in turns until a time of the monotonic clock."""
    client, count = Client(port, observed), 0
    while time.monotonic() < until:
        count += 1
        body = json.dumps(native_body(number * 1_000_000 + count)).encode()
        posted = _HEAD + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        for name, content, expected in (("GET /", _PAGE, 200), ("POST /api/jobs", posted, 201)):
            try:
                status = await client.call(name, content)
                if status != expected:
                    observed.failures.append(f"{name}: {status}")
            except (OSError, EOFError, TimeoutError, asyncio.IncompleteReadError) as problem:
                observed.failures.append(f"{name}: {problem!r}")
                client.close()
        await asyncio.sleep(0.5)
    client.close()


async def observe(port: int, waiting: dict[str, int], clients: int, seconds: float) -> Observed:
    """Open the waiting connections, have the clients work, and return what they have seen."""
    observed, opening = Observed(), asyncio.Semaphore(OPENED_AT_ONCE)
    stays = [
        asyncio.create_task(stay(kind, port, observed, opening))
        for kind, count in waiting.items()
        for _ in range(count)
    ]
    until = time.monotonic() + seconds
    await asyncio.gather(*(work(number, port, observed, until) for number in range(clients)))
    for each in stays:
        each.cancel()
    await asyncio.gather(*stays, return_exceptions=True)
    return observed


def report(observed: Observed, say: Callable[[str], None] = print) -> None:
    """Print what the clients have seen."""
    for name, seconds in observed.seconds.items():
        p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
        say(f"{name}: {len(seconds)} calls, p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms, max {max(seconds):.2f} s")
    say(f"failures: {len(observed.failures)} {dict(Counter(observed.failures).most_common(5))}")
    say(f"connections of clients that were opened again: {observed.reopened}; ended: {dict(observed.ended)}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--half-open", type=int, default=2000)
    parser.add_argument("--slow", type=int, default=500)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    wanted = parser.parse_args()
    waiting = {"idle": wanted.idle, "half-open": wanted.half_open, "slow": wanted.slow}
    with served() as (port, _):
        report(asyncio.run(observe(port, waiting, wanted.clients, wanted.seconds)))


if __name__ == "__main__":
    main()
