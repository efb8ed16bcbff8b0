"""The account of a real CUDA device, and the facts found of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from modelpool.pool.devices.capabilities import default_device_kind
from modelpool.pool.devices.detection import capabilities_here, detect
from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.devices.nvml import find_nvml, read_nvml
from modelpool.pool.engine.diagnosis import DiagnosisSettings, diagnose

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def _no_cap_afterwards() -> Iterator[None]:
    """The cap is the process's: other tests need the whole card."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.usefixtures("_no_cap_afterwards")
def test_the_allocator_holds_to_the_budget() -> None:
    torch.cuda.empty_cache()
    memory = open_device("cuda", 0, 256 * MIB).memory
    assert memory.total_bytes() == 256 * MIB
    before_bytes = torch.cuda.memory_allocated(0)
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:0")
    assert memory.peak_bytes() >= before_bytes + 64 * MIB
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(512 * MIB, dtype=torch.uint8, device="cuda:0")
    del held
    assert torch.cuda.memory_reserved(0) >= 64 * MIB, "cached"
    assert memory.cached_bytes() >= 64 * MIB
    memory.release_cached()
    assert torch.cuda.memory_reserved(0) < 64 * MIB
    assert memory.cached_bytes() < 64 * MIB
    memory.reset_peak()
    assert memory.peak_bytes() == torch.cuda.memory_allocated(0)
    assert 0 < memory.free_bytes() <= torch.cuda.mem_get_info(0)[1]


def test_the_card_is_found_and_usable() -> None:
    found = detect(read_nvml(find_nvml()))
    first = found.devices[0]
    assert first.kind is default_device_kind()
    assert first.capabilities.total_bytes == torch.cuda.get_device_properties(0).total_memory
    if first.free_bytes is None:
        assert not read_nvml(find_nvml()).cards
    else:
        assert 0 < first.free_bytes <= 1.1 * first.capabilities.total_bytes, "NVML counts what the driver keeps"
    assert capabilities_here("cuda").float16 == first.capabilities.float16 or len(found.devices) > 1
    assert diagnose(found, DiagnosisSettings(reserve_bytes=0)).is_usable
