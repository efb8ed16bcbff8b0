"""Rounding into 8-bit floats gives the published bytes, and the same ones wherever it is done."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from modelpool.pool.devices.device_kinds import open_device
from modelpool.pool.weights.patches import stochastic_rounding as rounding
from modelpool.pool.weights.patches.stochastic_rounding import round_to, seed_of
from tests.each_case import each_case
from tests.pool.weights.patches.golden_adapters import GOLDEN

EDGES = [0.0, -0.0, 1.0, -1.0, 448.0, 500.0, -1e5, 57344.0, 65504.0, 2**-6, 2**-9, 2**-10, 2**-14, 2**-16, 2**-17]
EDGES += [1e-8, 0.3, 17.3, 239.9, 240.1]
CASES = json.loads((GOLDEN / "stochastic_rounding.half.json").read_text())["cases"]
BYTES = load_file(GOLDEN / "stochastic_rounding.half.safetensors")
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@each_case("case", CASES, ids=[c["name"] for c in CASES])
def test_golden_bytes(case: dict[str, Any]) -> None:
    if "edge" in case["name"]:
        values = torch.tensor(EDGES)
    else:
        values = torch.randn(case["shape"], generator=torch.Generator().manual_seed(777)) * 2
    values = values.to(getattr(torch, case["in_dtype"]))
    kept = values.clone()
    rounded = round_to(values, getattr(torch, case["dtype"]), case["seed"])
    assert torch.equal(rounded.view(torch.uint8), BYTES[case["name"]])
    assert torch.equal(values, kept)


def test_seeds_are_the_published_checksums() -> None:
    seeds = json.loads((GOLDEN / "string_to_seed.json").read_text())
    assert {name: seed_of(name) for name in seeds} == seeds


@pytest.mark.parametrize("dtype", FLOAT8)
def test_what_the_type_can_hold_stays(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = every[every.float().isfinite()]
    assert torch.equal(round_to(finite.float(), dtype, 3).float(), finite.float())


@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_mean_is_kept_and_both_neighbours_occur(dtype: torch.dtype) -> None:
    value = 0.3
    rounded = round_to(torch.full((40_000,), value), dtype, 1).float()
    assert (
        sorted(set(rounded.tolist()))
        == {torch.float8_e4m3fn: [0.28125, 0.3125], torch.float8_e5m2: [0.25, 0.3125]}[dtype]
    )
    assert rounded.mean().item() == pytest.approx(value, abs=1e-3)


def test_large_weights_are_rounded_by_slices_of_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of rows draw one after another, so a slice has the bytes of a second draw."""
    monkeypatch.setattr(rounding, "SLICE_ELEMENTS", 64)
    values = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    whole = round_to(values, torch.float8_e4m3fn, 5)
    generator = torch.Generator().manual_seed(5)
    layout = rounding._layout(torch.float8_e4m3fn)
    assert layout is not None
    parts = [rounding._rounded(part, torch.float8_e4m3fn, layout, generator) for part in values.split(8)]
    assert torch.equal(whole.view(torch.uint8), torch.cat(parts).view(torch.uint8))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_the_simulated_device_gives_the_same_bytes(dtype: torch.dtype) -> None:
    device = open_device("sim", 0, None).torch_device
    values = torch.randn(30, 20, generator=torch.Generator().manual_seed(0))
    there = round_to(values.to(device), dtype, 11)
    assert there.device == device
    assert torch.equal(there.cpu().view(torch.uint8), round_to(values, dtype, 11).view(torch.uint8))


def test_other_types_are_rounded_plainly() -> None:
    values = torch.randn(10)
    assert torch.equal(round_to(values, torch.bfloat16, 1), values.bfloat16())
