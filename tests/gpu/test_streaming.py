"""Streams, pinned memory and attention kernels on a real CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from modelpool.pool.devices.capabilities import detect_capabilities
from modelpool.pool.devices.device_kinds import DeviceKind, prepare_allocator
from modelpool.pool.devices.transfer_pipeline import TransferPipeline
from modelpool.pool.devices.uploads import StreamingUploader
from modelpool.pool.weights.ops.attention import attention_priority, use_attention_kernels
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from tests.pool.zoo import build, store_in

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def mapped(path: Path, size_bytes: int, shared: bool) -> torch.Tensor:
    """Bytes of a mapped file; weights are in private mappings."""
    path.write_bytes(bytes(range(256)) * (size_bytes // 256))
    return torch.from_file(str(path), shared=shared, size=size_bytes, dtype=torch.uint8)


def test_copies_are_exact_however_they_go(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    for pin in (False, True):
        file = mapped(tmp_path / "weights", 200 * MIB, shared=pin)
        hosts = [file[begin : begin + 40 * MIB] for begin in range(0, 200 * MIB, 40 * MIB)]
        with TransferPipeline.open(device, ahead_bytes=100 * MIB) as pipeline:
            if pin:
                pipeline.pin(file)  # may be refused; then it goes through the ring
            uploader = pipeline.uploader()
            for host in hosts * 4:
                assert torch.equal(uploader.upload(host).cpu(), host)
            assert isinstance(uploader, StreamingUploader)
            assert uploader.hits > uploader.misses
            uploader.close()
            torch.cuda.synchronize()


def test_memory_is_not_reused_while_it_is_read() -> None:
    """Long products keep the compute stream behind while copies run ahead into memory that was freed."""
    device = torch.device("cuda", 0)
    hosts = [torch.full((4 * MIB,), float(value)) for value in range(8)]
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    with TransferPipeline.open(device, ahead_bytes=64 * MIB) as pipeline:
        uploader = pipeline.uploader()
        for host in hosts * 6:
            weight = uploader.upload(host)
            busy @ busy  # to be late
            sums.append(weight.double().mean())
            del weight
        uploader.close()
        torch.cuda.synchronize()
    assert [float(s) for s in sums] == [float(value) for value in range(8)] * 6


def test_memory_is_not_unmapped_while_it_is_read() -> None:
    """The allocator unmaps freed memory of segments that grow after waiting only for the stream that it belongs to."""
    device = torch.device("cuda", 0)
    prepare_allocator(DeviceKind.CUDA)
    torch.cuda.empty_cache()
    hosts = [torch.full((8 * MIB,), float(value)) for value in range(4)]
    busy = torch.randn(8192, 8192, device=device)
    sums = []
    with TransferPipeline.open(device, ahead_bytes=64 * MIB) as pipeline:
        uploader = pipeline.uploader()
        for host in hosts * 4:
            weight = uploader.upload(host)
            busy @ busy  # to be late
            sums.append(weight.double().mean())
            del weight
            torch.cuda.empty_cache()
        uploader.close()
        torch.cuda.synchronize()
    assert [float(s) for s in sums] == [float(value) for value in range(4)] * 4


@pytest.mark.parametrize("family", ["unet", "sd35", "wan", "vae", "clip"])
def test_a_streamed_model_equals_the_resident_one(family: str) -> None:
    device = torch.device("cuda", 0)
    case = build(family, torch.float16)
    resident = build(family, torch.float16)
    resident.module.to(device)
    expected = resident.run(device)
    store_in(case.module, torch.float16)
    swap_to_casting(case.module)
    with TransferPipeline.open(device, ahead_bytes=MIB) as pipeline:
        uploader = pipeline.uploader()
        for _ in range(3):
            with compute(device, torch.float32, uploader=uploader):
                found = case.run(device)
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        uploader.close()


def test_attention_kernels_in_the_wanted_order() -> None:
    device = torch.device("cuda", 0)
    capabilities = detect_capabilities(DeviceKind.CUDA)
    q = torch.randn(1, 4, 128, 64, device=device, dtype=torch.float16)
    expected = nn.functional.scaled_dot_product_attention(q.float(), q.float(), q.float())
    priority = attention_priority(capabilities)
    for first in range(len(priority)):
        with use_attention_kernels(priority[first:]):
            found = nn.functional.scaled_dot_product_attention(q, q, q)
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
