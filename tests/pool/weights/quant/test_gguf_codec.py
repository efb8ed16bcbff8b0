"""Every format of ggml's unpacks to what the `gguf` package computes, bit for bit, anywhere and in bounded memory."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.weights.quant.gguf_codec import BLOCKS, GgufCodec

KINDS = gguf.GGMLQuantizationType
BY_PACKAGE = ("IQ4_NL", "IQ4_XS", "IQ2_S", "TQ2_0")


def blocks(kind: str, count: int = 24) -> torch.Tensor:
    """Blocks of random bytes with finite float16 factors."""
    _, size = gguf.GGML_QUANT_SIZES[KINDS[kind]]
    data = torch.randint(0, 256, (count, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    halves = data.reshape(count, -1).numpy().view(np.uint8)
    halves[:, 1::2] &= 0xBF  # whatever is a float16 has a smaller exponent than infinity
    return torch.from_numpy(halves)


@pytest.mark.parametrize("kind", [*BLOCKS, *BY_PACKAGE])
def test_blocks_unpack_as_the_package_does(kind: str) -> None:
    data = blocks(kind)
    expected = gguf.dequantize(data.numpy(), KINDS[kind])
    assert np.isfinite(expected).all()
    values = GgufCodec(kind, data.shape[1], 1).unpack({"weight": data}, expected.shape, torch.float32)
    assert values.numpy().tobytes() == expected.tobytes()


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
    monkeypatch.setattr("modelpool.pool.weights.quant.gguf_codec.CHUNK_VALUES", 1 << 15)
    before_bytes = sim.memory_stats(0).used_bytes
    sim.reset_peak(0)
    parts = codec.unpack({"weight": there}, (4096, values), torch.float16)
    assert torch.equal(parts.cpu(), whole)
    taken_bytes = sim.memory_stats(0).peak_bytes - before_bytes - parts.nbytes
    assert taken_bytes <= codec.scratch_bytes(4096 * values, torch.float16)
