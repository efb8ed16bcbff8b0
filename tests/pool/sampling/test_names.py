"""Names resolve in the spellings people use, without torch, and every name has something behind it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from modelpool.pool.core.errors import UnknownName
from modelpool.pool.sampling.names import SAMPLERS, SCHEDULES, display_name, resolve_sampler
from modelpool.pool.sampling.samplers import FUNCTIONS
from modelpool.pool.sampling.schedules import LEVELS


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [
        ("euler", ("euler", "normal")),
        ("Euler", ("euler", "normal")),
        ("euler_a", ("euler_ancestral", "normal")),
        ("Euler a", ("euler_ancestral", "normal")),
        ("euler_ancestral", ("euler_ancestral", "normal")),
        ("EULER A KARRAS", ("euler_ancestral", "karras")),
        ("dpmpp_2m", ("dpmpp_2m", "karras")),
        ("DPM++ 2M", ("dpmpp_2m", "karras")),
        ("dpm++_2m", ("dpmpp_2m", "karras")),
        ("DPM++ 2M Karras", ("dpmpp_2m", "karras")),
        ("dpmpp_2m_karras", ("dpmpp_2m", "karras")),
        ("DPM++ 2M SGM Uniform", ("dpmpp_2m", "sgm_uniform")),
        ("dpmpp-2m-normal", ("dpmpp_2m", "normal")),
        ("ddim", ("ddim", "ddim_uniform")),
        ("DDIM", ("ddim", "ddim_uniform")),
        ("ddim_ddim_uniform", ("ddim", "ddim_uniform")),
        ("uni_pc", ("uni_pc", "karras")),
        ("UniPC", ("uni_pc", "karras")),
        (" unipc  simple ", ("uni_pc", "simple")),
    ],
)
def test_spellings(spelling: str, meaning: tuple[str, str]) -> None:
    assert resolve_sampler(spelling) == meaning


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_displayed_resolves_to_what_it_came_from(sampler: str, schedule: str) -> None:
    """For both ways of writing the pair. 'DDIM' as a schedule is left out: A1111 has no such joined name."""
    assert resolve_sampler(f"{sampler}_{schedule}") == (sampler, schedule)
    if schedule != "ddim_uniform":
        assert resolve_sampler(" ".join(display_name(sampler, schedule))) == (sampler, schedule)


def test_display_names_are_those_of_a1111() -> None:
    assert display_name("dpmpp_2m", "karras") == ("DPM++ 2M", "Karras")
    assert display_name("euler_ancestral", "sgm_uniform") == ("Euler a", "SGM Uniform")


@pytest.mark.parametrize(
    ("wrong", "nearest"), [("eular", "euler"), ("dpmpp_2n", "dpmpp_2m"), ("unipcc", "unipc"), ("dim", "ddim")]
)
def test_an_unknown_sampler_is_refused_with_the_nearest_name(wrong: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown sampler '{wrong}'; did you mean '{nearest}'"):
        resolve_sampler(wrong)


@pytest.mark.parametrize("wrong", ["", "karras", "eulerkarras", "euler euler", "ddim karras karras", "euler polyexp"])
def test_no_other_joining_of_names_is_a_name(wrong: str) -> None:
    with pytest.raises(UnknownName):
        resolve_sampler(wrong)


def test_the_name_tables_and_the_functions_agree() -> None:
    assert set(SAMPLERS) == set(FUNCTIONS)
    assert set(SCHEDULES) == set(LEVELS)
    assert {sampler.schedule for sampler in SAMPLERS.values()} <= set(SCHEDULES)


def test_names_are_read_without_torch() -> None:
    code = "import sys, modelpool.pool.sampling.names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
