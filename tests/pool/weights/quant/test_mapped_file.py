"""Mapped tensors are the file's bytes: equal to what the reference implementation loads, views, and never written."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from modelpool.pool.files.formats.page_cache import advise_willneed, in_memory
from modelpool.pool.files.formats.safetensors_file import read_header
from modelpool.pool.values.core.errors import CorruptFile
from modelpool.pool.weights.quant.mapped_file import MappedFile, NonFinite, check_finite, find_non_finite
from tests.actors.cold_file import PAGE, cold, resident_pages
from tests.pool.models.loading.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora

DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def test_every_type_reads_as_the_reference_implementation_reads_it(tmp_path: Path) -> None:
    numbers = torch.arange(24).reshape(2, 3, 4)
    path = tmp_path / "types.safetensors"
    save_file({str(dtype): numbers.to(dtype) for dtype in DTYPES} | {"scalar": torch.tensor(2.5)}, path)
    mapped = MappedFile.open(path)
    for name, expected in load_file(path).items():
        tensor = mapped.tensor(name)
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor.view(torch.uint8) if tensor.dim() else tensor, _bytes(expected))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


def test_tensors_are_views_of_one_mapping(tmp_path: Path) -> None:
    mapped = MappedFile.open(write_tiny_checkpoint(tmp_path / "tiny.safetensors"))
    tensors = mapped.tensors()
    assert set(tensors) == set(mapped.header.tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(storages) == 1
    start = storages.pop()
    for name, tensor in tensors.items():
        assert tensor.data_ptr() - start == mapped.header.tensors[name].begin


def test_a_view_outlives_the_mapped_file(tmp_path: Path) -> None:
    path = write_tiny_lora(tmp_path / "lora.safetensors")
    expected = load_file(path)
    tensors = dict(MappedFile.open(path).tensors())
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


def test_writing_to_a_view_does_not_reach_the_file(tmp_path: Path) -> None:
    path = write_tiny_lora(tmp_path / "lora.safetensors")
    before = path.read_bytes()
    mapped = MappedFile.open(path)
    for tensor in mapped.tensors().values():
        tensor.zero_()
    assert path.read_bytes() == before


def test_a_tensor_at_an_odd_byte_is_copied_and_right(tmp_path: Path) -> None:
    """The format allows any alignment; torch does not."""
    values = torch.tensor([1.5, -2.25, 3.0], dtype=torch.float32)
    header = json.dumps(
        {
            "one": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "odd": {"dtype": "F32", "shape": [3], "data_offsets": [1, 13]},
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + values.numpy().tobytes())
    mapped = MappedFile.open(path)
    assert torch.equal(mapped.tensor("odd"), values)
    assert mapped.tensor("one").tolist() == [7]


def test_a_type_without_torch_numbers_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    header = b'{"six": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}'
    path = tmp_path / "six.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0\0")
    with pytest.raises(CorruptFile, match="'six' has type F6_E2M3"):
        MappedFile.open(path).tensor("six")


def test_non_finite_numbers_are_found_and_counted(tmp_path: Path) -> None:
    weights = {
        "good": torch.ones(3, 3),
        "half": torch.tensor([1.0, float("inf"), float("-inf")], dtype=torch.float16),
        "eighth": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn),
        "double": torch.tensor([1e300], dtype=torch.float64),
        "whole": torch.tensor([1, 2]),
        "none": torch.zeros(0),
    }
    path = tmp_path / "bad.safetensors"
    save_file(weights, path)
    mapped = MappedFile.open(path)
    found = {f.name: f for f in find_non_finite(mapped)}
    assert found == {"half": NonFinite("half", 2, 3, undefined=0), "eighth": NonFinite("eighth", 1, 2, undefined=1)}
    assert find_non_finite(mapped, ["good", "double"]) == ()
    with pytest.raises(CorruptFile, match=r"bad\.safetensors: 2 tensors .* half \(2 of 3\)"):
        check_finite(mapped)


def test_a_finite_checkpoint_passes_the_check(tmp_path: Path) -> None:
    check_finite(MappedFile.open(write_tiny_lora(tmp_path / "lora.safetensors")))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="how Linux counts the memory of mappings")
def test_a_file_larger_than_the_machine_is_mapped(tmp_path: Path) -> None:
    """Linux refuses a private mapping that is larger than its memory and swap unless it is asked not to reserve any."""
    path = tmp_path / "large.safetensors"
    size_bytes = 4 * psutil.virtual_memory().total + psutil.swap_memory().total
    header = json.dumps({"large": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    try:
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size_bytes)
    except OSError:
        pytest.skip("this file system has no files of that size")
    tensor = MappedFile.open(path).tensor("large")
    assert (tensor.shape, int(tensor[-1])) == ((size_bytes,), 0)
    tensor[0] = 7
    with path.open("rb") as file:
        file.seek(8 + len(header))
        assert file.read(1) == b"\0", "written to the mapping alone"


def test_a_file_that_changed_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    """Views beyond the end of a file would end the process when they are read."""
    path = write_tiny_lora(tmp_path / "lora.safetensors")
    header = read_header(path)
    os.truncate(path, header.file_bytes - 1)
    with pytest.raises(CorruptFile, match=rf"lora\.safetensors: changed while .*: {header.file_bytes} bytes, then"):
        MappedFile.of(header)


def test_a_pipe_and_other_things_that_are_no_files_are_refused_at_once(tmp_path: Path) -> None:
    """Opening a pipe waits for somebody to write to it."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "circle.safetensors").symlink_to(tmp_path / "circle.safetensors")
    for place in (tmp_path / "pipe.safetensors", "/dev/zero"):
        with pytest.raises(CorruptFile, match="not a regular file, expected a safetensors file"):
            MappedFile.open(place)
    for place in (tmp_path / "circle.safetensors", "x" * 5000, "a\0b"):
        with pytest.raises(CorruptFile):
            MappedFile.open(place)


@pytest.mark.parametrize("aligned", [True, False])
def test_blocks_of_numbers_are_the_tensor(tmp_path: Path, aligned: bool) -> None:
    values = torch.arange(1000, dtype=torch.float32)
    header = json.dumps({"w": {"dtype": "F32", "shape": [10, 100], "data_offsets": [0, 4000]}}).encode()
    header += b" " * (-len(header) % 8 + (0 if aligned else 1))
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    mapped = MappedFile.open(path)
    blocks = list(mapped.numbers("w", 333))
    assert [len(block) for block in blocks] == [83] * 12 + [4]
    assert torch.equal(torch.cat(blocks), values)


def test_looking_for_non_finite_numbers_makes_no_copy_of_the_file(tmp_path: Path) -> None:
    """At an odd byte, where a view is not to be had. Blocks are of 4 MiB."""
    size = 40 << 20
    header = json.dumps({"w": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    header += b" " * (1 - len(header) % 2)
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    mapped = MappedFile.open(path)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        assert find_non_finite(mapped) == ()
    largest = max(abs(event.cpu_memory_usage) for event in seen.events() or [])
    assert 0 < largest < size // 2


def test_reading_ahead_brings_the_wanted_tensors_into_memory(tmp_path: Path) -> None:
    """And leaves distant bytes on the disk. How far it reads ahead is the system's affair: a disk with 8 MiB of
    read-ahead gave 16 MiB and somewhat more."""
    sizes = {"a": 16 << 20, "b": 16 << 20, "c": 96 << 20, "d": 16 << 20}
    path = tmp_path / "two.safetensors"
    save_file({name: torch.ones(size, dtype=torch.uint8) for name, size in sizes.items()}, path)
    cold(path)
    mapped = MappedFile.open(path)
    mapped.prefetch(["b"])
    entries = mapped.header.tensors
    deadline = time.monotonic() + 60
    while not resident_pages(path)[entries["b"].begin // PAGE : entries["b"].end // PAGE].all():
        assert time.monotonic() < deadline, "the system did not do as it was asked"
        time.sleep(0.01)
    is_far_read = bool(resident_pages(path)[entries["d"].begin // PAGE + 1 :].any())
    assert not is_far_read


def test_what_is_in_memory_is_told_from_what_is_not(tmp_path: Path) -> None:
    """By a look at some of the bytes; a part of a file is no file."""
    path = tmp_path / "one.safetensors"
    save_file({"a": torch.ones(64 << 20, dtype=torch.uint8)}, path)
    half, all_of_it = ((0, 32 << 20),), ((0, 32 << 20), (48 << 20, 64 << 20))
    cold(path)
    assert not in_memory(str(path), half)
    advise_willneed(str(path), half)
    deadline = time.monotonic() + 60
    while not in_memory(str(path), half):
        assert time.monotonic() < deadline, "the system did not do as it was asked"
        time.sleep(0.01)
    assert not in_memory(str(path), all_of_it)


def test_a_file_that_is_gone_is_left_to_who_reads_it(tmp_path: Path) -> None:
    mapped = MappedFile.open(write_tiny_checkpoint(tmp_path / "tiny.safetensors"))
    (tmp_path / "tiny.safetensors").unlink()
    mapped.prefetch()
    for thread in threading.enumerate():
        if thread.name == "read ahead":
            thread.join(60)
            assert not thread.is_alive()
    assert all(bool(tensor.isfinite().all()) for tensor in mapped.tensors().values() if tensor.is_floating_point())
