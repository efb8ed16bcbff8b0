"""Texts are read on a device with weights that stream to it, and in the dry run that plans it, as on the host."""

from __future__ import annotations

import pytest
import torch

from modelpool.pool.devices.sim import device as sim
from modelpool.pool.families.text_readings import READINGS
from modelpool.pool.models.text.encode import read_texts
from modelpool.pool.weights.ops.casting_classes import swap_to_casting
from modelpool.pool.weights.ops.context import compute
from modelpool.pool.weights.tracing.activation_bytes import peak_bytes
from tests.pool.models.components.text import cases
from tests.pool.models.components.text.pipelines import ours_clip
from tests.pool.models.text.test_reading import CPU, WHOLE, own

INDEX = 3
TEXTS = ("a (red:1.2) cat", "")


@pytest.fixture(scope="module")
def sim_device() -> torch.device:
    sim.install()
    sim.configure(INDEX, 1 << 28)
    return torch.device("sim", INDEX)


@pytest.mark.parametrize("kind", list(WHOLE))
def test_what_a_device_reads_is_what_the_host_reads(kind: str, sim_device: torch.device) -> None:
    make, reading = WHOLE[kind]
    module = make()
    expected = read_texts(module, own(kind), TEXTS, CPU, reading)
    for value in module.parameters():
        value.data = value.data.half().float()
    rounded = read_texts(module, own(kind), TEXTS, CPU, reading)
    for value in module.parameters():
        value.data = value.data.half()
    swap_to_casting(module)
    with compute(sim_device, torch.float32):
        read = read_texts(module, own(kind), TEXTS, sim_device, reading)
    for mine, theirs, exact in zip(read, rounded, expected, strict=True):
        assert mine.context_LD.device == sim_device
        assert torch.equal(mine.context_LD.cpu(), theirs.context_LD)
        assert mine.context_LD.shape == exact.context_LD.shape
        assert (mine.mask_L is None) == (theirs.mask_L is None)
    del read, mine
    assert sim.memory_stats(INDEX).used_bytes == 0


@pytest.mark.parametrize("kind", list(WHOLE))
def test_a_dry_run_reads_texts_without_numbers(kind: str) -> None:
    make, reading = WHOLE[kind]
    shapes = []

    def call(module: torch.nn.Module) -> None:
        read = read_texts(module, own(kind), TEXTS[:1], torch.device("meta"), reading)
        shapes.extend(text.context_LD.shape for text in read)

    module = make()
    assert peak_bytes(module, torch.float32, call) > 0
    assert shapes == [text.context_LD.shape for text in read_texts(module, own(kind), TEXTS[:1], CPU, reading)]


@pytest.mark.parametrize("family", ["sd3", "hidream", "stable_cascade", "flux"])
def test_clip_is_read_on_a_device_for_every_family(family: str, sim_device: torch.device) -> None:
    reading = READINGS[family][0]
    module = cases.clip(projection=16)
    expected = read_texts(module, ours_clip(), TEXTS, CPU, reading)
    swap_to_casting(module)
    with compute(sim_device, torch.float32):
        read = read_texts(module, ours_clip(), TEXTS, sim_device, reading)
    for mine, theirs in zip(read, expected, strict=True):
        assert torch.equal(mine.context_LD.cpu(), theirs.context_LD)
        assert mine.pooled_V is not None
        assert theirs.pooled_V is not None
        assert torch.equal(mine.pooled_V.cpu(), theirs.pooled_V)
