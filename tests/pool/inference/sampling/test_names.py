"""Names resolve in the spellings people use, without torch, and every name has something behind it."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from modelpool.pool.inference.sampling.sampler_names import (
    SAMPLERS,
    SCHEDULES,
    display_name,
    resolve_sampler,
    resolve_schedule_name,
)
from modelpool.pool.inference.sampling.samplers import FUNCTIONS
from modelpool.pool.inference.sampling.schedules import LEVELS
from modelpool.pool.values.core.errors import UnknownName


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


def test_what_is_displayed_resolves_to_what_it_came_from() -> None:
    """For both ways of writing the pair. 'DDIM' as a schedule is left out: A1111 has no such joined name."""
    for sampler, schedule in itertools.product(SAMPLERS, SCHEDULES):
        assert resolve_sampler(f"{sampler}_{schedule}") == (sampler, schedule)
        if schedule != "ddim_uniform":
            assert resolve_sampler(" ".join(display_name(sampler, schedule))) == (sampler, schedule)


def test_names_in_recipes_of_a1111_and_comfyui_resolve() -> None:
    """The `Sampler:` and `Schedule type:` fields of A1111 before and after 1.9, and pairs of ComfyUI's KSampler."""
    meanings = {
        "DPM++ 2M Karras": ("dpmpp_2m", "karras"),
        "DPM++ SDE Karras": ("dpmpp_sde", "karras"),
        "DPM++ 2M SDE Exponential": ("dpmpp_2m_sde", "exponential"),
        "DPM++ 2M SDE Karras": ("dpmpp_2m_sde", "karras"),
        "DPM++ 2M SDE Heun Karras": ("dpmpp_2m_sde_heun", "karras"),
        "DPM++ 3M SDE Exponential": ("dpmpp_3m_sde", "exponential"),
        "DPM++ 2S a Karras": ("dpmpp_2s_ancestral", "karras"),
        "DPM2 a Karras": ("dpm_2_ancestral", "karras"),
        "DPM2": ("dpm_2", "karras"),
        "DPM fast": ("dpm_fast", "normal"),
        "DPM adaptive": ("dpm_adaptive", "normal"),
        "LMS Karras": ("lms", "karras"),
        "Heun": ("heun", "normal"),
        "Euler a": ("euler_ancestral", "normal"),
        "Restart": ("restart", "karras"),
        "LCM": ("lcm", "sgm_uniform"),
        "UniPC": ("uni_pc", "karras"),
        "Euler Beta": ("euler", "beta"),
        "DPM++ 2M Align Your Steps SDXL": ("dpmpp_2m", "ays_sdxl"),
        "DPM++ 2M Align Your Steps": ("dpmpp_2m", "ays"),
        "dpmpp_2m_sde_gpu karras": ("dpmpp_2m_sde", "karras"),
        "dpmpp_3m_sde_gpu exponential": ("dpmpp_3m_sde", "exponential"),
        "euler_ancestral sgm_uniform": ("euler_ancestral", "sgm_uniform"),
        "euler_cfg_pp beta": ("euler_cfg_pp", "beta"),
        "uni_pc_bh2 simple": ("uni_pc_bh2", "simple"),
        "res_multistep simple": ("res_multistep", "simple"),
        "DPM++ 2M Polyexponential": ("dpmpp_2m", "polyexponential"),
        "er_sde beta": ("er_sde", "beta"),
    }
    found = {name: resolve_sampler(name) for name in meanings}
    assert found == meanings
    assert resolve_schedule_name("SGM Uniform") == "sgm_uniform"
    assert resolve_schedule_name("KL Optimal") == "kl_optimal"


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
    code = "import sys, modelpool.pool.inference.sampling.sampler_names; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
