"""The few numbers of a file that tell what no key and no shape does are read, whatever their type, and checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modelpool.pool.families.definitions.stable_diffusion_1 import SD1
from modelpool.pool.families.definitions.stable_diffusion_2 import SD2
from modelpool.pool.families.definitions.stable_diffusion_xl import PLAYGROUND_25, SDXL
from modelpool.pool.families.parts.located_family import LocatedFamily
from modelpool.pool.files.formats.safetensors_file import Header, read_header
from modelpool.pool.models.loading.small_tensors import SPREAD_KEY, read_numbers, refine_family
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.values.core.sampling_facts import Prediction

SPREAD = f"model.diffusion_model.{SPREAD_KEY}"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
MEASURES = {"edm_mean": torch.zeros(4), "edm_std": torch.ones(4)}


def header_with(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Header:
    save_file(tensors, path / "file.safetensors", metadata=metadata)
    return read_header(path / "file.safetensors")


def spread(deviation: float) -> Tensor:
    return torch.tensor([deviation, -deviation]).repeat(8)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_numbers_of_every_float_type_are_read_as_torch_reads_them(dtype: torch.dtype, tmp_path: Path) -> None:
    """All values of 8 bits, for formats of 8 bits."""
    if dtype.itemsize == 1:
        written = torch.arange(256, dtype=torch.uint8).view(dtype)
    else:
        written = torch.linspace(-3.7, 5.1, 257).to(dtype)
    found = read_numbers(header_with(tmp_path, {"x": written}), "x")
    torch.testing.assert_close(torch.tensor(found), written.float(), rtol=1e-7, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("tensor", [torch.zeros(0), torch.zeros(4, dtype=torch.int8), torch.zeros(70_000)])
def test_what_is_no_few_floats_is_refused(tensor: Tensor, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitecture, match=r"tensor 'x': found .* expected a few floats"):
        read_numbers(header_with(tmp_path, {"x": tensor}), "x")


@pytest.mark.parametrize(("deviation", "is_velocity"), [(0.089, False), (0.091, True), (float("nan"), False)])
def test_a_wide_spread_tells_an_sd2_of_velocity(deviation: float, is_velocity: bool, tmp_path: Path) -> None:
    family = refine_family(SD2, header_with(tmp_path, {SPREAD: spread(deviation)}))
    assert (family.sampling.prediction is Prediction.VELOCITY, family.native_pixels == 768) == (is_velocity,) * 2


def test_what_a_file_says_counts_more_than_its_spread(tmp_path: Path) -> None:
    header = header_with(tmp_path, {SPREAD: spread(0.2)}, {"modelspec.prediction_type": "epsilon"})
    assert refine_family(SD2, header) is SD2


@pytest.mark.parametrize("family", [SD1, SDXL], ids=lambda family: family.name)
def test_the_spread_of_other_families_says_nothing(family: LocatedFamily, tmp_path: Path) -> None:
    assert refine_family(family, header_with(tmp_path, {SPREAD: spread(0.2)})) is family


def test_latents_are_measured_as_the_file_says(tmp_path: Path) -> None:
    measures = {"edm_mean": torch.tensor([1.0, 2.0, -3.0, 0.5]).reshape(1, 4, 1, 1), "edm_std": 2 * torch.ones(4)}
    family = refine_family(PLAYGROUND_25, header_with(tmp_path, measures))
    assert (family.latent_means, family.latent_deviations) == ((1.0, 2.0, -3.0, 0.5), (2.0,) * 4)
    assert family.sampling == PLAYGROUND_25.sampling


BAD = {
    "three channels": ({"edm_mean": torch.zeros(3)}, "expected a finite number for each of 4 channels"),
    "NaN": ({"edm_std": torch.full((4,), float("nan"))}, "expected a finite number for each of 4 channels"),
    "no spread": ({"edm_std": torch.zeros(4)}, "edm_std: found .* expected numbers above 0"),
    "ends that fall": ({"edm_vpred.sigma_max": torch.tensor(0.001)}, "noise from 0.002 to 0.00.*, expected a rising"),
    "end at infinity": ({"edm_vpred.sigma_max": torch.tensor(float("inf"))}, "expected a rising range"),
    "two ends": ({"edm_vpred.sigma_min": torch.ones(2)}, r"sigma_min': found F32 of shape \(2,\), expected one number"),
}


@pytest.mark.parametrize("bad", BAD)
def test_numbers_that_cannot_be_are_refused(bad: str, tmp_path: Path) -> None:
    changed, message = BAD[bad]
    with pytest.raises(UnknownArchitecture, match=message):
        refine_family(PLAYGROUND_25, header_with(tmp_path, {**MEASURES, **changed}))
