"""The table of GPUs is found by the names that drivers give, and is plausible in itself."""

from __future__ import annotations

import pytest

from modelpool.pool.values.core.errors import GIB
from modelpool.scheduler.model.gpu_kinds import GPU_KINDS, kind_of
from tests.each_case import each_case


@each_case(
    ("device_name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100PCIe"),
        ("NVIDIA H100 NVL", "H100NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("Tesla V100-PCIE-32GB", "V100"),
        ("NVIDIA RTX A6000", "RTXA6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX6000Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTXPRO6000"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX4060Ti"),
        ("AMD Instinct MI300X", "MI300X"),
        ("4090", "RTX4090"),
        ("h100", "H100"),
        ("rtx 3090", "RTX3090"),
    ],
)
def test_what_drivers_and_people_call_them(device_name: str, kind: str) -> None:
    assert kind_of(device_name) is GPU_KINDS[kind]


@pytest.mark.parametrize(
    "device_name",
    [
        *("", "cpu", "sim", "sim:0", "Apple M3 Max", "GPU", "NVIDIA", "NVIDIA GeForce RTX 4090 Laptop GPU"),
        *("NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"),
    ],
)
def test_what_is_not_in_the_table_is_not_taken_for_something_like_it(device_name: str) -> None:
    assert kind_of(device_name) is None


def test_every_kind_is_found_by_its_own_name() -> None:
    assert [kind_of(name) for name in GPU_KINDS] == list(GPU_KINDS.values())


def test_figures_are_plausible() -> None:
    """A link is slower than any memory; nothing is a hundred times as fast as another; the measured pair holds."""
    for kind in GPU_KINDS.values():
        assert 5e9 < kind.link_bytes_per_second < 64e9, kind
        assert 8 * GIB < kind.memory_bytes < 200 * GIB, kind
        assert 0.2 < kind.speed < 5.0, kind
    assert GPU_KINDS["A100"].speed == 1.0
    assert GPU_KINDS["H100"].speed / GPU_KINDS["RTX4090"].speed == pytest.approx(23.61 / 7.89, rel=0.01)
