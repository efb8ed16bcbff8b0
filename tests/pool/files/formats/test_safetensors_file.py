"""Headers of whole files read back exactly; anything less than a whole file is refused with a message that says why."""

from __future__ import annotations

import itertools
import json
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from modelpool.pool.files.formats.safetensors_file import Header, read_header
from modelpool.pool.values.core.errors import CorruptFile
from tests.pool.models.loading.tiny_checkpoint import write_tiny_lora

DTYPES = (torch.float16, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def build(tensors: dict[str, object], data: bytes, header_bytes: int | None = None) -> bytes:
    """A file with the header `tensors`, correct or not."""
    header = json.dumps(tensors).encode()
    return (len(header) if header_bytes is None else header_bytes).to_bytes(8, "little") + header + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F16") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(path: Path, content: bytes) -> Header:
    path.write_bytes(content)
    return read_header(path)


@in_one_folder
@given(st.dictionaries(names, st.tuples(shapes, st.sampled_from(DTYPES)), max_size=5), st.dictionaries(names, names))
def test_reads_what_the_reference_implementation_writes(
    tmp_path: Path, made: dict[str, tuple[tuple[int, ...], torch.dtype]], metadata: dict[str, str]
) -> None:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in made.items()}
    header = read(tmp_path / "x.safetensors", save(tensors, metadata or None))
    assert header.shapes == {name: shape for name, (shape, _) in made.items()}
    assert header.metadata == metadata
    for name, tensor in tensors.items():
        assert header.tensors[name].storage_bytes == tensor.nbytes
        assert header.tensors[name].elements == tensor.numel()


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_tiny_lora(tmp_path_factory.mktemp("whole") / "lora.safetensors", metadata={"made": "here"})
    return path.read_bytes()


@in_one_folder
@given(data=st.data())
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path, whole_file: bytes, data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(whole_file) - 1))
    with pytest.raises(CorruptFile, match=r"cut\.safetensors") as caught:
        read(tmp_path / "cut.safetensors", whole_file[:length])
    if length > 64:
        assert "truncated" in str(caught.value)
        assert str(length) in str(caught.value)


@in_one_folder
@given(extra=st.binary(min_size=1, max_size=4096))
def test_a_file_with_bytes_after_its_last_tensor_is_refused(tmp_path: Path, whole_file: bytes, extra: bytes) -> None:
    with pytest.raises(CorruptFile, match=f"too long: the file has {len(whole_file) + len(extra)} bytes"):
        read(tmp_path / "long.safetensors", whole_file + extra)


@in_one_folder
@given(data=st.data())
def test_a_damaged_header_is_refused_or_still_consistent(
    tmp_path: Path, whole_file: bytes, data: st.DataObject
) -> None:
    """Whatever a flipped byte of the header does, it is a CorruptFile or a header with tensors that fill the file."""
    header_bytes = 8 + int.from_bytes(whole_file[:8], "little")
    place = data.draw(st.integers(0, header_bytes - 1))
    damaged = bytearray(whole_file)
    damaged[place] = data.draw(st.integers(0, 255))
    try:
        header = read(tmp_path / "damaged.safetensors", bytes(damaged))
    except CorruptFile:
        return
    entries = list(header.tensors.values())
    assert entries[0].begin == header_bytes
    assert entries[-1].end == len(whole_file)
    assert all(a.end == b.begin for a, b in itertools.pairwise(entries))


FAULTS = {
    "overlap": (build({"a": entry([4], 0, 8), "b": entry([4], 4, 12)}, b"\0" * 12), "'b' overlaps tensor 'a'"),
    "gap": (build({"a": entry([4], 0, 8), "b": entry([4], 10, 18)}, b"\0" * 18), "'b' leaves a gap after tensor 'a'"),
    "late start": (build({"a": entry([4], 8, 16)}, b"\0" * 16), "'a' leaves a gap after the header"),
    "same bytes": (build({"a": entry([4], 0, 8), "b": entry([4], 0, 8)}, b"\0" * 8), "'b' overlaps tensor 'a'"),
    "wrong size": (
        build({"a": entry([5], 0, 8)}, b"\0" * 8),
        r"found 8 bytes, expected 10 bytes for F16 of shape \(5,\)",
    ),
    "part of a byte": (build({"a": entry([3], 0, 2, "F4")}, b"\0" * 2), "expected 1.5 bytes for F4"),
    "backwards": (build({"a": entry([4], 8, 0)}, b"\0" * 8), "the first not after the second"),
    "negative shape": (build({"a": entry([-4, -1], 0, 8)}, b"\0" * 8), "none negative"),
    "fractional shape": (build({"a": entry([4.0], 0, 8)}, b"\0" * 8), "whole numbers"),
    "true as a shape": (build({"a": entry([True], 0, 2)}, b"\0" * 2), "whole numbers"),
    "three offsets": (build({"a": {**entry([4], 0, 8), "data_offsets": [0, 8, 8]}}, b"\0" * 8), "two offsets"),
    "unknown type": (build({"a": entry([4], 0, 8, "F99")}, b"\0" * 8), "found dtype 'F99', expected one of BOOL, U8"),
    "no shape": (build({"a": {"dtype": "F16", "data_offsets": [0, 8]}}, b"\0" * 8), "expected dtype, shape and data"),
    "no entry": (build({"a": 7}, b""), "'a': found 7"),
    "metadata of numbers": (build({"__metadata__": {"a": 1}}, b""), "expected pairs of texts"),
    "absurd header": (build({}, b"\0" * 64, header_bytes=1 << 60), "more than the 100000000 that the format allows"),
    "no JSON": ((9).to_bytes(8, "little") + b'{"a": 1, ', "header is damaged"),
    "no text": ((4).to_bytes(8, "little") + b"{\xff\xff}", "header is damaged"),
    "deep JSON": ((200_006).to_bytes(8, "little") + b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "damaged|found"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, fault: str) -> None:
    content, message = FAULTS[fault]
    with pytest.raises(CorruptFile, match=message) as caught:
        read(tmp_path / "faulty.safetensors", content)
    assert "faulty.safetensors" in str(caught.value)


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    one = json.dumps(entry([4], 0, 8))
    header = f'{{"twin": {one}, "twin": {one}}}'.encode()
    with pytest.raises(CorruptFile, match="names 'twin' twice"):
        read(tmp_path / "twice.safetensors", len(header).to_bytes(8, "little") + header + b"\0" * 8)


OTHER_FORMATS = {
    b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.": "Python pickle",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR": "PNG image",
    b"\xff\xd8\xff\xe0\0\x10JFIF": "JPEG image",
    b"GGUF\x03\0\0\0": "GGUF file",
    b"version https://git-lfs.github.com/spec/v1\noid sha256:0": "Git LFS pointer",
    b"<!DOCTYPE html><html>": "web page",
    b'{"error": "gated repo"}': "JSON text",
    b"just some text that somebody saved": "text file",
    b"ab\x01": "only 3 bytes",
    bytes(range(200, 256)): "unknown contents beginning with c8c9cacb",
    b"": "the file is empty",
}


@pytest.mark.parametrize("content", OTHER_FORMATS)
def test_a_renamed_file_of_another_kind_is_called_by_its_name(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CorruptFile, match=OTHER_FORMATS[content]) as caught:
        read(tmp_path / "model.safetensors", content)
    assert "model.safetensors" in str(caught.value)
    assert "expected a safetensors file" in str(caught.value)


def test_a_renamed_pickle_checkpoint_is_called_by_its_name(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.zeros(3)}}, tmp_path / "model.safetensors")
    assert zipfile.is_zipfile(tmp_path / "model.safetensors")
    with pytest.raises(CorruptFile, match=r"a zip archive, which is how PyTorch writes \.ckpt"):
        read_header(tmp_path / "model.safetensors")


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"missing\.safetensors: no such file"):
        read_header(tmp_path / "missing.safetensors")
    with pytest.raises(CorruptFile, match="a folder, expected a safetensors file"):
        read_header(tmp_path)


def test_a_file_without_tensors_is_whole(tmp_path: Path) -> None:
    save_file({}, tmp_path / "none.safetensors", {"only": "words"})
    header = read_header(tmp_path / "none.safetensors")
    assert (dict(header.tensors), header.metadata) == ({}, {"only": "words"})
