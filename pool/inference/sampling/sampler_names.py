"""Names and aliases of samplers and step schedules.

Torch-free, so that a driver can check a request with it. The functions are in `samplers` and `schedules`; a test checks
that the three modules agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.values.core.errors import unknown_name

#: With one more, `ddim_uniform`, which skips the first of 1000 timesteps, could not give each step its own timestep.
MAX_STEPS = 999
#: Useful guidance scales: 1 is no guidance; far above the upper limit, latents overflow.
MIN_CFG, MAX_CFG = 1.0, 100.0


@dataclass(frozen=True, slots=True)
class SamplerName:
    """The names of one sampler.

    display   name in A1111's `Sampler:` field
    schedule  default step schedule
    aliases   other names, normalised as by `_normalised`
    """

    display: str
    schedule: str
    aliases: tuple[str, ...] = ()


#: step schedule -> name in A1111's `Schedule type:` field
SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "normal": "Normal",
        "karras": "Karras",
        "exponential": "Exponential",
        "sgm_uniform": "SGM Uniform",
        "simple": "Simple",
        "ddim_uniform": "DDIM",
        "linear_quadratic": "Linear Quadratic",
        "polyexponential": "Polyexponential",
        "beta": "Beta",
        "kl_optimal": "KL Optimal",
        "trailing": "Trailing",
        "linspace": "Linspace",
        "linspace_open": "Linspace Open",
        "scm": "SCM",
        "half_last": "Half Last",
        "logit_normal": "Logit Normal",
        "log_snr": "Log SNR",
        "gits": "GITS",
        "ays_sd1": "Align Your Steps SD1",
        "ays_sdxl": "Align Your Steps SDXL",
        "ays_svd": "Align Your Steps SVD",
    }
)

#: means the one of `ays_sd1`, `ays_sdxl` and `ays_svd` that was published for the model; A1111's name has no model
ALIGNED_SCHEDULE, _ALIGNED_DISPLAY = "ays", "Align Your Steps"
#: other names of schedules: in A1111 and Forge
_OTHER_SCHEDULE_NAMES: Mapping[str, str] = MappingProxyType({"uniform": "normal", "align_your_steps_gits": "gits"})
#: name in a recipe of levels that the request lists
EXPLICIT_SCHEDULE = "sigmas"

#: samplers with formulas that do not suit flows: they assume that noise is added to an image of full scale, or place
#: too few steps at high noise. Measured in benchmarks/RESULTS.md
NOT_FOR_FLOWS = frozenset(
    {
        *("dpm_fast", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_2m_cfg_pp", "res_multistep_cfg_pp"),
        *("res_multistep_ancestral_cfg_pp", "gradient_estimation_cfg_pp"),
    }
)
#: samplers that place their own steps: two experts cannot share them, nor images of a batch the steps of "dpm_adaptive"
OWN_STEPS = frozenset({"dpm_fast", "dpm_adaptive", "restart"})

#: samplers that draw noise in their steps by default; that add the noise of `s_churn`; and that have `eta`
#: as a setting: in the first it replaces a default above 0, the others draw no noise without it
NOISY = frozenset(
    {
        *("euler_ancestral", "euler_ancestral_cfg_pp", "dpm_2_ancestral", "dpmpp_2s_ancestral"),
        *("dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_2m_sde", "dpmpp_2m_sde_heun", "dpmpp_3m_sde", "ddpm"),
        *("lcm", "tcd", "res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "er_sde", "seeds_2", "seeds_3"),
        *("sa_solver", "sa_solver_pece", "restart"),
    }
)
READS_CHURN = frozenset({"euler", "heun", "heunpp2", "dpm_2", "ddim"})
READS_ETA = (NOISY - {"ddpm", "lcm", "er_sde", "restart"}) | {
    *("euler_cfg_pp", "dpm_fast", "dpm_adaptive", "res_multistep", "res_multistep_cfg_pp", "ddim"),
}
#: schedules of levels that were published for Stable Diffusion 1 or XL, which have those up to 14.6
SD_LEVELS = frozenset({"gits", "ays_sd1", "ays_sdxl"})


def draws_noise(sampler: str, eta: float | None, s_churn: float) -> bool:
    """Whether a run of `sampler` draws noise in its steps."""
    if s_churn > 0.0 and sampler in READS_CHURN:
        return True
    return sampler in NOISY if eta is None or sampler not in READS_ETA else eta > 0.0


SAMPLERS: Mapping[str, SamplerName] = MappingProxyType(
    {
        "euler": SamplerName("Euler", "normal"),
        "euler_ancestral": SamplerName("Euler a", "normal", ("euler_a",)),
        "euler_cfg_pp": SamplerName("Euler CFG++", "normal", ("euler_cfgpp",)),
        "euler_ancestral_cfg_pp": SamplerName("Euler a CFG++", "normal", ("euler_a_cfgpp", "euler_ancestral_cfgpp")),
        "heun": SamplerName("Heun", "normal"),
        "heunpp2": SamplerName("HeunPP2", "normal"),
        "dpm_2": SamplerName("DPM2", "karras", ("dpm2",)),
        "dpm_2_ancestral": SamplerName("DPM2 a", "karras", ("dpm2_a",)),
        "lms": SamplerName("LMS", "karras"),
        "dpm_fast": SamplerName("DPM fast", "normal"),
        "dpm_adaptive": SamplerName("DPM adaptive", "normal"),
        "dpmpp_2s_ancestral": SamplerName("DPM++ 2S a", "karras", ("dpmpp_2s_a",)),
        "dpmpp_2s_ancestral_cfg_pp": SamplerName("DPM++ 2S a CFG++", "karras", ("dpmpp_2s_a_cfgpp",)),
        "dpmpp_sde": SamplerName("DPM++ SDE", "karras", ("dpmpp_sde_gpu",)),
        "dpmpp_2m": SamplerName("DPM++ 2M", "karras"),
        "dpmpp_2m_cfg_pp": SamplerName("DPM++ 2M CFG++", "karras", ("dpmpp_2m_cfgpp",)),
        "dpmpp_2m_sde": SamplerName("DPM++ 2M SDE", "exponential", ("dpmpp_2m_sde_gpu",)),
        "dpmpp_2m_sde_heun": SamplerName("DPM++ 2M SDE Heun", "exponential", ("dpmpp_2m_sde_heun_gpu",)),
        "dpmpp_3m_sde": SamplerName("DPM++ 3M SDE", "exponential", ("dpmpp_3m_sde_gpu",)),
        "ddpm": SamplerName("DDPM", "normal"),
        "lcm": SamplerName("LCM", "sgm_uniform"),
        "tcd": SamplerName("TCD", "trailing"),
        "ipndm": SamplerName("IPNDM", "karras"),
        "ipndm_v": SamplerName("IPNDM_V", "karras"),
        "deis": SamplerName("DEIS", "karras"),
        "res_multistep": SamplerName("Res Multistep", "normal"),
        "res_multistep_cfg_pp": SamplerName("Res Multistep CFG++", "normal", ("res_multistep_cfgpp",)),
        "res_multistep_ancestral": SamplerName("Res Multistep a", "karras", ("res_multistep_a",)),
        "res_multistep_ancestral_cfg_pp": SamplerName("Res Multistep a CFG++", "karras", ("res_multistep_a_cfgpp",)),
        "gradient_estimation": SamplerName("Gradient Estimation", "normal"),
        "gradient_estimation_cfg_pp": SamplerName(
            "Gradient Estimation CFG++", "normal", ("gradient_estimation_cfgpp",)
        ),
        "er_sde": SamplerName("ER SDE", "normal"),
        "seeds_2": SamplerName("SEEDS 2", "normal"),
        "seeds_3": SamplerName("SEEDS 3", "normal"),
        "sa_solver": SamplerName("SA-Solver", "karras"),
        "sa_solver_pece": SamplerName("SA-Solver PECE", "karras"),
        "ddim": SamplerName("DDIM", "ddim_uniform"),
        "uni_pc": SamplerName("UniPC", "karras", ("unipc",)),
        "uni_pc_bh2": SamplerName("UniPC bh2", "karras", ("unipc_bh2",)),
        "uni_pc_2": SamplerName("UniPC 2", "karras", ("unipc_2",)),
        "restart": SamplerName("Restart", "karras"),
    }
)


def resolve_sampler(name: str) -> tuple[str, str]:
    """Return the (sampler, schedule) that `name` means: 'Euler a', 'dpmpp_2m', 'DPM++ 2M Karras', 'uni_pc_simple'.

    A name or alias of a sampler, alone (default schedule) or followed by a schedule. Case, and blanks, hyphens or
    underscores between words, do not matter. Raises UnknownName.
    """
    aliases, wanted = _SAMPLER_SPELLINGS, _normalised(name)
    if wanted in aliases:
        sampler = aliases[wanted]
        return sampler, SAMPLERS[sampler].schedule
    # the longest name of a schedule first: "sgm_uniform" ends in no other, but "polyexponential" in "exponential"
    for ending, schedule in sorted(_SCHEDULE_SPELLINGS.items(), key=lambda item: -len(item[0])):
        head = wanted.removesuffix(f"_{ending}")
        if head != wanted and head in aliases:
            return aliases[head], schedule
    raise unknown_name("sampler", name, (*aliases, *(f"dpmpp_2m_{schedule}" for schedule in ("karras", "normal"))))


def resolve_schedule_name(name: str) -> str:
    """Return the key of `SCHEDULES`, or `ALIGNED_SCHEDULE`, that `name` means: a key or A1111's name, in any case.
    Raises UnknownName."""
    found = _SCHEDULE_SPELLINGS.get(_normalised(name))
    if found is None:
        raise unknown_name("schedule", name, SCHEDULES)
    return found


def resolve_sampling(sampler: str, schedule: str | None) -> tuple[str, str]:
    """Return the keys of sampler and schedule for two names; `schedule` wins over the schedule in `sampler`.

    Raises UnknownName.
    """
    key, default_schedule = resolve_sampler(sampler)
    if schedule is None:
        return key, default_schedule
    return key, resolve_schedule_name(schedule)


def display_name(sampler: str, schedule: str) -> tuple[str, str]:
    """Return A1111's names of the pair: ('DPM++ 2M', 'Karras'). Both are keys of `SAMPLERS` and `SCHEDULES`, or the
    schedule is `EXPLICIT_SCHEDULE`."""
    return SAMPLERS[sampler].display, SCHEDULES.get(schedule, "Sigmas")


def _normalised(name: str) -> str:
    return "_".join(name.lower().replace("++", "pp").replace("-", " ").replace("_", " ").split())


#: keys of `SAMPLERS` and of `SCHEDULES` by everything that they are called
_SAMPLER_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {alias: key for key, sampler in SAMPLERS.items() for alias in (key, *sampler.aliases)}
)
_SCHEDULE_SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        **{
            spelling: key
            for key, display in {**SCHEDULES, ALIGNED_SCHEDULE: _ALIGNED_DISPLAY}.items()
            for spelling in (key, _normalised(display))
        },
        **_OTHER_SCHEDULE_NAMES,
    }
)
