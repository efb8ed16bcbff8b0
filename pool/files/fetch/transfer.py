"""Fetches the chunks of one file with several connections at once: from its source, and from other nodes that have
them.

`ChunkPlan` decides; this module moves bytes. Every thread ends when the file is complete, when the fetch should stop,
or with the first error of the source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from modelpool.pool.files.fetch.chunk_plan import ChunkPlan
from modelpool.pool.files.fetch.fetch_errors import Interrupted
from modelpool.pool.files.fetch.file_server import OwnNode, PeerClient
from modelpool.pool.files.fetch.partial_file import PartialFile
from modelpool.pool.files.fetch.source import FileSource, read_range
from modelpool.pool.values.core.remote_file import RemoteFile

#: connections to the source, and to other nodes, for one file
SOURCE_CONNECTIONS, PEER_CONNECTIONS = 4, 4
#: other nodes that are asked what they have, and the interval
MAX_ASKED, ASK_SECONDS = 12, 0.1
#: longest time that the source is not used because other nodes have not answered yet
FIRST_ASK_SECONDS = 1.0
#: pause after a node did not answer
ASKED_AGAIN_SECONDS = 10.0
#: pause of a thread without work
IDLE_SECONDS = 0.02


@dataclass(slots=True)
class Transferred:
    """Bytes that arrived so far. Speeds follow from the seconds in which at least one connection was open."""

    source_bytes: int = 0
    peer_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Transfer:
    """The transfer of one file into a partial file that is open.

    peers  returns the addresses of other nodes that may have it, the best first
    """

    partial: PartialFile
    file: RemoteFile
    key: str
    source: FileSource
    plan: ChunkPlan
    peers: Callable[[], tuple[str, ...]]
    connect: Callable[[str], PeerClient]
    own_cache: str
    should_stop: Callable[[], bool]
    is_own_node: Callable[[str], None]
    moved: Transferred
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _error: BaseException | None = None
    #: set when the other nodes were asked once
    _first_ask: threading.Event | None = None
    #: when a node that did not answer may be asked again
    _asked_again_at: dict[str, float] = field(default_factory=dict)
    _ended: bool = False

    def run(self, uses_peers: bool) -> None:
        """Return when every chunk is on disk, or early when the fetch should stop. Raises SourceFailed, FileGone,
        CacheFull."""
        if self.plan.is_complete:
            return
        count = self.partial.progress.chunks
        workers = [self._read_source] * min(SOURCE_CONNECTIONS, count)
        if uses_peers and self.peers():
            self._first_ask = threading.Event()
        if uses_peers:
            workers += [self._read_peers] * min(PEER_CONNECTIONS, count) + [self._ask_peers]
        threads = [threading.Thread(target=self._guarded, args=(work,), name="fetch") for work in workers]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            self._ended = True
            for thread in threads:
                thread.join()
            self.moved.seconds += time.monotonic() - began
        if self._error is not None:
            raise self._error

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._lock:
                self._error = self._error or error

    def _over(self) -> bool:
        if self._ended or self._error is not None or self.should_stop():
            return True
        with self._lock:
            return self.plan.is_complete

    def _read_source(self) -> None:
        if self._first_ask is not None:  # what other nodes have does not have to come from the source
            self._first_ask.wait(FIRST_ASK_SECONDS)
        while not self._over():
            with self._lock:
                chunk = self.plan.from_source(time.monotonic())
            if chunk is None:
                time.sleep(IDLE_SECONDS)
                continue
            begin, end = self.partial.progress.range_of(chunk)
            self.partial.claim(chunk)
            began, is_done = time.monotonic(), False
            try:
                for piece in read_range(self.source, self.file, begin, end, self._pause, self._stops):
                    self.partial.write(begin, piece)
                    begin += len(piece)
                if begin == end:
                    self.partial.done(chunk)
                    is_done = True
            finally:
                with self._lock:
                    if is_done:
                        self.moved.source_bytes += end - self.partial.progress.range_of(chunk)[0]
                        self.plan.done(chunk, time.monotonic() - began)
                    else:
                        self.plan.failed(chunk)
                if not is_done:
                    self.partial.drop(chunk)

    def _read_peers(self) -> None:
        clients: dict[str, PeerClient] = {}
        try:
            while not self._over():
                with self._lock:
                    found = self.plan.from_peer()
                if found is None:
                    time.sleep(IDLE_SECONDS)
                    continue
                peer, chunk = found
                client = clients.get(peer) or clients.setdefault(peer, self.connect(peer))
                self._read_peer(client, peer, chunk)
        finally:
            for client in clients.values():
                client.close()

    def _read_peer(self, client: PeerClient, peer: str, chunk: int) -> None:
        first, end = self.partial.progress.range_of(chunk)
        begin, began, is_done = first, time.monotonic(), False
        try:
            for piece in client.read(self.key, begin, end):
                self.partial.write(begin, piece)
                begin += len(piece)
                if self._stops():
                    client.close()
                    break
            if begin == end:
                self.partial.done(chunk)
                is_done = True
        except Interrupted:
            pass  # the plan counts it, and takes the chunk elsewhere
        finally:
            with self._lock:
                if is_done:
                    self.moved.peer_bytes += end - first
                    self.plan.done(chunk, time.monotonic() - began, peer)
                else:
                    self.plan.failed(chunk, peer)

    def _ask_peers(self) -> None:
        """Ask other nodes what they have until the fetch is over."""
        clients: dict[str, PeerClient] = {}
        try:
            while not self._over():
                self._ask_once(clients)
                self._pause(ASK_SECONDS)
        finally:
            for client in clients.values():
                client.close()

    def _ask_once(self, clients: dict[str, PeerClient]) -> None:
        now = time.monotonic()
        addresses = [address for address in self.peers() if self._asked_again_at.get(address, now) <= now]
        for address in addresses[:MAX_ASKED]:
            if self._over():
                return
            client = clients.get(address) or clients.setdefault(address, self.connect(address))
            try:
                progress = client.state(self.key, self.file.size_bytes, self.own_cache)
            except Interrupted:
                self._asked_again_at[address] = time.monotonic() + ASKED_AGAIN_SECONDS
                progress = None
            except OwnNode:
                self.is_own_node(address)
                progress = None
            with self._lock:
                if progress is None:
                    self.plan.peer_gone(address)
                else:
                    self.plan.peer_is(address, progress, time.monotonic())
        if self._first_ask is not None:
            self._first_ask.set()

    def _stops(self) -> bool:
        return self._ended or self._error is not None or self.should_stop()

    def _pause(self, seconds: float) -> None:
        """Wait, but not longer than the fetch."""
        until = time.monotonic() + seconds
        while not self._over() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.05))
