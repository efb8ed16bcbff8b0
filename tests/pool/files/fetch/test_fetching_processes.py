"""Several processes of one node, and several nodes, fetch one file from a real web server; some are killed."""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from modelpool.pool.files.fetch.fetch_progress import new_progress
from modelpool.pool.files.fetch.file_cache import FileCache
from modelpool.pool.files.fetch.file_server import state_on_disk
from tests.pool.files.fetch.range_server import RangeServer, serving

SIZE = 24 << 20
TOKEN = "a token of the test"


@contextmanager
def fetching(
    cache: Path, server: RangeServer, sha256: str, token: str = "", peers: tuple[str, ...] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A process that fetches the file; it is killed at the end."""
    command = [
        sys.executable,
        "-m",
        "tests.pool.files.fetch.fetching_process",
        str(cache),
        server.url,
        token,
        sha256,
        *peers,
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line(stream: IO[str] | None) -> str:
    """Return the next line of a process."""
    assert stream is not None
    return stream.readline().strip()


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what a process fetched."""
    found: dict[str, Any] = json.loads(line(process.stdout))
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process brings about."""
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited a minute")


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, str]:
    """A folder with one file, and its SHA-256."""
    folder = tmp_path / "source"
    folder.mkdir()
    data = random.Random(7).randbytes(SIZE)
    (folder / "a.safetensors").write_bytes(data)
    return folder, hashlib.sha256(data).hexdigest()


def test_processes_of_a_node_fetch_a_file_once_even_when_one_is_killed(
    tmp_path: Path, weights: tuple[Path, str]
) -> None:
    folder, sha256 = weights
    cache = FileCache(tmp_path / "cache")
    with serving(folder, bytes_per_second=8e6) as server, ExitStack() as stack:
        first = stack.enter_context(fetching(cache.root, server, sha256))

        def done_chunks() -> int:
            progress = state_on_disk(cache, sha256)
            return 0 if progress is None else len(progress.done)

        wait_until(lambda: done_chunks() >= 20)
        others = [stack.enter_context(fetching(cache.root, server, sha256)) for _ in range(3)]
        assert [line(process.stdout) for process in others] == [""] * 3
        wait_until(lambda: done_chunks() >= 40)
        assert not list(cache.content.iterdir()), "a partial file is not visible"
        first.send_signal(signal.SIGKILL)
        first.wait()
        server.bytes_per_second = None
        found = [outcome(process) for process in others]
        assert len({each["folder"] for each in found}) == 1
        data = (Path(found[0]["folder"]) / "a.safetensors").read_bytes()
        assert hashlib.sha256(data).hexdigest() == sha256
        assert [path.name for path in cache.content.iterdir()] == [sha256]
        assert not list(cache.partial.iterdir())
        # of the killed process, only the chunks in flight are sent again: one for each connection
        chunk_bytes = new_progress(SIZE).chunk_bytes
        described = 4 + 1  # a byte of each process that described the file
        assert SIZE <= server.sent_bytes() <= SIZE + described + 4 * chunk_bytes
        fetchers = [each for each in found if each["source_bytes"]]
        assert len(fetchers) == 1, "one process continued"
        assert 0 < fetchers[0]["source_bytes"] <= SIZE - 40 * chunk_bytes


def test_nodes_share_one_download(tmp_path: Path, weights: tuple[Path, str]) -> None:
    """Four nodes together read the source once, and a little more; nodes that come later are found by the first."""
    folder, sha256 = weights
    with serving(folder, bytes_per_second=6e6) as server, ExitStack() as stack:
        first = stack.enter_context(fetching(tmp_path / "node0", server, sha256, TOKEN))
        address = line(first.stdout)
        more = [
            stack.enter_context(fetching(tmp_path / f"node{i}", server, sha256, TOKEN, (address,))) for i in (1, 2, 3)
        ]
        for process in more:
            assert line(process.stdout).startswith("http://127.0.0.1:")
        found = [outcome(process) for process in (first, *more)]
        for each in found:
            data = (Path(each["folder"]) / "a.safetensors").read_bytes()
            assert hashlib.sha256(data).hexdigest() == sha256
            assert each["source_bytes"] + each["peer_bytes"] == SIZE
        assert server.sent_bytes() < 2 * SIZE
        assert found[0]["peer_bytes"] > 0, "the first node takes from those that came later"


def test_a_node_that_dies_while_it_serves_is_replaced_by_the_source(tmp_path: Path, weights: tuple[Path, str]) -> None:
    folder, sha256 = weights
    with serving(folder, bytes_per_second=6e6) as server, ExitStack() as stack:
        first = stack.enter_context(fetching(tmp_path / "node0", server, sha256, TOKEN))
        address = line(first.stdout)
        wait_until(lambda: server.sent_bytes() > SIZE // 8)
        second = stack.enter_context(fetching(tmp_path / "node1", server, sha256, TOKEN, (address,)))
        line(second.stdout)
        wait_until(lambda: (state_on_disk(FileCache(tmp_path / "node1"), sha256) or new_progress(1)).done_bytes > 0)
        first.send_signal(signal.SIGKILL)
        server.bytes_per_second = None
        found = outcome(second)
        assert (Path(found["folder"]) / "a.safetensors").stat().st_size == SIZE
        assert hashlib.sha256((Path(found["folder"]) / "a.safetensors").read_bytes()).hexdigest() == sha256
