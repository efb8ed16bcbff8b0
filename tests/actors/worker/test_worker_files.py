"""Workers fetch the files of their runs, keep what they have mapped, and give up the rest."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from modelpool.actors.worker.wire.messages import FetchOrder
from modelpool.actors.worker.worker_files import WorkerFiles, mapped_inodes
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.fetch_errors import FETCH_ERRORS, CacheBroken, CacheFull
from modelpool.pool.files.fetch.file_key import file_key
from modelpool.pool.files.fetch.open_source import open_source
from modelpool.pool.values.core.remote_file import RemoteFile
from modelpool.pool.values.core.stage_params import Stopped
from tests.pool.files.fetch.range_server import RangeServer, serving

SIZE = 2 << 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    """A source with four files of one size."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.safetensors").write_bytes(random.Random(number).randbytes(SIZE))
    with serving(folder) as running:
        yield running


def orders(server: RangeServer) -> list[FetchOrder]:
    """An order for each file."""
    files = [
        replace(file, sha256=hashlib.sha256((server.root / file.path).read_bytes()).hexdigest())
        for file in open_source(server.url).files()
    ]
    return [FetchOrder(((file,),)) for file in files]


def go_on() -> bool:
    return False


def test_a_file_is_fetched_once_and_its_cost_is_reported(tmp_path: Path, server: RangeServer) -> None:
    files = WorkerFiles(CacheSettings(tmp_path / "cache"), "", "n0", lambda: None)
    first, *_ = orders(server)
    cost = files.bring(first, go_on)
    assert (cost.source_bytes, cost.peer_bytes) == (SIZE, 0)
    assert cost.seconds > 0
    assert files.bring(first, go_on).source_bytes == 0
    other = WorkerFiles(CacheSettings(tmp_path / "cache"), "", "n0", lambda: None)
    assert other.bring(first, go_on).source_bytes == 0
    assert [(f.key, f.size_bytes) for f in other.on_disk()] == [(file_key(first.sets[0][0].sha256), SIZE)]
    files.close()
    other.close()


def test_mapped_files_stay_and_unmapped_ones_make_room(tmp_path: Path, server: RangeServer) -> None:
    """The cache has room for two files; a worker that runs one model after the other gives up unmapped ones."""
    open_maps: list[mmap.mmap] = []

    def close_models() -> None:
        while len(open_maps) > 1:
            open_maps.pop().close()

    files = WorkerFiles(CacheSettings(tmp_path / "cache", 2 * SIZE), "", "n0", close_models)
    wanted = orders(server)
    content = tmp_path / "cache" / "content"

    def run(order: FetchOrder) -> None:
        files.bring(order, go_on)
        with open(content / order.sets[0][0].sha256, "rb") as file:
            open_maps.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    for order in wanted[:3]:
        run(order)
    present = {path.name for path in content.iterdir()}
    assert present == {wanted[0].sets[0][0].sha256, wanted[2].sets[0][0].sha256}, "the first is still mapped"
    both = FetchOrder((wanted[1].sets[0], wanted[3].sets[0]))
    with pytest.raises(CacheFull, match=r"no room for .* in use by running work"):
        files.bring(both, go_on)
    for one in open_maps:
        one.close()
    files.bring(both, go_on)
    assert {path.name for path in content.iterdir()} == {each[0].sha256 for each in both.sets}
    files.close()


def test_a_cancelled_run_stops_fetching(tmp_path: Path, server: RangeServer) -> None:
    server.bytes_per_second = 1e6
    files = WorkerFiles(CacheSettings(tmp_path / "cache"), "", "n0", lambda: None)
    order = orders(server)[0]
    before = server.sent_bytes()
    with pytest.raises(Stopped):
        files.bring(order, lambda: server.sent_bytes() - before > 1 << 19)
    files.close()


def test_other_nodes_are_asked_first(tmp_path: Path, server: RangeServer) -> None:
    near = WorkerFiles(CacheSettings(tmp_path / "near", token="secret"), "127.0.0.1", "n0", lambda: None)
    far = WorkerFiles(CacheSettings(tmp_path / "far", token="secret"), "127.0.0.1", "n1", lambda: None)
    stranger = WorkerFiles(CacheSettings(tmp_path / "stranger", token="guess"), "127.0.0.1", "n2", lambda: None)
    order = orders(server)[0]
    near.bring(order, go_on)
    asked = replace(order, peers=(near.address,))
    cost = far.bring(asked, go_on)
    assert (cost.source_bytes, cost.peer_bytes) == (0, SIZE)
    cost = stranger.bring(asked, go_on)
    assert (cost.source_bytes, cost.peer_bytes) == (SIZE, 0), "without the token, nothing is served"
    for files in (near, far, stranger):
        files.close()


def test_mapped_files_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a file with spaces"
    path.write_bytes(b"x" * 4096)
    identity = path.stat().st_ino
    assert mapped_inodes() is not None
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert identity in (mapped_inodes() or ())
    assert identity not in (mapped_inodes() or ())
    assert mapped_inodes(tmp_path / "no such file") is None


def test_files_of_two_sets_are_separate(tmp_path: Path, server: RangeServer) -> None:
    """A LoRA and a model that have one name in two sources."""
    files = WorkerFiles(CacheSettings(tmp_path / "cache"), "", "n0", lambda: None)
    first, second, *_ = (order.sets[0][0] for order in orders(server))
    same_name = RemoteFile(first.path, second.url, SIZE, second.version, second.sha256)
    files.bring(FetchOrder(((first,), (same_name,))), go_on)
    views = sorted((tmp_path / "cache" / "views").iterdir())
    assert len(views) == 2
    found = {hashlib.sha256((view / first.path).read_bytes()).hexdigest() for view in views}
    assert found == {first.sha256, second.sha256}
    assert all(os.stat(view / first.path).st_nlink == 2 for view in views), "no byte is stored twice"
    files.close()


def test_a_cache_that_somebody_empties_is_filled_again(tmp_path: Path, server: RangeServer) -> None:
    """`rm -rf cache/*`, which frees a disk: the files that a worker had fetched were gone until it was restarted, and
    another fetch ended its job with an internal error."""
    cache = tmp_path / "cache"
    files = WorkerFiles(CacheSettings(cache, token="secret"), "127.0.0.1", "n0", lambda: None)
    first, second, *_ = orders(server)
    files.bring(first, go_on)
    for folder in cache.iterdir():
        shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    assert files.on_disk() == ()
    for order in (first, second):
        assert files.bring(order, go_on).source_bytes == SIZE
        (file,) = order.sets[0]
        (path,) = cache.glob(f"views/*/{file.path}")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
        assert files.bring(order, go_on).source_bytes == 0
    shutil.rmtree(cache / "views")
    assert files.bring(first, go_on).source_bytes == 0
    assert len(list(cache.glob("views/*/*"))) == 1
    files.close()


def test_a_disk_that_fails_is_no_failure_of_a_job(tmp_path: Path, server: RangeServer) -> None:
    """The disk of the cache is gone, or broken: other nodes run the work. An internal error fails a job at once, so
    that such a node, which is always idle, failed all."""
    cache = tmp_path / "disk" / "cache"
    files = WorkerFiles(CacheSettings(cache), "", "n0", lambda: None)
    order = orders(server)[0]
    cache.parent.rename(tmp_path / "unmounted")
    with pytest.raises(CacheBroken, match=r"disk/cache: .*No such file.*expected a folder on a local disk"):
        files.bring(order, go_on)
    assert not cache.parent.exists(), "what is under the place of a disk stays as it is"
    (tmp_path / "unmounted").rename(cache.parent)
    shutil.rmtree(cache / "partial")
    (cache / "partial").touch()
    with pytest.raises(CacheBroken, match="Not a directory"):
        files.bring(order, go_on)
    assert issubclass(CacheBroken, FETCH_ERRORS)
    files.close()
