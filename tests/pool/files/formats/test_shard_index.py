"""Several files and their index are one checkpoint; an index that does not fit its files, or leads elsewhere, is
refused by the name of what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modelpool.pool.files.formats.shard_index import is_index
from modelpool.pool.files.formats.weights_file import files_of
from modelpool.pool.models.loading.file_parts import byte_ranges
from modelpool.pool.models.loading.weights_header import read_weights_header
from modelpool.pool.values.core.errors import CorruptFile, UnsafeFile
from modelpool.pool.values.core.file_part import FilePart
from modelpool.pool.weights.quant.file_hash import file_sha256, weights_sha256
from modelpool.pool.weights.quant.mapped_file import MappedFile, find_non_finite

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
TENSORS = {
    FIRST: {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4.0).half()},
    SECOND: {"c": torch.arange(5.0).bfloat16()},
}


def write(
    folder: Path, tensors: Mapping[str, Mapping[str, torch.Tensor]] = TENSORS, places: Mapping[str, Any] | None = None
) -> Path:
    """Shards and the index that fits them, or one that says `places`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in tensors.items():
        save_file(dict(own), folder / name, {"format": "pt", "shard": name})
    right = {key: name for name, own in tensors.items() for key in own}
    index = {"metadata": {"total_size": 42}, "weight_map": right if places is None else places}
    (folder / INDEX).write_text(json.dumps(index))
    return folder / INDEX


def test_shards_are_read_as_one_file(tmp_path: Path) -> None:
    index = write(tmp_path)
    mapped = MappedFile.open(index)
    expected = {key: tensor for own in TENSORS.values() for key, tensor in own.items()}
    assert {key: tuple(t.shape) for key, t in expected.items()} == mapped.header.shapes
    assert all(torch.equal(mapped.tensor(key), tensor) for key, tensor in expected.items())
    assert mapped.header.path == str(index)
    assert mapped.header.files == {str(tmp_path / n): (tmp_path / n).stat().st_size for n in (FIRST, SECOND)}
    assert mapped.header.file_bytes == sum(mapped.header.files.values())
    assert mapped.header.metadata == {"format": "pt"}, "what the shards agree on"
    assert mapped.header.path_of("c") == str(tmp_path / SECOND)
    assert find_non_finite(mapped) == ()


def test_tensors_are_views_of_their_own_files(tmp_path: Path) -> None:
    tensors = MappedFile.open(write(tmp_path)).tensors()
    storages = {key: tensor.untyped_storage().data_ptr() for key, tensor in tensors.items()}
    assert storages["a"] == storages["b"] != storages["c"]


def test_byte_ranges_name_the_files(tmp_path: Path) -> None:
    ranges = byte_ranges(FilePart(str(write(tmp_path))))
    assert set(ranges) == {str(tmp_path / FIRST), str(tmp_path / SECOND)}
    assert all(end == (Path(path).stat().st_size) for path, ((_, end),) in ranges.items())


def test_models_with_equal_indexes_have_hashes_of_their_own(tmp_path: Path) -> None:
    """A model and what was trained from it: the same keys in the same files, so the same index."""
    one = write(tmp_path / "one")
    other = write(tmp_path / "other", {**TENSORS, SECOND: {"c": torch.ones(5).bfloat16()}})
    again = Path(shutil.copytree(tmp_path / "one", tmp_path / "again")) / INDEX
    assert file_sha256(one) == file_sha256(other)
    assert weights_sha256(one) == weights_sha256(again) != weights_sha256(other)
    assert weights_sha256(tmp_path / "one" / FIRST) == file_sha256(tmp_path / "one" / FIRST)
    assert files_of(one) == tuple(str(tmp_path / "one" / name) for name in (INDEX, FIRST, SECOND))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (INDEX, True),
        ("diffusion_pytorch_model.safetensors.fp16.index.json", True),
        ("model.safetensors.index.fp16.json", True),
        ("pytorch_model.bin.index.json", True),
        ("model_index.json", False),
        ("model.safetensors", False),
        ("config.json", False),
    ],
)
def test_an_index_is_known_by_its_name(name: str, expected: bool) -> None:
    assert is_index(f"some/folder.index/{name}") is expected


RIGHT = {"a": FIRST, "b": FIRST, "c": SECOND}
FAULTS: dict[str, tuple[object, str]] = {
    "a missing shard": ({**RIGHT, "d": "model-3.safetensors"}, r"model-3\.safetensors: no such file"),
    "a tensor that is nowhere": ({**RIGHT, "d": FIRST}, "tensor 'd' is not in .*00001.*: it is in none"),
    "a tensor elsewhere": ({**RIGHT, "b": SECOND}, "tensor 'b' is not in .*00002.*: it is in model-00001"),
    "a tensor that is not listed": ({"a": FIRST, "c": SECOND}, "tensor 'b' of model-00001.* is not in the index"),
    "no tensors": ({}, r"weight_map is \{\}, expected the file of each tensor"),
    "a list": ([FIRST], "weight_map is "),
    "a number for a file": ({**RIGHT, "a": 7}, "names the file 7, expected a text"),
}
ESCAPES = ("../x.safetensors", "/etc/passwd", "..", "sub/x.safetensors", "a\\b.safetensors", "C:x", "", "x\0y", "./x")


@pytest.mark.parametrize("fault", FAULTS)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, fault: str) -> None:
    places, message = FAULTS[fault]
    with pytest.raises(CorruptFile, match=message):
        read_weights_header(write(tmp_path, places=places))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ESCAPES)
def test_an_index_names_files_of_its_own_folder_only(tmp_path: Path, name: str) -> None:
    save_file({"d": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UnsafeFile, match=r"index\.json: names .*, expected the name of a file in the same folder"):
        read_weights_header(write(tmp_path / "model", places={**RIGHT, "d": name}))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = {FIRST: TENSORS[FIRST], SECOND: {**TENSORS[SECOND], "a": torch.zeros(2)}}
    with pytest.raises(CorruptFile, match=r"tensor 'a' is in model-00001.* and in model-00002.*, expected it once"):
        read_weights_header(write(tmp_path, tensors, RIGHT))


def test_a_shard_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    index = write(tmp_path / "model")
    (tmp_path / "model" / SECOND).rename(tmp_path / "secret")
    (tmp_path / "model" / SECOND).symlink_to(tmp_path / "secret")
    with pytest.raises(UnsafeFile, match=rf"{SECOND}: a link that leads to .*secret, expected a file in"):
        read_weights_header(index)


def test_shards_in_the_cache_of_the_hub_are_links_and_read(tmp_path: Path) -> None:
    repository = tmp_path / "models--someone--something"
    index = write(repository / "snapshots" / "abc" / "unet")
    (repository / "blobs").mkdir()
    for number, name in enumerate((FIRST, SECOND, INDEX)):
        (index.parent / name).rename(repository / "blobs" / str(number))
        (index.parent / name).symlink_to(Path("../../../blobs") / str(number))
    assert set(read_weights_header(index).tensors) == {"a", "b", "c"}
    (index.parent / SECOND).unlink()
    (index.parent / SECOND).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFile, match="elsewhere"):
        read_weights_header(index)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"weight_map": {"a": "x", "a": "y"}}', b'{"weight_map"', b"\xff"])
def test_a_damaged_index_is_refused(tmp_path: Path, text: bytes) -> None:
    index = write(tmp_path)
    index.write_bytes(text)
    with pytest.raises(CorruptFile, match=r"model\.safetensors\.index\.json"):
        MappedFile.open(index)


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    index = write(tmp_path)
    content = (tmp_path / SECOND).read_bytes()
    (tmp_path / SECOND).write_bytes(content[:-1])
    with pytest.raises(CorruptFile, match=f"{SECOND}: truncated"):
        MappedFile.open(index)


def test_shards_that_are_pickles_need_to_be_allowed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model-1.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-1.bin"}}))
    with pytest.raises(UnsafeFile, match=r"pytorch_model-1\.bin: a PyTorch pickle"):
        MappedFile.open(index)
    assert torch.equal(MappedFile.open(index, allow_pickle=True).tensor("a"), torch.ones(2))
