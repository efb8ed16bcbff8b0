"""A server that gets a signal while it answers calls of every kind ends soon, and its log has no error."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import websockets
from PIL import Image

from tests.actors.control.detached.test_job_service import opened
from tests.actors.fakes import FAIL
from tests.actors.http.fake_page_pool import SLOW
from tests.actors.http.serving_process import BUSY, UPSCALER

ROOT = Path(__file__).parents[3]
WAIT_SECONDS = 60.0
BOUNDARY = "boundary"


def png() -> str:
    content = BytesIO()
    Image.new("RGB", (64, 64), "blue").save(content, "PNG")
    return base64.b64encode(content.getvalue()).decode()


def form() -> bytes:
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    return head.encode() + b"A" * 100_000 + f"\r\n--{BOUNDARY}--\r\n".encode()


class OpenCalls:
    """Calls to a server that it has not answered yet."""

    def __init__(self, address: str) -> None:
        self._host, self._port = str(urlsplit(address).hostname), int(urlsplit(address).port or 0)
        self._connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def sent(self, method: str, path: str, value: Any = None, left_out_bytes: int = 0) -> asyncio.StreamReader:
        """Send a call, without the last bytes of its body, and return its answer."""
        body = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
        kind = f"multipart/form-data; boundary={BOUNDARY}" if isinstance(value, bytes) else "application/json"
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[: len(body) - left_out_bytes])
        await writer.drain()
        self._connections.append((reader, writer))
        return reader

    async def streamed(self, path: str) -> None:
        """Open a stream of events."""
        answer = await self.sent("GET", path)
        assert b"200" in await answer.readline()

    async def submitted(self) -> str:
        """Submit a job that does not end by itself, and return the id of the submission."""
        answer = await self.sent("POST", "/api/jobs", {"model": "shapes", "prompt": SLOW})
        head = await answer.readuntil(b"\r\n\r\n")
        assert b" 201 " in head, head
        length = next(line for line in head.decode().lower().split("\r\n") if line.startswith("content-length"))
        found = json.loads(await answer.readexactly(int(length.partition(":")[2])))
        return str(found["id"])

    def close(self) -> None:
        for _, writer in self._connections:
            writer.close()


async def open_all(address: str, kinds: tuple[str, ...], calls: OpenCalls) -> None:
    submission = await calls.submitted()
    for kind in kinds:
        match kind:
            case "a body that arrives":
                large = {"model": "shapes", "prompt": "x", "image": "A" * (3 << 20)}
                await calls.sent("POST", "/api/jobs", large, left_out_bytes=1000)
            case "an upload that arrives":
                await calls.sent("POST", "/upload/image", form(), left_out_bytes=1000)
            case "a submission that the pool has not answered":
                await calls.sent("POST", "/api/jobs", {"model": "shapes", "prompt": BUSY})
            case "a question that the pool has not answered":
                await calls.sent("GET", f"/api/job-history/{submission}-0")
            case "an image that is waited for":
                await calls.sent("POST", "/v1/images/generations", {"prompt": SLOW, "model": "shapes"})
            case "an image that is enlarged":
                body = {"image": png(), "upscaler_1": UPSCALER, "upscaling_resize": 2}
                await calls.sent("POST", "/sdapi/v1/extra-single-image", body)
            case "a stream of a submission":
                await calls.streamed(f"/api/jobs/{submission}/events?previews=true")
            case "a stream of the pool":
                await calls.streamed("/api/live")


KINDS = (
    "a body that arrives",
    "an upload that arrives",
    "a submission that the pool has not answered",
    "a question that the pool has not answered",
    "an image that is waited for",
    "an image that is enlarged",
    "a stream of a submission",
    "a stream of the pool",
)


@contextmanager
def server_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process with a server, and its address; killed at the end if it still runs."""
    command = (sys.executable, "-m", "tests.actors.http.serving_process", *arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address, process.communicate()
        yield process, address
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def ended(folder: Path, kinds: tuple[str, ...], signal_number: int) -> tuple[str, str]:
    """What a server with open calls has printed after its address, and logged, when it has ended after a signal."""
    with server_process(str(folder)) as (process, address):

        async def run() -> None:
            calls = OpenCalls(address)
            await open_all(address, kinds, calls)
            async with websockets.connect(f"{address.replace('http', 'ws')}/ws?clientId=me") as socket:
                await socket.recv()
                await asyncio.sleep(0.3)  # calls without an answer have reached the pool
                process.send_signal(signal_number)
                await asyncio.to_thread(process.wait, WAIT_SECONDS)
                calls.close()

        asyncio.run(run())
        return process.communicate()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_a_server_with_open_calls_closes_its_pool_and_says_nothing(tmp_path: Path, signal_number: int) -> None:
    """Calls were cancelled twice, the second time while they answered that the server ends: a traceback for each.

    uvicorn names the calls that have not ended SHUTDOWN_SECONDS after a signal in the log.
    """
    printed, logged = ended(tmp_path, KINDS, signal_number)
    assert logged == ""
    assert printed == "ended\n"


def test_images_that_a_killed_server_left_are_removed_when_no_job_needs_them(tmp_path: Path) -> None:
    """It is killed before the jobs of two submissions run; those of one run while there is no server."""
    inputs = tmp_path / "out" / "inputs"
    made = []
    with server_process(str(tmp_path), "journal") as (process, address):
        for prompt in ("a thing", FAIL):
            request = {"model": "shapes", "prompt": prompt, "steps": 2, "image": png(), "strength": 0.5}
            body = json.dumps({"requests": [request], "detached": True}).encode()
            call = urllib.request.Request(f"{address}/api/jobs", body, {"Content-Type": "application/json"})
            made.append(json.loads(urllib.request.urlopen(call).read())["id"])
        process.kill()
        process.communicate()
    assert {folder.name for folder in inputs.iterdir()} == set(made)
    with opened(tmp_path) as service:
        assert [service.pool.attach(each).wait(WAIT_SECONDS).succeeded for each in made] == [1, 0]
    with server_process(str(tmp_path), "journal") as (_, address):
        for _ in range(int(WAIT_SECONDS * 100)):
            if not (inputs / made[0]).exists():
                break
            time.sleep(0.01)
        answers = [json.loads(urllib.request.urlopen(f"{address}/api/jobs/{each}").read()) for each in made]
        ends = [(each["state"], [end["state"] for end in each["ends"]]) for each in answers]
        assert ends == [("ended", ["succeeded"]), ("ended", ["failed"])], "each job has ended once"
        assert [folder.name for folder in inputs.iterdir()] == [made[1]], "a failed job may be submitted again"
