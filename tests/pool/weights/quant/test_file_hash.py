"""Hashes are the hashes of the file's bytes; that of several files is made of theirs, whoever hashes them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.weights.quant.file_hash import file_sha256, weights_sha256


def test_hashes_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1_000_003)
    assert file_sha256(path) == weights_sha256(path) == hashlib.sha256(b"abc" * 1_000_003).hexdigest()


def test_of_an_index_each_part_is_hashed_once_in_order_and_the_index_is_not(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}))
    asked = []

    def hash_file(path: str) -> str:
        asked.append(Path(path).name)
        return f"<{asked[-1]}>"

    found = weights_sha256(index, hash_file)
    assert asked == ["1.safetensors", "2.safetensors"]
    assert found == hashlib.sha256(b"1.safetensors <1.safetensors>\n2.safetensors <2.safetensors>\n").hexdigest()


@pytest.mark.parametrize(("name", "complaint"), [("gone.safetensors", "no such file"), (".", "a folder")])
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(CorruptFile, match=complaint):
        file_sha256(tmp_path / name)
