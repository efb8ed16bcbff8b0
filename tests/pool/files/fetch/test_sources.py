"""Sources: what they list, and how they fail. With a real web server and real folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from modelpool.pool.files.fetch import http_source
from modelpool.pool.files.fetch import source as source_module
from modelpool.pool.files.fetch.cache_settings import CacheSettings
from modelpool.pool.files.fetch.fetch_errors import FileGone, LibraryMissing, SourceFailed, WrongContent
from modelpool.pool.files.fetch.fetch_progress import new_progress
from modelpool.pool.files.fetch.node_files import NodeFiles
from modelpool.pool.files.fetch.open_source import open_source
from modelpool.pool.files.fetch.source import TRIES, read_all
from modelpool.pool.files.fetch.source_url import checked_source
from modelpool.pool.values.core.errors import UnusableField
from tests.pool.files.fetch.range_server import Asked, serving

DATA = random.Random(5).randbytes(3 << 20)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of models; retries do not wait."""
    monkeypatch.setattr(http_source, "FIRST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(source_module, "FIRST_PAUSE_SECONDS", 0.0)
    root = tmp_path / "source"
    (root / "deep" / "er & er").mkdir(parents=True)
    (root / "a b.safetensors").write_bytes(DATA)
    (root / "deep" / "er & er" / "c#1.gguf").write_bytes(DATA[:1000])
    (root / "deep" / "config.json").write_text("{}")
    for ignored in ("notes.md", "weights.ckpt", ".hidden.safetensors", "a.safetensors.part"):
        (root / ignored).write_text("x")
    return root


def test_a_web_server_and_a_shared_folder_list_the_same_files(folder: Path) -> None:
    sums = {"a b.safetensors": hashlib.sha256(DATA).hexdigest()}
    (folder / "SHA256SUMS").write_text("".join(f"{digest} *{name}\n" for name, digest in sums.items()) + "nonsense\n")
    (folder / "deep" / "er & er" / "c#1.gguf.sha256").write_text(f"{hashlib.sha256(DATA[:1000]).hexdigest()}\n")
    with serving(folder) as server:
        web, shared = open_source(server.url), open_source(checked_source("sources", str(folder)))
        listed = [[(f.path, f.size_bytes, f.sha256) for f in source.files()] for source in (web, shared)]
        assert sorted(listed[0]) == sorted(listed[1])
        assert {path for path, _, _ in listed[0]} == {
            "SHA256SUMS",
            "a b.safetensors",
            "deep/config.json",
            "deep/er & er/c#1.gguf",
            "deep/er & er/c#1.gguf.sha256",
        }
        hashes = {path: sha256 for path, _, sha256 in listed[0]}
        assert hashes["a b.safetensors"] == sums["a b.safetensors"]
        assert hashes["deep/er & er/c#1.gguf"] == hashlib.sha256(DATA[:1000]).hexdigest()
        for source in (web, shared):
            for file in source.files():
                assert read_all(source, file) == (folder / file.path).read_bytes()
                assert b"".join(source.read(file, 1, 1)) == b""


def test_one_file_is_a_source(folder: Path) -> None:
    with serving(folder) as server:
        for url in (f"{server.url}a%20b.safetensors", checked_source("sources", str(folder / "a b.safetensors"))):
            (file,) = open_source(url).files()
            assert (file.path, file.size_bytes) == ("a b.safetensors", len(DATA))
            assert read_all(open_source(url), file) == DATA


def test_transfers_that_break_off_continue_where_they_broke_off(folder: Path, tmp_path: Path) -> None:
    seen: set[int] = set()

    def fault(asked: Asked) -> int | None:
        """The first request for each place fails, in one of several ways."""
        if asked.begin in seen:
            return None
        seen.add(asked.begin)
        return (503, -100_000, 429, -70_000, -1)[len(seen) % 5]

    with serving(folder) as server:
        files = [file for file in open_source(server.url).files() if file.path == "a b.safetensors"]
        before = server.sent_bytes()
        server.fault = fault
        found = NodeFiles(CacheSettings(tmp_path / "cache")).bring(files)
        assert found is not None
        assert (found.folder / "a b.safetensors").read_bytes() == DATA
        again_bytes = server.sent_bytes() - before - len(DATA)
        # a connection that breaks off may drop bytes that were sent; a range that began anew would be sent again whole
        assert 0 <= again_bytes < 70_000, "what had arrived was sent again"


def test_a_source_that_always_fails_is_given_up(folder: Path, tmp_path: Path) -> None:
    faults: tuple[tuple[Callable[[Asked], int | None], type[Exception], str], ...] = (
        (lambda asked: 500, SourceFailed, rf"after {TRIES} tries: HTTP 500"),
        (lambda asked: 404, FileGone, r"no such file \(HTTP 404\)"),
        (lambda asked: 403, SourceFailed, "HTTP 403"),
        (lambda asked: -1 if asked.begin % 2 else 502, SourceFailed, "tries"),
    )
    for fault, kind, match in faults:
        with serving(folder) as server:
            files = [file for file in open_source(server.url).files() if file.path == "a b.safetensors"]
            server.fault = fault
            nodes = NodeFiles(CacheSettings(tmp_path / f"cache{match}"))
            with pytest.raises(kind, match=match) as raised:
                nodes.bring(files)
            assert f"{server.url}a%20b.safetensors" in str(raised.value)
            assert not any(nodes.cache.content.iterdir())


def test_a_server_without_range_requests_is_refused(folder: Path, tmp_path: Path) -> None:
    with serving(folder, supports_ranges=False) as server:
        files = [file for file in open_source(server.url).files() if file.path == "a b.safetensors"]
        assert new_progress(files[0].size_bytes).chunks > 1
        with pytest.raises(SourceFailed, match="the server ignores range requests"):
            NodeFiles(CacheSettings(tmp_path / "cache")).bring(files)


def test_a_file_that_changes_during_a_fetch_is_not_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "new").write_bytes(DATA[::-1])

    def change(asked: Asked) -> int | None:
        if asked.begin >= 1 << 20 and (tmp_path / "new").exists():
            with contextlib.suppress(FileNotFoundError):  # of two requests at once, one replaces it
                os.replace(tmp_path / "new", folder / "a b.safetensors")
        return None

    with serving(folder) as server:
        files = [file for file in open_source(server.url).files() if file.path == "a b.safetensors"]
        server.fault = change
        nodes = NodeFiles(CacheSettings(tmp_path / "cache"))
        with pytest.raises(FileGone, match="was replaced since it was listed"):
            nodes.bring(files)
        assert not any(nodes.cache.content.iterdir())


def test_a_wrong_hash_from_the_source_is_told(folder: Path, tmp_path: Path) -> None:
    (folder / "a b.safetensors.sha256").write_text("ab" * 32)
    with serving(folder) as server:
        files = [file for file in open_source(server.url).files() if file.path == "a b.safetensors"]
        nodes = NodeFiles(CacheSettings(tmp_path / "cache"))
        with pytest.raises(WrongContent, match=f"expected {'ab' * 32} as published by the source; the file was not"):
            nodes.bring(files)
        assert nodes.cache.use().used_bytes == 0


def test_a_fetch_stops_when_asked_and_resumes(folder: Path, tmp_path: Path) -> None:
    with serving(folder, bytes_per_second=4e6) as server:
        files = [file for file in open_source(server.url).files() if file.path == "a b.safetensors"]
        nodes = NodeFiles(CacheSettings(tmp_path / "cache"))
        assert nodes.bring(files, should_stop=lambda: server.sent_bytes() > 1 << 20) is None
        assert not any(nodes.cache.content.iterdir())
        kept = nodes.cache.partial.glob("*.journal")
        assert sum(path.read_text().count("done") for path in kept) > 0
        server.bytes_per_second = None
        found = nodes.bring(files)
        assert found is not None
        assert 0 < found.source_bytes < len(DATA)


def test_urls_that_cannot_be_sources_are_told() -> None:
    refused = (
        "user:secret@server/models/",
        "user:pa/secret@server/models/",
        "user:1/secret@server/",
        "[secret@server/",
    )
    for text in ("models", "s3://", "s3://[x", *(f"https://{rest}" for rest in refused)):
        with pytest.raises(UnusableField, match=r"sources: found .*, expected ") as raised:
            checked_source("sources", text)
        assert "secret" not in str(raised.value)


def test_sources_with_a_port_or_a_revision_are_accepted() -> None:
    for text in ("http://127.0.0.1:8000/models/", "https://[::1]:8000/x", "hf://org/name@main/", "file:///a:b@c/"):
        assert checked_source("sources", text) == text


def test_a_url_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(url: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    for url, extra in (("s3://bucket/models/", "s3"), ("gs://bucket/models/", "gs"), ("hf://org/repository", "hf")):
        with pytest.raises(LibraryMissing, match=rf"{url}: the library .* `.*(scripts/setup {extra}|pip install .*)`"):
            open_source(url)
    with pytest.raises(LibraryMissing, match="no library reads nothing://; expected one of http://"):
        open_source("nothing://bucket/models/")


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(SourceFailed, match="no such folder, expected a folder of models that every node sees"):
        open_source(checked_source("sources", str(tmp_path / "nothing"))).files()
