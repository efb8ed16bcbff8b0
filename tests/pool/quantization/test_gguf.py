"""GGUF files open as views, and every quantized format unpacks to what the `gguf` package computes, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from pool.devices import sim
from pool.errors import CorruptFile
from pool.ops.packed import PackedWeight, stored_bytes
from pool.quantization.gguf_blocks import BLOCKS
from pool.quantization.gguf_file import GgufCodec, GgufFile

KINDS = gguf.GGMLQuantizationType
BY_PACKAGE = ("IQ4_NL", "IQ4_XS", "IQ2_S", "TQ2_0")


def blocks(kind: str, count: int = 24) -> torch.Tensor:
    """Blocks of random bytes whose float16 factors are finite."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    data = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    halves = data.reshape(count, -1).numpy().view(np.uint8)
    halves[:, 1::2] &= 0xBF  # whatever is a float16 has an exponent below that of infinity
    return torch.from_numpy(halves)


@pytest.mark.parametrize("kind", [*BLOCKS, *BY_PACKAGE])
def test_blocks_unpack_as_the_package_does(kind: str) -> None:
    data = blocks(kind)
    expected = gguf.dequantize(data.numpy(), KINDS[kind])
    assert np.isfinite(expected).all()
    values = GgufCodec(kind, data.shape[1], 1).unpack({"weight": data}, expected.shape, torch.float32)
    assert values.numpy().tobytes() == expected.tobytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with quantized and plain tensors, and a convolution whose shape ggml could not hold."""
    numbers = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "test")
    for kind in ("Q8_0", "Q4_0"):
        codes = gguf.quantize(numbers, KINDS[kind])
        writer.add_tensor(f"{kind}.weight", codes, raw_dtype=KINDS[kind])
    writer.add_tensor("conv.weight", gguf.quantize(numbers, KINDS.Q8_0), raw_dtype=KINDS.Q8_0)
    writer.add_array("comfy.gguf.orig_shape.conv.weight", [2, 4, 8, 8])
    writer.add_tensor("plain.weight", numbers)
    writer.add_tensor("half.bias", numbers[0].astype(np.float16))
    writer.add_tensor("brain.weight", gguf.quantize(numbers, KINDS.BF16), raw_dtype=KINDS.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_file_opens_as_views(path: Path) -> None:
    numbers = np.random.default_rng(3).standard_normal((8, 64)).astype(np.float32)
    opened = GgufFile.open(path)
    assert opened.metadata["general.architecture"] == "test"
    tensors = opened.tensors()
    for kind in ("Q8_0", "Q4_0"):
        weight = tensors[f"{kind}.weight"]
        assert isinstance(weight, PackedWeight)
        assert weight.shape == (8, 64)
        expected = gguf.dequantize(gguf.quantize(numbers, KINDS[kind]), KINDS[kind])
        assert torch.equal(weight.unpack(torch.float32), torch.from_numpy(expected))
        assert stored_bytes(weight) == opened.entries[f"{kind}.weight"].storage_bytes
        rows = weight[2:5]
        assert isinstance(rows, PackedWeight)
        assert torch.equal(rows.unpack(torch.float32), torch.from_numpy(expected[2:5]))
        assert rows.parts["weight"].untyped_storage().data_ptr() == weight.parts["weight"].untyped_storage().data_ptr()
    assert torch.equal(tensors["plain.weight"], torch.from_numpy(numbers))
    assert tensors["half.bias"].dtype == torch.float16
    assert tensors["brain.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors["brain.weight"], torch.from_numpy(numbers).bfloat16())


def test_a_weight_has_the_shape_that_it_was_made_from(path: Path) -> None:
    weight = GgufFile.open(path).tensor("conv.weight")
    assert isinstance(weight, PackedWeight)
    assert weight.shape == (2, 4, 8, 8)
    flat = GgufFile.open(path).tensor("Q8_0.weight")
    assert torch.equal(weight.clone().unpack(torch.float32).reshape(8, 64), flat.unpack(torch.float32))  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "IQ4_NL"])
def test_weights_unpack_on_a_simulated_device(kind: str) -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    data = blocks(kind)
    expected = torch.from_numpy(gguf.dequantize(data.numpy(), KINDS[kind]))
    there = GgufCodec(kind, data.shape[1], 1).unpack({"weight": data.to("sim:0")}, expected.shape, torch.float32)
    assert there.device.type == "sim"
    assert torch.equal(there.cpu(), expected)


@pytest.mark.parametrize("kind", BLOCKS)
def test_large_weights_unpack_bit_by_bit_in_bounded_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sim.install()
    sim.configure(0, 1 << 28)
    data = blocks(kind, 4096)
    values, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    codec, there = GgufCodec(kind, size, 1), data.to("sim:0")
    whole = codec.unpack({"weight": data}, (4096, values), torch.float16)
    monkeypatch.setattr("pool.quantization.gguf_file.CHUNK_VALUES", 1 << 15)
    before_bytes = sim.memory_stats(0).used_bytes
    sim.reset_peak(0)
    parts = codec.unpack({"weight": there}, (4096, values), torch.float16)
    assert torch.equal(parts.cpu(), whole)
    taken_bytes = sim.memory_stats(0).peak_bytes - before_bytes - parts.nbytes
    assert taken_bytes <= codec.scratch_bytes(4096 * values, torch.float16)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, path: Path) -> None:
    with pytest.raises(CorruptFile, match="no such file"):
        GgufFile.open(tmp_path / "missing.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + b"0" * 100)
    with pytest.raises(CorruptFile, match=r"other\.gguf: .*expected a whole GGUF file"):
        GgufFile.open(other)
    whole = path.read_bytes()
    for size in (0, 10, 100, len(whole) // 2, len(whole) - 64):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match=r"cut\.gguf: "):
            GgufFile.open(cut)
