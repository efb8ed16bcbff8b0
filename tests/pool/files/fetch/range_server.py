"""A web server for tests: a folder with listings, range requests, ETags, a bounded speed and faults."""

from __future__ import annotations

import hashlib
import html
import http.server
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

_PIECE = 64 << 10


@dataclass(slots=True)
class Asked:
    """A request for bytes of a file, and how many were sent."""

    name: str
    begin: int
    end: int
    sent: int = 0


@dataclass(slots=True)
class RangeServer:
    """The state of a running server.

    bytes_per_second  of all connections together; None is unlimited
    fault             called with each request before it is answered: an HTTP status to answer with, a number of bytes
                      after which the connection breaks (as a negative number), or None
    """

    root: Path
    url: str = ""
    bytes_per_second: float | None = None
    fault: Callable[[Asked], int | None] = lambda asked: None
    supports_ranges: bool = True
    asked: list[Asked] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0

    def sent_bytes(self, name: str = "") -> int:
        """Bytes of content that were sent, of one file or of all."""
        with self.lock:
            return sum(asked.sent for asked in self.asked if name in ("", asked.name))

    def wait_turn(self, count: int) -> None:
        """Wait until `count` more bytes may be sent."""
        if self.bytes_per_second is None:
            return
        with self.lock:
            now = time.monotonic()
            self.free_at = max(self.free_at, now) + count / self.bytes_per_second
            pause = self.free_at - now
        time.sleep(pause)


@contextmanager
def serving(root: Path, **settings: object) -> Iterator[RangeServer]:
    """Serve a folder on a free port of the loopback interface."""
    state = RangeServer(root, **settings)  # type: ignore[arg-type]

    class Handler(_Handler):
        server_state = state

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server_state: RangeServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        state = self.server_state
        path = state.root / unquote(self.path).lstrip("/")
        if path.is_dir():
            names = [f"{p.name}/" if p.is_dir() else p.name for p in sorted(path.iterdir())]
            rows = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>' for name in ["../", *names])
            self._send(200, f"<html><ul>{rows}</ul></html>".encode(), {})
            return
        if not path.is_file():
            self._send(404, b"", {})
            return
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        begin, end, status = 0, size, 200
        if match and state.supports_ranges and size:
            begin, end, status = int(match[1]), min(size, int(match[2]) + 1), 206
        asked = Asked(path.relative_to(state.root).as_posix(), begin, end)
        with state.lock:
            state.asked.append(asked)
        fault = state.fault(asked)
        if fault is not None and fault > 0:
            self._send(fault, b"", {})
            return
        tag = hashlib.sha256(f"{size} {path.stat().st_mtime_ns}".encode()).hexdigest()[:16]
        headers = {"ETag": f'"{tag}"', "Content-Length": str(end - begin)}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        limit = end if fault is None else begin - fault
        with open(path, "rb") as file:
            file.seek(begin)
            while begin < min(end, limit):
                piece = file.read(min(_PIECE, min(end, limit) - begin))
                state.wait_turn(len(piece))
                try:
                    self.wfile.write(piece)
                except OSError:
                    self.close_connection = True
                    return
                with state.lock:
                    asked.sent += len(piece)
                begin += len(piece)
        if fault is not None:
            self.close_connection = True

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass
