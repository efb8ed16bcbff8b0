"""Dtype decisions equal the golden ones: 540 of them on nine cards, the abilities of the cards, and of a CPU."""

from __future__ import annotations

import pickle

import pytest
import torch

from modelpool.pool.devices.capabilities import (
    INFERENCE_BYTES,
    HalfStorage,
    capabilities_of,
    cuda_capabilities,
    host_capabilities,
    weakest,
)
from modelpool.pool.devices.device_kinds import DeviceKind
from modelpool.pool.values.core.errors import UnknownName
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.compute_dtype import (
    component_dtype,
    compute_dtype,
    diffusion_cast_dtype,
    diffusion_storage_dtype,
    preferred_dtypes,
    vae_dtype,
)
from modelpool.pool.weights.patcher.weight_form import ResidentForm, resident_form
from tests.each_case import each_case
from tests.pool.golden_cards import CARDS, GIB, GOLDEN, card

SUPPORTED = {
    "default": (torch.float16, torch.bfloat16, torch.float32),
    "flux": (torch.bfloat16, torch.float16, torch.float32),
    "bf16_fp32": (torch.bfloat16, torch.float32),
}


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


@each_case("role", list(Role))
@each_case("kind", [DeviceKind.CPU, DeviceKind.SIM])
def test_what_the_cpu_computes_is_float32_whatever_is_stored(role: Role, kind: DeviceKind) -> None:
    for stored in (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn):
        assert compute_dtype(role, stored, host_capabilities(kind, GIB)) is torch.float32


STORED = {"None": torch.float32, "float8_e4m3fn": torch.float8_e4m3fn}


def test_a_diffusion_model_computes_in_what_the_golden_decisions_say() -> None:
    """Rows whose order of dtypes is the one that weights of that dtype prefer; sizes are all one."""
    seen = 0
    for name, vram_gb, _, supported, stored, resting, cast in GOLDEN["dtype_decisions"]["rows"]:
        storage = dtype_of(stored) or torch.float32
        if SUPPORTED[supported] != preferred_dtypes(storage):
            continue
        seen += 1
        found = component_dtype(Role.DIFFUSION_MODEL, storage, card(name, vram_gb))
        assert found.value is dtype_of(resting if cast == "None" else cast), (name, vram_gb, stored, found)
        assert found.reason
    assert seen == 180


@pytest.mark.parametrize("name", CARDS)
def test_a_vae_computes_in_what_the_golden_card_says(name: str) -> None:
    found = component_dtype(Role.VAE, torch.float16, card(name))
    assert found.value is dtype_of(GOLDEN["card_flags"][name]["vae_bf16_fp32"])
    assert "overflow" in found.reason
    assert CARDS[name][0] in found.reason


@pytest.mark.parametrize(
    ("name", "stored", "computed", "form", "why"),
    [
        ("gtx1080", "float16", "float32", "stored", "slow or inexact in float16"),
        ("gtx1080", "bfloat16", "float32", "stored", "slow or inexact in float16"),
        ("gtx1080", "float32", "float32", "compute", "its weights are float32"),
        ("gtx1660", "float16", "float32", "compute", "slow or inexact in float16"),
        ("k80", "float16", "float32", "compute", "slow or inexact in float16"),
        (
            "rtx2080",
            "bfloat16",
            "float16",
            "compute",
            "its weights are bfloat16, which NVIDIA GeForce RTX 2080 Ti lacks",
        ),
        ("v100", "float16", "float16", "compute", "which Tesla V100-SXM2-16GB computes in"),
        ("a100", "bfloat16", "bfloat16", "compute", "its weights are bfloat16"),
        ("a100", "float32", "float16", "compute", "half precision is faster"),
        ("h100", "float8_e4m3fn", "float16", "stored", "half precision is faster"),
    ],
)
def test_cards_of_every_age(name: str, stored: str, computed: str, form: str, why: str) -> None:
    storage = dtype_of(stored)
    assert storage is not None
    found = component_dtype(Role.DIFFUSION_MODEL, storage, card(name))
    assert found.value is dtype_of(computed)
    assert why in found.reason
    assert resident_form(Role.DIFFUSION_MODEL, storage, found.value, 860_000_000, card(name)) == form


def test_a_card_that_is_short_of_memory_keeps_half_precision_that_it_cannot_compute_in() -> None:
    """As `HalfStorage.WHEN_SHORT` says: 0.86 billion parameters fit in 8 GiB as float32, 12 billion do not."""
    forms = [
        resident_form(Role.DIFFUSION_MODEL, torch.float16, torch.float32, parameters, card("gtx1660"))
        for parameters in (860_000_000, 12_000_000_000)
    ]
    assert forms == [ResidentForm.COMPUTE, ResidentForm.STORED]


@pytest.mark.parametrize("kind", DeviceKind)
def test_a_name_of_a_kind_is_enough(kind: DeviceKind) -> None:
    """Where the processes that ask see no device. The value travels."""
    found = capabilities_of(kind.value)
    assert found.kind is kind
    assert capabilities_of(found) is found
    assert pickle.loads(pickle.dumps(found)) == found
    for role in Role:
        assert (compute_dtype(role, torch.float16, found) is torch.float32) or not kind.computes_on_host


def test_other_names_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown device kind 'cude'; did you mean 'cuda'"):
        capabilities_of("cude")


def test_the_weakest_device_has_the_widest_dtypes() -> None:
    turing, ampere, hopper = card("rtx2080"), card("a100"), card("h100")
    assert weakest([hopper, turing, ampere]) is turing
    assert weakest([hopper, ampere]) is ampere
    widths = [compute_dtype(Role.VAE, torch.float16, c).itemsize for c in (hopper, turing, ampere)]
    assert compute_dtype(Role.VAE, torch.float16, weakest([hopper, turing, ampere])).itemsize == max(widths)


def test_a_large_text_encoder_is_computed_in_half_precision_that_does_not_overflow() -> None:
    """T5-XXL in float32 takes 19 GB; CLIP stays exact."""
    modern, old = card("a100"), card("rtx2080")
    large, small = 4_700_000_000, 700_000_000
    assert compute_dtype(Role.TEXT_ENCODER_2, torch.float16, modern, large) is torch.bfloat16
    assert compute_dtype(Role.TEXT_ENCODER_2, torch.float16, old, large) is torch.float32
    assert compute_dtype(Role.TEXT_ENCODER, torch.float16, modern, small) is torch.float32
    assert resident_form(Role.TEXT_ENCODER_2, torch.float16, torch.float32, large, old) is ResidentForm.STORED
    assert resident_form(Role.TEXT_ENCODER, torch.float16, torch.float32, small, old) is ResidentForm.COMPUTE


def test_a_family_that_overflows_in_float16_is_not_computed_in_it() -> None:
    modern, fp8 = card("a100"), torch.float8_e4m3fn
    flux, qwen = (torch.bfloat16, torch.float16, torch.float32), (torch.bfloat16, torch.float32)
    assert compute_dtype(Role.DIFFUSION_MODEL, fp8, modern) is torch.float16
    assert compute_dtype(Role.DIFFUSION_MODEL, fp8, modern, 0, flux) is torch.bfloat16
    assert compute_dtype(Role.DIFFUSION_MODEL, torch.float16, modern, 0, flux) is torch.float16
    assert compute_dtype(Role.DIFFUSION_MODEL, torch.float16, modern, 0, qwen) is torch.bfloat16
