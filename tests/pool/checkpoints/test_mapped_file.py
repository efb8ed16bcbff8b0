"""Mapped tensors are the file's bytes: equal to what the reference implementation loads, views, and never written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pool.checkpoints.mapped_file import MappedFile, NonFinite, check_finite, find_non_finite
from pool.errors import CorruptFile
from tests.pool.checkpoints.tiny_checkpoint import write_tiny_checkpoint, write_tiny_lora

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
    assert found == {"half": NonFinite("half", 2, 3), "eighth": NonFinite("eighth", 1, 2)}
    assert find_non_finite(mapped, ["good", "double"]) == ()
    with pytest.raises(CorruptFile, match=r"bad\.safetensors: 2 tensors .* half \(2 of 3\)"):
        check_finite(mapped)


def test_a_finite_checkpoint_passes_the_check(tmp_path: Path) -> None:
    check_finite(MappedFile.open(write_tiny_lora(tmp_path / "lora.safetensors")))
