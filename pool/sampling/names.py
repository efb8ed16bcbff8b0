"""The names of samplers and step schedules, in the spellings people use.

Torch-free, so that a driver can check a request with it. Knows names only; what they do is in `samplers` and
`schedules`, and a test holds the three together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from modelpool.pool.core.errors import unknown_name

#: One more and `ddim_uniform`, which leaves out the first of 1000 timesteps, could not give every step its own.
MAX_STEPS = 999
#: Guidance scales that make images: 1 is none, far beyond the upper end latents leave what floats can hold.
MIN_CFG, MAX_CFG = 1.0, 100.0


@dataclass(frozen=True, slots=True)
class SamplerName:
    """How one sampler is called.

    display   what A1111 writes into an image's `Sampler:` field
    schedule  the step schedule when a request names none
    aliases   other spellings, normalised as `_normalised` does
    """

    display: str
    schedule: str
    aliases: tuple[str, ...] = ()


#: step schedule -> what A1111 writes into an image's `Schedule type:` field
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
    """The (sampler, schedule) that `name` means: 'Euler a', 'dpmpp_2m', 'DPM++ 2M Karras', 'uni_pc_simple'.

    A spelling of a sampler, alone (its default schedule) or followed by a schedule. Case, and whether words are parted
    by blanks, hyphens or underscores, do not matter. Raises UnknownName.
    """
    spellings = {spelling: key for key, sampler in SAMPLERS.items() for spelling in (key, *sampler.aliases)}
    wanted = _normalised(name)
    if wanted in spellings:
        sampler = spellings[wanted]
        return sampler, SAMPLERS[sampler].schedule
    for schedule in SCHEDULES:
        head = wanted.removesuffix(f"_{schedule}")
        if head != wanted and head in spellings:
            return spellings[head], schedule
    raise unknown_name("sampler", name, (*spellings, *(f"dpmpp_2m_{schedule}" for schedule in ("karras", "normal"))))


def display_name(sampler: str, schedule: str) -> tuple[str, str]:
    """What A1111 calls the pair: ('DPM++ 2M', 'Karras'). Both are keys of `SAMPLERS` and `SCHEDULES`."""
    return SAMPLERS[sampler].display, SCHEDULES[schedule]


def _normalised(name: str) -> str:
    return "_".join(name.lower().replace("++", "pp").replace("-", " ").replace("_", " ").split())
