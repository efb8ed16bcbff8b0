"""Measures the HTTP interfaces under load: many clients that submit, follow and wait, as programs of users do.

    python -m benchmarks.http_load [--clients 200] [--seconds 60] [--pause 10] [--runs 1]

Prints a Markdown table. The engines are fakes from the tests; Ray, the core, the server and HTTP are the real ones.
Each client submits an image, waits for its end and pauses; one in two submits a ComfyUI workflow. Of the others, one in
two follows by server-sent events, and the rest asks every half second. A viewer of the page reads what it receives, and
two others, of the page and of a submission, never read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelpool.actors.config.config import PoolConfig
    from modelpool.actors.control.pool_plan import PoolPlan

#: pause of a client between two questions about its image
POLL_SECONDS = 0.5
LAG_INTERVAL_SECONDS = 0.02
#: longest time that a client waits for an answer, and for its image
ANSWER_SECONDS, IMAGE_SECONDS = 30.0, 120.0
#: what the server takes from a client that never reads before it has to wait for it
_SLOW_READER_BYTES = 4096
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass
class Findings:
    """What the clients have seen; seconds."""

    ack_seconds: dict[str, list[float]] = field(default_factory=lambda: {"native": [], "comfyui": []})
    image_seconds: list[float] = field(default_factory=list)
    page_gaps_seconds: list[float] = field(default_factory=list)
    #: by how much the clients themselves were late, on a machine that they share with the server
    lag_seconds: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    calls: int = 0


class Connection:
    """A connection of HTTP/1.1 that stays open, with a parser of its own: a client library takes more time than the
    server."""

    def __init__(self, port: int, findings: Findings) -> None:
        self._port = port
        self._findings = findings
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON value of an answer."""
        reader, head = await self._ask(method, path, body)
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
        content = await asyncio.wait_for(reader.readexactly(length), ANSWER_SECONDS)
        return int(head.split(" ", 2)[1]), json.loads(content) if content else None

    async def events(self, path: str) -> AsyncIterator[tuple[str, str]]:
        """Yield the name and the data of each event of a stream."""
        reader, _ = await self._ask("GET", path)
        name = ""
        while (line := (await asyncio.wait_for(reader.readline(), IMAGE_SECONDS)).decode()) not in ("", "0\r\n"):
            if line.startswith("event: "):
                name = line[7:].strip()
            elif line.startswith("data: "):
                yield name, line[6:]

    async def open_unread(self, path: str) -> None:
        """Ask for a stream that is never read."""
        import socket

        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_READER_BYTES)
        slow.setblocking(False)
        await asyncio.get_running_loop().sock_connect(slow, ("127.0.0.1", self._port))
        slow.send(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        self._unread = slow

    def close(self) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, method: str, path: str, body: Any = None) -> tuple[asyncio.StreamReader, str]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        content = b"" if body is None else json.dumps(body).encode()
        about = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n" if content else ""
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{about}\r\n".encode() + content)
        self._findings.calls += 1
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), ANSWER_SECONDS)
        return reader, head.decode().lower()


def main() -> None:
    """Measure and print the table, or serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--pause", type=float, default=10, help="of a client after each image, seconds on average")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help="only serve, until the end of standard input")
    wanted = parser.parse_args()
    if wanted.serve:
        serve()
        return
    print(f"{wanted.clients} clients, {wanted.seconds:g} s, a pause of {wanted.pause:g} s; {os.cpu_count()} cores\n")
    columns = (
        "images", "calls", "errors", "ack native p50, p99 ms", "ack comfyui p50, p99 ms", "image p50, p99 ms",
        "lag of the clients p50, p99 ms", "page: longest gap s", "server CPU ms per call",
        "server CPU ms per image", "load",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for _ in range(wanted.runs):
        with served() as (port, server_pid):
            found, cpu_seconds = asyncio.run(measured(wanted, port, server_pid))
        print(row(found, cpu_seconds), flush=True)
        for error, count in Counter(found.errors).most_common(5):
            print(f"    {count}: {error}", file=sys.stderr)


def row(found: Findings, cpu_seconds: float) -> str:
    """Return one row of the table."""
    cells = [
        str(len(found.image_seconds)),
        str(found.calls),
        str(len(found.errors)),
        *(percentiles(found.ack_seconds[kind]) for kind in ("native", "comfyui")),
        percentiles(found.image_seconds),
        percentiles(found.lag_seconds),
        f"{max(found.page_gaps_seconds, default=float('nan')):.1f}",
        f"{cpu_seconds * 1e3 / max(1, found.calls):.2f}",
        f"{cpu_seconds * 1e3 / max(1, len(found.image_seconds)):.1f}",
        f"{os.getloadavg()[0]:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def percentiles(seconds: list[float]) -> str:
    """Return the median and the 99th percentile in milliseconds."""
    if len(seconds) < 2:
        return "-"
    return f"{statistics.median(seconds) * 1e3:.1f}, {statistics.quantiles(seconds, n=100)[98] * 1e3:.1f}"


@contextmanager
def served() -> Iterator[tuple[int, int]]:
    """Start a server of a pool of fakes in a process of its own; yield its port and its process id."""
    command = (sys.executable, "-m", "benchmarks.http_load", "--serve")
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        while not (line := server.stdout.readline()).startswith("port "):
            assert line, "the server has ended"
        yield int(line.split()[1]), server.pid
    finally:
        server.stdin.close()
        server.wait(60)


def serve() -> None:
    """Serve a pool of fakes on a free port until standard input ends."""
    import _thread
    import threading

    from modelpool.actors.client.client import ModelPool
    from modelpool.actors.client.opening import start_pool
    from modelpool.actors.config.config import PoolConfig
    from modelpool.actors.config.serve_section import ServeSection
    from modelpool.actors.http.server import listen
    from modelpool.actors.http.server import serve as serve_pool

    def end() -> None:
        sys.stdin.read()
        _thread.interrupt_main()

    section = ServeSection(port=0)
    listening = listen(section)
    opened = start_pool(PoolConfig().override(workers=2, name="http-load"), plan, preload=())
    with (
        ModelPool(opened.connection, opened.close, None, opened.address) as pool,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        suppress(KeyboardInterrupt),
    ):
        pool.wait_ready(300)
        threading.Thread(target=end, daemon=True).start()
        port = listening.getsockname()[1]
        serve_pool(pool, section, Path(folder), listening, lambda address: print(f"port {port}", flush=True))


def plan(config: PoolConfig, gpu_count: int, can_grow: bool) -> PoolPlan:
    """Return the plan of a pool of fakes whose catalog lists its models."""
    from tests.actors.fakes import fake_plan

    return replace(fake_plan(config, gpu_count, can_grow, image_side=64), open_catalog=listing_catalog)


def listing_catalog() -> Any:
    """Return the catalog of the fakes, with models as the HTTP interfaces list them."""
    from modelpool.pool.catalog.registry.listings import LoraListing, ModelListing
    from tests.actors.fakes import FakeCatalog

    class ListingCatalog(FakeCatalog):
        def models(self) -> tuple[object, ...]:
            return (ModelListing("shapes", "shapes.safetensors", "SD 1.5", 1, 64, 64),)

        def loras(self) -> tuple[object, ...]:
            return (LoraListing("light", "light.safetensors", 1),)

    return ListingCatalog()


async def measured(wanted: argparse.Namespace, port: int, server_pid: int) -> tuple[Findings, float]:
    """Run the clients; return what they have seen, and the CPU seconds of the server."""
    warm = Findings()
    await asyncio.gather(*(client(number, port, warm, time.monotonic() + 3, 0.5) for number in range(10)))
    found = Findings(errors=warm.errors)
    watcher = asyncio.create_task(viewer(port, found))
    clock = asyncio.create_task(clock_lag(found))
    slow = [Connection(port, found), Connection(port, found)]
    await slow[0].open_unread("/api/live")
    _, many = await slow[1].call("POST", "/api/jobs", [native_body(-1 - i) for i in range(200)])
    await slow[1].open_unread(f"/api/jobs/{many['id']}/events")
    began_cpu, until = cpu_seconds_of(server_pid), time.monotonic() + wanted.seconds
    clients = (client(number, port, found, until, wanted.pause) for number in range(wanted.clients))
    await asyncio.gather(*clients)
    cpu_seconds = cpu_seconds_of(server_pid) - began_cpu
    watcher.cancel()
    clock.cancel()
    for each in slow:
        each.close()
    return found, cpu_seconds


async def viewer(port: int, found: Findings) -> None:
    """Read the page's stream, and note the time between two events."""
    try:
        before = time.monotonic()
        async for _ in Connection(port, found).events("/api/live"):
            now = time.monotonic()
            found.page_gaps_seconds.append(now - before)
            before = now
    except Exception as problem:
        found.errors.append(f"page: {type(problem).__name__} {problem}")


async def clock_lag(found: Findings) -> None:
    """Note by how much this process wakes up late."""
    while True:
        due = time.monotonic() + LAG_INTERVAL_SECONDS
        await asyncio.sleep(LAG_INTERVAL_SECONDS)
        found.lag_seconds.append(time.monotonic() - due)


async def client(number: int, port: int, found: Findings, until: float, pause_seconds: float) -> None:
    """Submit images one after the other."""
    chance = random.Random(number)
    connection = Connection(port, found)
    await asyncio.sleep(chance.random() * pause_seconds)
    kinds = (partial(_comfy_image, connection), partial(_native_image, connection, number % 4 == 1))
    count = 0
    while time.monotonic() < until:
        count += 1
        try:
            await kinds[number % 2](found, number * 10_000 + count)
        except Exception as problem:
            found.errors.append(f"{type(problem).__name__} {problem}")
            connection.close()
        await asyncio.sleep(chance.uniform(0.5, 1.5) * pause_seconds)
    connection.close()


async def _native_image(connection: Connection, by_events: bool, found: Findings, seed: int) -> None:
    began = time.monotonic()
    status, submitted = await connection.call("POST", "/api/jobs", native_body(seed))
    _note(found, "native", began, status, 201)
    path = f"/api/jobs/{submitted['id']}"
    if by_events:
        follower = Connection(connection._port, found)
        names = [name async for name, _ in follower.events(f"{path}/events")]
        follower.close()
        assert names[-1] == "end", names
    else:
        while (await connection.call("GET", path))[1]["state"] == "active":
            await asyncio.sleep(POLL_SECONDS)
    found.image_seconds.append(time.monotonic() - began)
    _, ended = await connection.call("GET", path)
    assert ended["succeeded"] == 1, ended


async def _comfy_image(connection: Connection, found: Findings, seed: int) -> None:
    began = time.monotonic()
    status, queued = await connection.call("POST", "/prompt", {"prompt": comfy_body(seed)})
    _note(found, "comfyui", began, status, 200)
    while not (history := (await connection.call("GET", f"/history/{queued['prompt_id']}"))[1]):
        await asyncio.sleep(POLL_SECONDS)
    found.image_seconds.append(time.monotonic() - began)
    assert history[queued["prompt_id"]]["status"]["status_str"] == "success", history


def _note(found: Findings, kind: str, began: float, status: int, expected: int) -> None:
    found.ack_seconds[kind].append(time.monotonic() - began)
    found.statuses[status] += 1
    assert status == expected, f"{kind}: status {status}"


def native_body(seed: int) -> dict[str, Any]:
    """Return a request."""
    return {"model": "shapes", "prompt": f"a red circle {seed}", "steps": 4, "cfg": 2.0, "seed": abs(seed)}


def comfy_body(seed: int) -> dict[str, Any]:
    """Return a workflow in the API format."""
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "shapes.safetensors"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": f"a blue square {seed}", "clip": ["1", 1]}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "", "clip": ["1", 1]}},
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": 64, "height": 64, "batch_size": 1}},
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0], "seed": seed,
                "steps": 4, "cfg": 2.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0,
            },
        },
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "load"}},
    }  # fmt: skip


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


if __name__ == "__main__":
    main()
