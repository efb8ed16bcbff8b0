"""Serves the cached files of a node to the other nodes of the pool, and reads them there.

Why a small HTTP server and not Ray's object store: an object is complete before it can be read, it takes as much shared
memory as the file, and it belongs to a process; ranges of a file that is still being fetched are already useful, the
page cache holds them, and `sendfile` copies nothing. All state is on disk, so any process of the node can serve what
any other one fetched.

    GET /files/KEY/state     what the node has: JSON with size, chunk size, bitmaps of complete and claimed chunks
    GET /files/KEY           bytes of complete chunks, with a Range header

Every request needs the pool's token. KEY is what `file_cache.cache_key` returns. Content is verified by the reader.
"""

from __future__ import annotations

import contextlib
import hmac
import http.client
import http.server
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from modelpool.pool.files.fetch.fetch_errors import Interrupted
from modelpool.pool.files.fetch.fetch_progress import FetchProgress, as_bitmap, from_bitmap, new_progress, read_journal
from modelpool.pool.files.fetch.file_cache import FileCache
from modelpool.pool.files.fetch.partial_file import DATA_SUFFIX, JOURNAL_SUFFIX
from modelpool.pool.files.fetch.source import PIECE_BYTES

#: address of the file server of the node that asks: nodes that fetch the same file learn of each other
PEER_HEADER = "X-Modelpool-Peer"
#: a node that does not answer for this long is left out
TIMEOUT_SECONDS = 3.0
#: largest description of a file
_MAX_STATE_BYTES = 1 << 20

_PATH = re.compile(r"/files/(v-)?([0-9a-f]{64})(/state)?")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_ADDRESS = re.compile(r"http://[0-9A-Za-z.:\[\]-]+:\d+")


def state_on_disk(cache: FileCache, key: str) -> FetchProgress | None:
    """Return which chunks of a file are on this node; None if nothing of it is."""
    path = cache.content / key
    with contextlib.suppress(OSError):
        fresh = new_progress(path.stat().st_size)
        return FetchProgress(fresh.size_bytes, fresh.chunk_bytes, frozenset(range(fresh.chunks)))
    with contextlib.suppress(OSError):
        size_bytes = (cache.partial / f"{key}{DATA_SUFFIX}").stat().st_size
        return read_journal((cache.partial / f"{key}{JOURNAL_SUFFIX}").read_text("ascii", "replace"), size_bytes)
    return None


class OwnNode(Exception):
    """The address of another node belongs to another process of this node."""


class FileServer:
    """The file server of one process. Serves until it is closed."""

    def __init__(self, cache: FileCache, token: str, host: str, on_peer: Callable[[str], None]) -> None:
        """Listen on a free port of `host`, the address of the node in the cluster. `on_peer` is called with the address
        of each node that asks."""
        server = self

        class Handler(_Handler):
            owner = server

        self.cache, self.token, self.on_peer = cache, token, on_peer
        self._server = _Server((host, 0), Handler)
        url_host = f"[{host}]" if ":" in host else host
        self.address = f"http://{url_host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.5}, name="file server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    #: many nodes may ask at once when a pool starts
    request_queue_size = 128


class _Handler(http.server.BaseHTTPRequestHandler):
    owner: FileServer
    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self) -> None:
        """Answer one request."""
        expected = f"Bearer {self.owner.token}"
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected.encode()):
            self._refuse(403)
            return
        peer = self.headers.get(PEER_HEADER, "")
        if _ADDRESS.fullmatch(peer):
            self.owner.on_peer(peer)
        match = _PATH.fullmatch(self.path)
        key = "" if match is None else f"{match[1] or ''}{match[2]}"
        progress = state_on_disk(self.owner.cache, key) if key else None
        if progress is None or match is None:
            self._refuse(404)
        elif match[3]:
            self._state(progress)
        else:
            self._bytes(key, progress)

    def _state(self, progress: FetchProgress) -> None:
        text = json.dumps(
            {
                "cache": self.owner.cache.identity,
                "size_bytes": progress.size_bytes,
                "chunk_bytes": progress.chunk_bytes,
                "done": as_bitmap(progress.done, progress.chunks),
                "claimed": as_bitmap(progress.claimed, progress.chunks),
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _bytes(self, key: str, progress: FetchProgress) -> None:
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        begin, end = (int(asked[1]), int(asked[2]) + 1) if asked else (0, progress.size_bytes)
        if begin >= end or not progress.covers(begin, end):
            self._refuse(416)
            return
        with contextlib.ExitStack() as stack:
            try:
                # a fetch may end between the two: the file then has its final name
                file = stack.enter_context(_opened(self.owner.cache, key))
            except OSError:
                self._refuse(404)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{progress.size_bytes}")
            self.send_header("Content-Length", str(end - begin))
            self.end_headers()
            self.wfile.flush()
            while begin < end:
                try:
                    count = os.sendfile(self.connection.fileno(), file, begin, end - begin)
                except BlockingIOError:  # the connection has a timeout, which makes it non-blocking
                    if not _is_writable(self.connection, self.timeout):
                        self.close_connection = True
                        return
                    continue
                except OSError:
                    self.close_connection = True
                    return
                if not count:
                    self.close_connection = True
                    return
                begin += count

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: requests come several times a second."""


def _is_writable(connection: socket.socket, timeout_seconds: float) -> bool:
    import select

    return bool(select.select([], [connection], [], timeout_seconds)[1])


@contextlib.contextmanager
def _opened(cache: FileCache, key: str) -> Iterator[int]:
    content, partial = cache.content / key, cache.partial / f"{key}{DATA_SUFFIX}"
    for path in (content, partial, content):
        try:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            yield opened
        finally:
            os.close(opened)
        return
    raise FileNotFoundError(key)


class PeerClient:
    """Reads files from the file server of another node. For one thread: it keeps a connection."""

    def __init__(self, address: str, token: str, own_address: str = "") -> None:
        self.address = address
        self._headers = {"Authorization": f"Bearer {token}", PEER_HEADER: own_address}
        parts = urlsplit(address)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_SECONDS)

    def state(self, key: str, size_bytes: int, own_cache: str = "") -> FetchProgress | None:
        """Return which chunks the node has; None if it has nothing of the file. Raises Interrupted if it does not
        answer, OwnNode if it serves the cache `own_cache`."""
        answer = self._get(f"/files/{key}/state", {})
        text = self._body(answer, _MAX_STATE_BYTES)
        if answer.status != 200:
            return None
        try:
            facts = json.loads(text)
            if own_cache and facts["cache"] == own_cache:
                raise OwnNode(self.address)
            fresh = new_progress(size_bytes)
            if (facts["size_bytes"], facts["chunk_bytes"]) != (fresh.size_bytes, fresh.chunk_bytes):
                return None
            done, claimed = (from_bitmap(facts[name], fresh.chunks) for name in ("done", "claimed"))
        except (ValueError, KeyError, TypeError):
            return None
        return FetchProgress(fresh.size_bytes, fresh.chunk_bytes, done, claimed)

    def read(self, key: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes of complete chunks. Raises Interrupted if the node does not send all of them."""
        answer = self._get(f"/files/{key}", {"Range": f"bytes={begin}-{end - 1}"})
        if answer.status != 206 or answer.headers.get("Content-Length") != str(end - begin):
            self._body(answer, _MAX_STATE_BYTES)
            raise Interrupted(f"{self.address}: HTTP {answer.status}")
        left = end - begin
        while left:
            try:
                piece = answer.read(min(PIECE_BYTES, left))
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise Interrupted(f"{self.address}: {error}") from error
            if not piece:
                self.close()
                raise Interrupted(f"{self.address}: the transfer ended early")
            left -= len(piece)
            yield piece

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        self._connection.close()

    def _get(self, path: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        for is_second in (False, True):
            try:
                self._connection.request("GET", path, headers={**self._headers, **headers})
                return self._connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                # a kept connection may have been closed by the other side
                if is_second or not isinstance(error, http.client.RemoteDisconnected | BrokenPipeError):
                    raise Interrupted(f"{self.address}: {error}") from error
        raise AssertionError("the second try returns or raises")

    def _body(self, answer: http.client.HTTPResponse, most_bytes: int) -> bytes:
        try:
            return answer.read(most_bytes)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise Interrupted(f"{self.address}: {error}") from error


def node_folder(root: Path) -> Path:
    """Return the folder in which the processes of a node note the addresses of other nodes."""
    return root / "peers"
