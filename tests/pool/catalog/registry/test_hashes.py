"""The hashes are the hashes of the bytes that Civitai and A1111 take, however the file is cut into reads."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from modelpool.pool.catalog.registry import hashes
from modelpool.pool.catalog.registry.hashes import FileHashes, as_digits, hash_file
from modelpool.pool.values.core.errors import CorruptFile

MIB = 1 << 20


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("chunk_bytes", [8 * MIB, MIB, 65_537, 1000])
@pytest.mark.parametrize("file_bytes", [0, 5, MIB, MIB + 1, MIB + 70_000, 3 * MIB + 17])
def test_each_hash_is_of_its_own_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, file_bytes: int
) -> None:
    monkeypatch.setattr(hashes, "CHUNK_BYTES", chunk_bytes)
    content = (struct.pack("<Q", 1_100_000) + bytes(range(256)) * (file_bytes // 256 + 1))[:file_bytes]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    read: list[int] = []
    found = hash_file(path, with_data=True, on_bytes=read.append)
    assert found.sha256 == sha256(content)
    assert found.autov2 == sha256(content)[:10]
    assert found.autov1 == (sha256(content[MIB : MIB + 65_536])[:8] if file_bytes > MIB else "")
    if file_bytes >= 8:
        assert found.autov3 == sha256(content[8 + 1_100_000 :])[:12]
    assert sum(read) == file_bytes


def test_editing_the_header_keeps_autov3_alone(tmp_path: Path) -> None:
    """The reason why LoRAs are known by it."""
    data = bytes(2 * MIB)
    found = []
    for header in (b"{}", b'{"__metadata__":{"a":"b"}}'):
        path = tmp_path / "a.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + data)
        found.append(hash_file(path, with_data=True))
    assert found[0].autov3 == found[1].autov3 == sha256(data)[:12]
    assert found[0].sha256 != found[1].sha256


def test_what_is_no_safetensors_file_has_no_autov3(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\xff" * 100)
    assert hash_file(path, with_data=True) == FileHashes(sha256(b"\xff" * 100))
    assert hash_file(path, with_data=False).autov3 == ""


HASHES = FileHashes("0123456789abcdef" * 4, "fedcba98", "fedcba9876543210" * 4)


@pytest.mark.parametrize(
    ("name", "matches_digits"),
    [
        ("0123456789", True),
        ("0123456789ABCDEF" * 4, True),
        ("0123456789ab", True),
        ("FEDCBA98", True),
        ("fedcba987654", True),
        ("fedcba9876543210" * 4, True),
        ("01234567", False),
        ("fedcba9876", False),
        ("012345678", False),
        ("0123456789ab0", False),
        ("shapes", False),
        ("", False),
    ],
)
def test_a_file_is_called_by_each_of_its_hashes(name: str, matches_digits: bool) -> None:
    digits = as_digits(name)
    assert (digits is not None and HASHES.matches_digits(digits)) is matches_digits


@given(st.text(max_size=70))
def test_no_text_is_called_a_hash_without_being_one(text: str) -> None:
    digits = as_digits(text)
    if digits is not None:
        assert int(digits, 16) >= 0
        assert len(digits) in (8, 10, 12, 64)


def test_a_hash_that_is_not_known_is_not_called(tmp_path: Path) -> None:
    """An empty AutoV1 must not be what an empty name means."""
    assert not FileHashes("ab" * 32).matches_digits("")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"gone: no such file"):
        hash_file(tmp_path / "gone", with_data=False)


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CorruptFile, match=r"pipe\.safetensors: not a regular file"):
        hash_file(tmp_path / "pipe.safetensors", with_data=True)
