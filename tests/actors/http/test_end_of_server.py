"""A server ends at once, whatever its callers wait for, and says nothing about it."""

from __future__ import annotations

import json
import logging
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from modelpool.actors.request.requests import GenerateRequest
from tests.actors.http.asgi import RefusingPool
from tests.actors.http.conftest import served
from tests.actors.http.fake_page_pool import SLOW, open_page_pool


class BusyPool(RefusingPool):
    """A pool with answers that take until `closed`, as those about many requests of a busy catalog."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.closed = threading.Event()

    def submit(self, requests: Iterable[GenerateRequest], **_: Any) -> Any:
        self.asked.set()
        self.closed.wait()
        return super().submit(requests)


def test_a_server_does_not_wait_for_answers_of_the_pool(tmp_path: Path) -> None:
    """SIGINT took more than a minute beside submissions of many long texts: threads that asked the pool were joined."""
    pool = BusyPool()
    found: list[object] = []

    def call(address: str) -> None:
        body = json.dumps({"model": "shapes", "prompt": "x"}).encode()
        asking = urllib.request.Request(f"{address}/api/jobs", body, {"Content-Type": "application/json"})
        try:
            found.append(urllib.request.urlopen(asking).status)
        except (urllib.error.HTTPError, OSError) as problem:
            found.append(getattr(problem, "code", problem))

    with served(pool, tmp_path) as address:
        caller = threading.Thread(target=call, args=(address,))
        caller.start()
        assert pool.asked.wait(60)
    assert not pool.closed.is_set(), "the server has ended before"
    caller.join()
    assert found == [503]
    pool.closed.set()


def test_open_streams_end_without_errors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_page_pool(output=tmp_path / "pool") as pool:
        with served(pool, tmp_path / "out") as address:
            body = json.dumps({"model": "shapes", "prompt": SLOW}).encode()
            call = urllib.request.Request(f"{address}/api/jobs", body, {"Content-Type": "application/json"})
            submission = json.loads(urllib.request.urlopen(call).read())["id"]
            streams = []
            for path in (f"/api/jobs/{submission}/events", "/api/live"):
                parts = urlsplit(address)
                stream = socket.create_connection((parts.hostname, parts.port))
                stream.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                assert stream.recv(1000).startswith(b"HTTP/1.1 200")
                streams.append(stream)
        for stream in streams:
            received = b""
            while part := stream.recv(65536):
                received += part
            assert received.endswith(b"0\r\n\r\n"), "the stream is complete"
            stream.close()
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR] == []
