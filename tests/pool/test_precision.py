"""Dtype decisions equal the golden ones: 540 of them on nine cards, the cards' abilities, and those of a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.devices.capabilities import (
    INFERENCE_BYTES,
    DeviceCapabilities,
    HalfStorage,
    cuda_capabilities,
    host_capabilities,
)
from pool.devices.kinds import DeviceKind
from pool.precision import compute_dtype, diffusion_cast_dtype, diffusion_storage_dtype, vae_dtype
from pool.spec import Role

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "misc.json").read_text())
CARDS = {
    "gtx1080": ("NVIDIA GeForce GTX 1080", (6, 1)),
    "gtx1660": ("NVIDIA GeForce GTX 1660 SUPER", (7, 5)),
    "rtx2080": ("NVIDIA GeForce RTX 2080 Ti", (7, 5)),
    "v100": ("Tesla V100-SXM2-16GB", (7, 0)),
    "a100": ("NVIDIA A100-SXM4-40GB", (8, 0)),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9)),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
    "k80": ("Tesla K80", (3, 7)),
}
SUPPORTED = {
    "default": (torch.float16, torch.bfloat16, torch.float32),
    "flux": (torch.bfloat16, torch.float16, torch.float32),
    "bf16_fp32": (torch.bfloat16, torch.float32),
}
GIB = 1 << 30


def card(name: str, vram_gb: int = 8) -> DeviceCapabilities:
    return cuda_capabilities(*CARDS[name], vram_gb * GIB)


def dtype_of(name: str) -> torch.dtype | None:
    return None if name == "None" else getattr(torch, name.removeprefix("torch."))


def test_every_golden_decision() -> None:
    columns = ["card", "vram_gb", "params", "supported", "weight_dtype", "unet_dtype", "manual_cast"]
    assert GOLDEN["dtype_decisions"]["columns"] == columns
    rows = GOLDEN["dtype_decisions"]["rows"]
    assert len(rows) == 540
    wrong = []
    for name, vram_gb, parameters, supported, stored, resting, cast in rows:
        capabilities = card(name, vram_gb)
        found = diffusion_storage_dtype(parameters, SUPPORTED[supported], dtype_of(stored), capabilities)
        found_cast = diffusion_cast_dtype(found, SUPPORTED[supported], capabilities)
        if (found, found_cast) != (dtype_of(resting), dtype_of(cast)):
            wrong.append((name, vram_gb, parameters, supported, stored, found, found_cast))
    assert not wrong, f"{len(wrong)} of {len(rows)}: {wrong[:5]}"


@pytest.mark.parametrize("name", CARDS)
def test_what_a_card_can_do(name: str) -> None:
    golden, found = GOLDEN["card_flags"][name], card(name)
    assert found.float16 is golden["fp16"]
    assert found.bfloat16 is golden["bf16"]
    assert found.fp8_matmul is golden["fp8"]
    assert (found.half_storage is not HalfStorage.NEVER) is golden["fp16_manual"]
    assert vae_dtype((torch.bfloat16, torch.float32), found) is dtype_of(golden["vae_bf16_fp32"])
    assert vae_dtype((torch.float16, torch.bfloat16, torch.float32), found) is dtype_of(golden["vae_fp16_bf16_fp32"])


@pytest.mark.parametrize("kind", [DeviceKind.CPU, DeviceKind.SIM])
def test_what_computes_on_a_cpu_computes_in_float32(kind: DeviceKind) -> None:
    golden, cpu = GOLDEN["cpu"], host_capabilities(kind, 16 * GIB)
    every = SUPPORTED["default"]
    for stored in (None, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        assert diffusion_storage_dtype(10**9, every, stored, cpu) is dtype_of(golden["unet_dtype"])
    assert diffusion_cast_dtype(torch.float16, every, cpu) is dtype_of(golden["manual_fp16"])
    assert diffusion_cast_dtype(torch.bfloat16, every, cpu) is dtype_of(golden["manual_bf16"])
    assert vae_dtype(every, cpu) is dtype_of(golden["vae"])
    assert pytest.approx(golden["min_inference"]) == INFERENCE_BYTES


@pytest.mark.parametrize(
    ("name", "generation", "float16"),
    [
        ("NVIDIA GeForce GTX 1650 Ti", (7, 5), False),
        ("NVIDIA T1000", (7, 5), False),
        ("NVIDIA Tesla T4", (7, 5), True),
        ("NVIDIA TITAN RTX", (7, 5), True),
        ("NVIDIA GeForce RTX 3060", (8, 6), True),
    ],
)
def test_names_of_cards(name: str, generation: tuple[int, int], float16: bool) -> None:
    assert cuda_capabilities(name, generation, 8 * GIB).float16 is float16


def test_what_components_compute_in() -> None:
    for role in Role:
        assert compute_dtype(role, torch.float16, "cpu") is torch.float32
    assert compute_dtype(Role.DIFFUSION_MODEL, torch.bfloat16, "cuda", has_bfloat16=False) is torch.float16
    assert compute_dtype(Role.VAE, torch.float16, "cuda") is torch.bfloat16
