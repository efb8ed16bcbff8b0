"""Hashes are those of the file's bytes, whatever the cache holds; an unchanged file is not read twice."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from pool.checkpoints import file_hash
from pool.checkpoints.file_hash import CACHE_FILE, SETTLED_NANOSECONDS, file_sha256
from pool.errors import CorruptFile

#: a file that has not changed for long, so that its hash is remembered
OLD_FILE = os.path.realpath(os.__file__)


def sha256(path: str | Path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_hashes_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1_000_003)
    assert file_sha256(path, tmp_path / "cache") == sha256(path)


def test_an_unchanged_file_is_not_read_again(tmp_path: Path) -> None:
    """The record is believed: a digest planted in it comes back."""
    file_sha256(OLD_FILE, tmp_path)
    records = json.loads((tmp_path / CACHE_FILE).read_text())
    assert records[OLD_FILE]["sha256"] == sha256(OLD_FILE)
    records[OLD_FILE]["sha256"] = "ab" * 32
    (tmp_path / CACHE_FILE).write_text(json.dumps(records))
    assert file_sha256(OLD_FILE, tmp_path) == "ab" * 32


def test_a_file_rewritten_at_once_with_equal_size_and_time_gets_its_own_hash(tmp_path: Path) -> None:
    """Unpacked archives give different files equal modification times, and a rewrite can fall into one clock tick."""
    path = tmp_path / "file"
    for content in (b"first", b"other", b"third"):
        path.write_bytes(content)
        os.utime(path, (1_000_000, 1_000_000))
        assert file_sha256(path, tmp_path / "cache") == hashlib.sha256(content).hexdigest()


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a tick of its file system's clock it could change again and look the same."""
    path, cache = tmp_path / "file", tmp_path / "cache"
    path.write_bytes(b"new")
    changed = path.stat().st_ctime_ns
    monkeypatch.setattr(file_hash.time, "time_ns", lambda: changed + SETTLED_NANOSECONDS)
    file_sha256(path, cache)
    assert not (cache / CACHE_FILE).exists()
    monkeypatch.setattr(file_hash.time, "time_ns", lambda: changed + SETTLED_NANOSECONDS + 1)
    file_sha256(path, cache)
    assert os.path.realpath(path) in json.loads((cache / CACHE_FILE).read_text())


def test_a_record_of_another_state_of_the_file_is_ignored(tmp_path: Path) -> None:
    file_sha256(OLD_FILE, tmp_path)
    records = json.loads((tmp_path / CACHE_FILE).read_text())
    for place in range(len(records[OLD_FILE]["fingerprint"])):
        changed = json.loads(json.dumps(records))
        changed[OLD_FILE]["fingerprint"][place] += 1
        changed[OLD_FILE]["sha256"] = "cd" * 32
        (tmp_path / CACHE_FILE).write_text(json.dumps(changed))
        assert file_sha256(OLD_FILE, tmp_path) == sha256(OLD_FILE)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"%s": 3}', '{"%s": {}}', '{"%s": {"sha256": 3}}', "\udcff"])
def test_a_damaged_cache_is_ignored_and_replaced(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / CACHE_FILE
    cache.write_bytes(damage.replace("%s", OLD_FILE).encode("utf-8", "surrogateescape"))
    assert file_sha256(OLD_FILE, tmp_path) == sha256(OLD_FILE)
    assert json.loads(cache.read_text())[OLD_FILE]["sha256"] == sha256(OLD_FILE)
    assert os.listdir(tmp_path) == [CACHE_FILE], "no temporary file stays behind"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    occupied = tmp_path / "cache"
    occupied.write_text("a file where the folder should be")
    assert file_sha256(OLD_FILE, occupied) == sha256(OLD_FILE)
    assert occupied.read_text() == "a file where the folder should be"


def test_the_cache_is_in_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file_sha256(OLD_FILE)
    assert (tmp_path / "modelpool" / CACHE_FILE).is_file()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"gone\.safetensors: cannot be read"):
        file_sha256(tmp_path / "gone.safetensors", tmp_path)
