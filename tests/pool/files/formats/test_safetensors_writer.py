"""Files are written tensor after tensor, and are what the safetensors library and our own strict reader read back.

Proves: names, types, shapes, bytes, order and metadata of any tensors come back; no tensor begins where its type may
not; a failure at any byte leaves nothing, and what was there before as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from modelpool.pool.files.formats.safetensors_file import DTYPE_BITS, read_header, stored_bytes
from modelpool.pool.files.formats.safetensors_writer import TensorToWrite, write_safetensors
from modelpool.pool.values.core.errors import OutputFailed, UnusableField
from tests.full_disk import full_after

#: types that the library's torch side reads
_READ_BY_TORCH = ("BOOL", "U8", "I8", "F8_E4M3", "I16", "F16", "BF16", "F32", "I64", "F64")
_TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), max_size=12)


@st.composite
def planned(draw: st.DrawFn) -> tuple[TensorToWrite, bytes]:
    dtype = draw(st.sampled_from(_READ_BY_TORCH))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    size = math.prod(shape) * DTYPE_BITS[dtype] // 8
    data = draw(st.binary(min_size=size, max_size=size))
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    cut = draw(st.integers(0, size))
    return TensorToWrite("", dtype, shape, lambda: (data[:cut], memoryview(data)[cut:])), data


@settings(max_examples=60)
@given(st.dictionaries(_TEXTS.filter(lambda n: n != "__metadata__"), planned()), st.dictionaries(_TEXTS, _TEXTS))
def test_what_is_written_is_read_back(
    tensors: dict[str, tuple[TensorToWrite, bytes]], metadata: dict[str, str]
) -> None:
    plan = [TensorToWrite(name, t.dtype, t.shape, t.blocks) for name, (t, _) in tensors.items()]
    told: list[int] = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        file_bytes = write_safetensors(path, plan, metadata, on_bytes=told.append)
        assert file_bytes == path.stat().st_size
        assert sum(told) == sum(len(data) for _, data in tensors.values())
        header = read_header(path)
        assert header.metadata == metadata
        assert {n: (e.dtype, e.shape) for n, e in header.tensors.items()} == {t.name: (t.dtype, t.shape) for t in plan}
        for name, (_, data) in tensors.items():
            assert stored_bytes(header, name) == data
            assert header.tensors[name].begin % (DTYPE_BITS[header.tensors[name].dtype] // 8) == 0
        with safe_open(path, "pt") as opened:
            assert sorted(opened.keys()) == sorted(tensors)
            assert (opened.metadata() or {}) == metadata
            for name, (t, data) in tensors.items():
                assert tuple(opened.get_tensor(name).shape) == t.shape
                assert opened.get_tensor(name).nbytes == len(data)


def of(name: str, dtype: str, count: int) -> TensorToWrite:
    return TensorToWrite(name, dtype, (count,), lambda: [bytes(count * DTYPE_BITS[dtype] // 8)])


def test_the_order_is_kept_where_types_may_begin_there(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "kept.safetensors", [of("b", "F16", 4), of("a", "F32", 2), of("c", "U8", 3)])
    assert list(read_header(tmp_path / "kept.safetensors").tensors) == ["b", "a", "c"]
    write_safetensors(tmp_path / "moved.safetensors", [of("c", "U8", 3), of("b", "F16", 4), of("a", "F32", 2)])
    assert list(read_header(tmp_path / "moved.safetensors").tensors) == ["a", "b", "c"]


def test_two_of_a_name_and_metadata_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableField, match="occurs twice"):
        write_safetensors(tmp_path / "a.safetensors", [of("a", "U8", 1), of("a", "U8", 1)])
    with pytest.raises(UnusableField, match=r"metadata 'n': found 3"):
        write_safetensors(tmp_path / "a.safetensors", [], {"n": 3})  # type: ignore[dict-item]
    with pytest.raises(UnusableField, match="found type 'F12'"):
        write_safetensors(tmp_path / "a.safetensors", [TensorToWrite("a", "F12", (1,), list)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("room_bytes", [0, 100, 9000])
def test_a_full_disk_leaves_nothing_and_what_was_there(tmp_path: Path, room_bytes: int) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    with full_after(room_bytes), pytest.raises(OutputFailed, match=r"a\.safetensors: cannot be written: File too"):
        write_safetensors(path, [of(str(i), "F32", 1000) for i in range(4)], overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]
    assert path.read_bytes() == b"before"


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[bytes]:
        yield b"abc"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path / "a.safetensors", [TensorToWrite("a", "U8", (9,), interrupted)])
    assert not list(tmp_path.iterdir())


def test_a_taken_place_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    def never() -> list[bytes]:
        raise AssertionError("asked for bytes")

    path = tmp_path / "a.safetensors"
    path.write_bytes(b"before")
    with pytest.raises(OutputFailed, match="already exists"):
        write_safetensors(path, [TensorToWrite("a", "U8", (1,), never)])
    with pytest.raises(OutputFailed, match="there is no folder"):
        write_safetensors(tmp_path / "no" / "a.safetensors", [])
    (tmp_path / "d").mkdir()
    with pytest.raises(OutputFailed, match="is a folder"):
        write_safetensors(tmp_path / "d", [], overwrite=True)
    assert path.read_bytes() == b"before"


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "a.safetensors"
    target.write_bytes(b"kept")
    path.symlink_to(target)
    write_safetensors(path, [of("a", "U8", 1)], overwrite=True)
    assert target.read_bytes() == b"kept"
    assert not path.is_symlink()
