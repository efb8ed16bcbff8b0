"""Noise levels: the table a model was trained with, and which of its levels a run steps through.

`sigma` is the standard deviation of the noise beside a latent of unit scale (the variance-exploding form), `timestep`
the number that a model is told instead, a float between two entries of the table. Arithmetic is in Python floats; the
only tensor is the result.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from pool.errors import unknown_name, unusable_field
from pool.sampling.names import MAX_STEPS, SCHEDULES


@dataclass(frozen=True, slots=True)
class SigmaTable:
    """The noise level of every training timestep. `sigmas` rises strictly, index is the timestep, values are float32.

    Between two entries, log(sigma) is linear in the timestep; outside, both ways stop at the ends.
    """

    sigmas: tuple[float, ...]

    @property
    def sigma_min(self) -> float:
        return self.sigmas[0]

    @property
    def sigma_max(self) -> float:
        return self.sigmas[-1]

    @property
    def last_timestep(self) -> int:
        return len(self.sigmas) - 1

    def timestep(self, sigma: float) -> float:
        """The timestep, seldom a whole number, at which the noise level is `sigma`."""
        sigma = min(max(sigma, self.sigma_min), self.sigma_max)
        below = min(bisect_right(self.sigmas, sigma) - 1, self.last_timestep - 1)
        low, high = self.sigmas[below : below + 2]
        return below + math.log(sigma / low) / math.log(high / low)

    def sigma(self, timestep: float) -> float:
        """The noise level at `timestep`; exactly the table's entry at a whole one."""
        timestep = min(max(timestep, 0.0), float(self.last_timestep))
        below = min(int(timestep), self.last_timestep - 1)
        low, high = self.sigmas[below : below + 2]
        weight = timestep - below
        return high if weight == 1.0 else low * (high / low) ** weight

    def sigma_at_percent(self, percent: float) -> float:
        """The noise level where `percent` (0.0 to 1.0) of the timesteps are done: from infinity down to 0."""
        if percent <= 0.0:
            return math.inf
        return 0.0 if percent >= 1.0 else self.sigma((1.0 - percent) * self.last_timestep)


def sd1_sigma_table() -> SigmaTable:
    """The table of Stable Diffusion 1, 2 and XL: 1000 betas whose roots rise evenly from sqrt(0.00085) to sqrt(0.012).

    Source: `linear_start`, `linear_end` and `timesteps` of v1-inference.yaml, CompVis/stable-diffusion.
    """
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    signal = torch.cumprod(1.0 - betas, dim=0)
    return SigmaTable(tuple(((1.0 - signal) / signal).sqrt().to(torch.float32).tolist()))


def make_sigmas(name: str, steps: int, table: SigmaTable) -> Tensor:
    """The noise levels of a run of `steps` steps: float32 [steps + 1], strictly falling, the last one 0.

    `name` is a key of `SCHEDULES`; the names mean what they mean in ComfyUI, except that `ddim_uniform` always has as
    many steps as were asked for. Raises UnknownName for another name, UnusableField for fewer than 1 or more than
    `MAX_STEPS` steps.
    """
    if name not in LEVELS:
        raise unknown_name("schedule", name, SCHEDULES)
    if not 1 <= steps <= MAX_STEPS:
        raise unusable_field("steps", steps, f"1 to {MAX_STEPS}")
    return torch.tensor([*LEVELS[name](steps, table), 0.0], dtype=torch.float32)


def _evenly(start: float, stop: float, count: int) -> list[float]:
    """`count` numbers from `start` to `stop`, both included; `start` alone when one is wanted."""
    return [start + (stop - start) * i / max(count - 1, 1) for i in range(count)]


def _normal(steps: int, table: SigmaTable) -> list[float]:
    """Even in the timestep, both ends of the table included."""
    return [table.sigma(t) for t in _evenly(table.last_timestep, 0.0, steps)]


def _sgm_uniform(steps: int, table: SigmaTable) -> list[float]:
    """Even in the timestep, and as if one more step went to timestep 0, which the final 0 replaces."""
    return [table.sigma(t) for t in _evenly(table.last_timestep, 0.0, steps + 1)[:-1]]


def _simple(steps: int, table: SigmaTable) -> list[float]:
    """Every (table length / steps)-th entry from the top; the stride is not rounded, the index is."""
    stride = len(table.sigmas) / steps
    return [table.sigmas[-1 - int(i * stride)] for i in range(steps)]


def _ddim_uniform(steps: int, table: SigmaTable) -> list[float]:
    """Every (table length // steps)-th entry up from timestep 1, so the top is reached only by many steps."""
    stride = len(table.sigmas) // steps
    return [table.sigmas[1 + i * stride] for i in reversed(range(steps))]


def _karras(steps: int, table: SigmaTable) -> list[float]:
    """Even in sigma ** (1 / 7). Source: Karras et al. 2022, equation 5, rho = 7."""
    rho = 7.0
    return [root**rho for root in _evenly(table.sigma_max ** (1 / rho), table.sigma_min ** (1 / rho), steps)]


def _exponential(steps: int, table: SigmaTable) -> list[float]:
    """Even in log(sigma)."""
    return [math.exp(log_sigma) for log_sigma in _evenly(math.log(table.sigma_max), math.log(table.sigma_min), steps)]


#: schedule -> the levels of a run, the final 0 left out
LEVELS: Mapping[str, Callable[[int, SigmaTable], list[float]]] = MappingProxyType(
    {
        "normal": _normal,
        "karras": _karras,
        "exponential": _exponential,
        "sgm_uniform": _sgm_uniform,
        "simple": _simple,
        "ddim_uniform": _ddim_uniform,
    }
)
