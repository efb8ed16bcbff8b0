"""Names and aliases of samplers and step schedules.

Torch-free, so that a driver can check a request with it. The functions are in `samplers` and `schedules`; a test checks
that the three modules agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.core.errors import unknown_name

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
    }
)

SAMPLERS: Mapping[str, SamplerName] = MappingProxyType(
    {
        "euler": SamplerName("Euler", "normal"),
        "euler_ancestral": SamplerName("Euler a", "normal", aliases=("euler_a",)),
        "dpmpp_2m": SamplerName("DPM++ 2M", "karras"),
        "ddim": SamplerName("DDIM", "ddim_uniform"),
        "uni_pc": SamplerName("UniPC", "karras", aliases=("unipc",)),
        "uni_pc_2": SamplerName("UniPC 2", "karras", aliases=("unipc_2",)),
    }
)


def resolve_sampler(name: str) -> tuple[str, str]:
    """Return the (sampler, schedule) that `name` means: 'Euler a', 'dpmpp_2m', 'DPM++ 2M Karras', 'uni_pc_simple'.

    A name or alias of a sampler, alone (default schedule) or followed by a schedule. Case, and blanks, hyphens or
    underscores between words, do not matter. Raises UnknownName.
    """
    aliases = {alias: key for key, sampler in SAMPLERS.items() for alias in (key, *sampler.aliases)}
    wanted = _normalised(name)
    if wanted in aliases:
        sampler = aliases[wanted]
        return sampler, SAMPLERS[sampler].schedule
    for schedule in SCHEDULES:
        head = wanted.removesuffix(f"_{schedule}")
        if head != wanted and head in aliases:
            return aliases[head], schedule
    raise unknown_name("sampler", name, (*aliases, *(f"dpmpp_2m_{schedule}" for schedule in ("karras", "normal"))))


def display_name(sampler: str, schedule: str) -> tuple[str, str]:
    """Return A1111's names of the pair: ('DPM++ 2M', 'Karras'). Both are keys of `SAMPLERS` and `SCHEDULES`."""
    return SAMPLERS[sampler].display, SCHEDULES[schedule]


def _normalised(name: str) -> str:
    return "_".join(name.lower().replace("++", "pp").replace("-", " ").replace("_", " ").split())
