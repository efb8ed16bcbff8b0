"""The cache of a node: only complete, verified files are visible; its size is bounded; what is in use stays."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from modelpool.pool.files.fetch.cache_eviction import CachedFile, eviction_order
from modelpool.pool.files.fetch.fetch_errors import CacheFull, SourceFailed, WrongContent
from modelpool.pool.files.fetch.file_cache import STALE_SECONDS, FileCache, FileLease, cache_key, checked_path
from modelpool.pool.files.fetch.partial_file import PartialFile
from modelpool.pool.values.core.remote_file import RemoteFile
from tests.tiers import examples

CHUNK = 1 << 18


def content(number: int) -> bytes:
    """Return the bytes of a test file; its size depends on the number."""
    return bytes([number + 1]) * ((1 + number % 3) * CHUNK - 7 * number)


def remote(number: int, *, published: bool = True) -> RemoteFile:
    """Return the description of a test file."""
    data = content(number)
    sha256 = hashlib.sha256(data).hexdigest() if published else ""
    return RemoteFile(f"models/{number}.safetensors", f"test://source/{number}", len(data), "1", sha256)


def fill(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
    """Fetch every missing chunk."""
    fill_some(partial, file, 10**9)
    return False


def fill_some(partial: PartialFile, file: RemoteFile, count: int, fetched: list[tuple[str, int]] | None = None) -> None:
    """Fetch up to `count` missing chunks; note them."""
    data = content(int(file.url.rsplit("/", 1)[1]))
    for chunk in sorted(set(range(partial.progress.chunks)) - partial.progress.done)[:count]:
        begin, end = partial.progress.range_of(chunk)
        partial.claim(chunk)
        partial.write(begin, data[begin:end])
        partial.done(chunk)
        if fetched is not None:
            fetched.append((file.url, chunk))


class Died(Exception):
    """The process is killed here: locks are released, nothing else happens."""


class CacheMachine(RuleBasedStateMachine):
    """Fetches, kills at any chunk, leases and evictions in any order, over one cache folder."""

    BOUND = 5 * CHUNK

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix="cache")
        self.cache = FileCache(Path(self.folder.name) / "cache", self.BOUND)
        self.leases: list[tuple[int, FileLease]] = []
        self.fetched: list[tuple[str, int]] = []

    def teardown(self) -> None:
        for _, lease in self.leases:
            lease.close()
        self.folder.cleanup()

    @rule(number=st.integers(0, 5), published=st.booleans())
    def fetch(self, number: int, published: bool) -> None:
        """A worker needs a file."""
        held = {n for n, _ in self.leases}
        known = published and number in held
        try:
            lease = self.cache.fetch(remote(number, published=published), fill)
        except CacheFull:
            # without a published hash, an equal file is only recognised after it was fetched
            assert not known
            assert sum(len(content(n)) for n in held) + len(content(number)) > self.BOUND
            return
        assert lease is not None
        self.leases.append((number, lease))

    @rule(number=st.integers(0, 5), chunks=st.integers(0, 2))
    def fetch_and_die(self, number: int, chunks: int) -> None:
        """A worker is killed while it fetches."""

        def dying(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
            fill_some(partial, file, chunks, self.fetched)
            partial.write(0, b"torn")  # bytes of a chunk that is not complete may be anything
            raise Died

        sha256 = remote(number).sha256
        if (self.cache.content / sha256).exists():
            return
        partial = PartialFile.try_lock(self.cache.partial, sha256, len(content(number)))
        assert partial is not None
        partial.close()
        try:
            lease = self.cache.fetch(remote(number), dying)
        except (Died, CacheFull):
            return
        assert lease is not None
        lease.close()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """A worker no longer uses a file."""
        index = data.draw(st.integers(0, len(self.leases) - 1))
        self.leases.pop(index)[1].close()

    @precondition(lambda self: self.leases)
    @rule()
    def view(self) -> None:
        """A model of all leased files."""
        folder = self.cache.view([(f"m/{n}", lease.sha256) for n, lease in self.leases])
        for number, _ in self.leases:
            assert (folder / f"m/{number}").read_bytes() == content(number)

    @rule()
    def start_again(self) -> None:
        """Another process opens the cache."""
        self.cache = FileCache(self.cache.root, self.BOUND)
        self.cache.clean_up()

    @invariant()
    def only_complete_files_are_visible(self) -> None:
        for path in self.cache.content.iterdir():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        linked = {path.stat().st_ino for path in self.cache.content.iterdir()}
        for _, path in self.cache._view_files():
            assert path.stat().st_ino in linked, f"{path} outlived its content"

    @invariant()
    def the_bound_holds(self) -> None:
        sizes = [p.stat().st_size for p in (*self.cache.content.iterdir(), *self.cache.partial.glob("*.part"))]
        assert sum(sizes) <= self.BOUND

    @invariant()
    def used_files_stay(self) -> None:
        for number, lease in self.leases:
            assert lease.path.read_bytes() == content(number)


CacheMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
TestCache = CacheMachine.TestCase


@pytest.fixture
def cache(tmp_path: Path) -> FileCache:
    return FileCache(tmp_path / "cache")


def test_an_interrupted_fetch_resumes_with_the_missing_chunks(cache: FileCache) -> None:
    fetched: list[tuple[str, int]] = []

    def fail_after_one(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
        fill_some(partial, file, 1, fetched)
        raise SourceFailed("gone for now")

    def finish(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
        fill_some(partial, file, 10, fetched)
        return False

    for _ in range(2):
        with pytest.raises(SourceFailed):
            cache.fetch(remote(2), fail_after_one)
        assert cache.lease(remote(2).sha256) is None
    lease = cache.fetch(remote(2), finish)
    assert lease is not None
    assert lease.path.read_bytes() == content(2)
    assert sorted(fetched) == [(remote(2).url, chunk) for chunk in range(3)]


def test_wrong_content_is_refused_and_removed(cache: FileCache) -> None:
    wrong = RemoteFile("a", "test://source/1", len(content(1)), "1", "0" * 64)
    with pytest.raises(WrongContent, match=r"test://source/1: found the SHA-256 [0-9a-f]{64}, expected 0{64}"):
        cache.fetch(wrong, fill)
    assert cache.use().used_bytes == 0
    assert not any(cache.partial.iterdir())


def test_damaged_chunks_of_an_earlier_process_are_fetched_again(cache: FileCache) -> None:
    """A power failure may lose bytes that the journal already counts."""

    def damage(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
        partial.write(0, b"damaged")
        partial.done(0)
        raise SourceFailed("interrupted")

    with pytest.raises(SourceFailed):
        cache.fetch(remote(1), damage)
    lease = cache.fetch(remote(1), fill)
    assert lease is not None
    assert lease.path.read_bytes() == content(1)


def test_wrong_bytes_of_other_nodes_are_fetched_again_from_the_source(cache: FileCache) -> None:
    calls: list[bool] = []

    def from_a_bad_node(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
        calls.append(is_alone)
        fill(partial, file, is_alone)
        if not is_alone:
            partial.write(5, b"bad")
        return not is_alone

    lease = cache.fetch(remote(1), from_a_bad_node)
    assert lease is not None
    assert lease.path.read_bytes() == content(1)
    assert calls == [False, True]


def test_a_file_larger_than_the_bound_is_refused(tmp_path: Path) -> None:
    small = FileCache(tmp_path / "cache", 1000)
    with pytest.raises(CacheFull, match=r"test://source/0: has 256\.0 KiB, .* at most 1000 B; expected a larger cache"):
        small.fetch(remote(0), fill)
    assert not any(small.partial.iterdir())


def test_a_full_disk_is_told_with_folder_and_sizes(cache: FileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs(cache.root)
    full = type("Usage", (), {"total": usage.f_blocks, "used": usage.f_blocks, "free": 4096})()
    monkeypatch.setattr("modelpool.pool.files.fetch.file_cache.shutil.disk_usage", lambda path: full)
    with pytest.raises(CacheFull, match=r"no room for test://source/0 of 256\.0 KiB: .*the disk has 4\.0 KiB free"):
        cache.fetch(remote(0), fill)
    assert not any(cache.partial.iterdir())


def test_a_disk_that_fills_during_a_fetch_is_told(cache: FileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> int:
        raise OSError(28, "No space left on device")

    def fetching(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr("modelpool.pool.files.fetch.partial_file.os.pwrite", no_space)
            return fill(partial, file, is_alone)

    with pytest.raises(CacheFull, match="the disk is full"):
        cache.fetch(remote(0), fetching)
    assert cache.lease(remote(0).sha256) is None


def test_a_folder_that_cannot_be_created_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheFull, match=r"expected a folder on a local disk as \[models\] cache"):
        FileCache(tmp_path / "file" / "cache")


def test_files_needed_soon_leave_last() -> None:
    files = [CachedFile(key, 1, at) for key, at in (("old", 1.0), ("new", 9.0), ("soon", 0.0), ("sooner", 0.5))]
    files.append(CachedFile("broken off", 1, 99.0, is_partial=True))
    order = [file.key for file in eviction_order(files, ["sooner", "soon"])]
    assert order == ["broken off", "old", "new", "soon", "sooner"]


def test_what_is_needed_soon_survives_an_eviction(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", len(content(0)) + len(content(3)) + len(content(1)) - 1)
    for number in (0, 3):
        lease = cache.fetch(remote(number), fill)
        assert lease is not None
        lease.close()
        os.utime(lease.path, (number + 1, number + 1))
    lease = cache.fetch(remote(1), fill, needed_next=[remote(0).sha256])
    assert lease is not None
    assert cache.lease(remote(3).sha256) is None
    assert cache.lease(remote(0).sha256) is not None


def test_start_removes_stale_fetches_and_orphaned_names(cache: FileCache) -> None:
    partial = PartialFile.try_lock(cache.partial, remote(1).sha256, len(content(1)))
    assert partial is not None
    partial.open()
    fill_some(partial, remote(1), 1)
    partial.close()
    cache.clean_up()
    assert len(list(cache.partial.iterdir())) == 2, "a recent fetch may be resumed"
    (cache.partial / f"{'a' * 64}.part").write_bytes(b"without a journal")
    orphan = cache.views / "ffff" / "models" / "a.safetensors"
    orphan.parent.mkdir(parents=True)
    orphan.write_bytes(b"x")
    cache.clean_up()
    assert not orphan.exists()
    assert not (cache.views / "ffff").exists()
    assert len(list(cache.partial.iterdir())) == 2
    cache.clean_up(now=time.time() + STALE_SECONDS + 1)
    assert not any(cache.partial.iterdir())


@pytest.mark.parametrize("found", [b"", b"\0" * 64, b"\xff" * 64, b"g" * 64])
def test_a_damaged_note_of_a_hash_is_none(cache: FileCache, found: bytes) -> None:
    """After a power failure, a small file may have other bytes: the file could not be fetched any more."""
    file = remote(1, published=False)
    lease = cache.fetch(file, fill)
    assert lease is not None
    lease.close()
    (note,) = (cache.root / "hashes").iterdir()
    note.write_bytes(found)
    assert cache.known_sha256(file) == ""
    again = cache.fetch(file, fill)
    assert again is not None
    assert cache.known_sha256(file) == again.sha256
    again.close()


def test_a_running_fetch_is_not_cleaned_up(cache: FileCache) -> None:
    partial = PartialFile.try_lock(cache.partial, remote(1).sha256, len(content(1)))
    assert partial is not None
    partial.open()
    cache.clean_up(now=time.time() + 2 * STALE_SECONDS)
    assert len(list(cache.partial.iterdir())) == 2
    partial.close()


def test_names_that_lead_out_of_a_source_are_refused() -> None:
    for name in ("../a", "/etc/a", "a/../../b", "", "a\0b"):
        with pytest.raises(WrongContent, match="leads out of its folder"):
            checked_path(name)


def test_equal_files_of_several_urls_are_one(cache: FileCache) -> None:
    first = remote(1)
    second = RemoteFile("other/name", "test://elsewhere/1", first.size_bytes, "9", first.sha256)
    assert cache_key(first) == cache_key(second)
    lease = cache.fetch(first, fill)

    def never(partial: PartialFile, file: RemoteFile, is_alone: bool) -> bool:
        raise AssertionError("it is there")

    again = cache.fetch(second, never)
    assert lease is not None
    assert again is not None
    assert again.inode() == lease.inode()
