"""A server for tests that answers like the Hugging Face hub: the list of a revision, and files, to which it redirects
on another server as the hub does. With tokens, restricted repositories, new names of repositories, and faults."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote, urlsplit

_PIECE = 64 << 10
#: files of at least this size are stored apart from git, with a SHA-256
LARGE_BYTES = 10_000


@dataclass(slots=True)
class Repository:
    """The files of a repository by path. `token` is needed if it is set; `is_gated`: its list is open, its files are
    not without the token."""

    files: dict[str, bytes]
    commit: str = "c" * 40
    revisions: tuple[str, ...] = ("main",)
    token: str = ""
    is_gated: bool = False


@dataclass(slots=True)
class HubServer:
    """The state of a running server.

    new_names  repositories that were renamed: old name to new one
    hashes     SHA-256 that the list states instead of the true ones, by path
    break_after  called with each request for bytes of a file: how many are sent before the connection breaks, or None
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    new_names: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    break_after: Callable[[str, int], int | None] = lambda name, begin: None
    bytes_per_second: float | None = None
    url: str = ""
    storage_url: str = ""
    #: bytes of content that were sent, and the headers of the requests to the second server
    sent_bytes: int = 0
    storage_headers: list[Mapping[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving_hub(**repositories: Repository) -> Iterator[HubServer]:
    """Serve repositories, named with _ for /, on two free ports of the loopback interface."""
    state = HubServer({name.replace("__", "/"): each for name, each in repositories.items()})
    with ExitStack() as stack:
        state.url = stack.enter_context(_running(type("Hub", (_HubHandler,), {"state": state})))
        state.storage_url = stack.enter_context(_running(type("Storage", (_StorageHandler,), {"state": state})))
        yield state


@contextmanager
def _running(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    state: HubServer
    protocol_version = "HTTP/1.1"

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class _HubHandler(_Handler):
    def do_GET(self) -> None:
        state, path = self.state, unquote(urlsplit(self.path).path)
        listed = re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(.+)", path)
        resolved = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = listed or resolved
        if match is None:
            self.answer(404)
            return
        name = match[1]
        if name in state.new_names:
            self.answer(307, Location=self.path.replace(name, state.new_names[name], 1))
            return
        repository = state.repositories.get(name)
        allowed = repository is not None and (
            not repository.token or self.headers.get("Authorization") == f"Bearer {repository.token}"
        )
        if repository is None or (not allowed and (resolved or not repository.is_gated)):
            reason = "GatedRepo" if repository is not None and repository.is_gated else "RepoNotFound"
            self.answer(401, X_Error_Code=reason)
        elif match[2] not in (*repository.revisions, repository.commit):
            self.answer(404, X_Error_Code="RevisionNotFound")
        elif listed:
            self.answer(200, json.dumps(self._described(name, repository)).encode())
        elif match[3] not in repository.files or match[3] in state.gone:
            self.answer(404, X_Error_Code="EntryNotFound")
        else:
            self.answer(302, Location=f"{state.storage_url}/{quote(name)}/{quote(match[3])}?signature=abc")

    def _described(self, name: str, repository: Repository) -> dict[str, Any]:
        siblings = []
        for path, content in repository.files.items():
            sha1 = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            each: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": sha1}
            if len(content) >= LARGE_BYTES:
                sha256 = self.state.hashes.get(path) or hashlib.sha256(content).hexdigest()
                each["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(each)
        return {"id": name, "sha": repository.commit, "siblings": siblings}


class _StorageHandler(_Handler):
    def do_GET(self) -> None:
        state = self.state
        _, org, name, path = unquote(urlsplit(self.path).path).split("/", 3)
        content = state.repositories[f"{org}/{name}"].files[path]
        with state.lock:
            state.storage_headers.append(dict(self.headers))
        begin, end = 0, len(content)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is not None and content:
            begin, end = int(asked[1]), min(end, int(asked[2]) + 1)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(end - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        breaks = state.break_after(path, begin)
        limit = end if breaks is None else min(end, begin + breaks)
        while begin < limit:
            piece = content[begin : min(limit, begin + _PIECE)]
            if state.bytes_per_second is not None:
                time.sleep(len(piece) / state.bytes_per_second)
            try:
                self.wfile.write(piece)
            except OSError:
                break
            begin += len(piece)
            with state.lock:
                state.sent_bytes += len(piece)
        if begin < end:
            self.close_connection = True
