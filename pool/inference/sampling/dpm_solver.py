"""DPM-Solver with steps of its own: DPM fast and DPM adaptive.

Both take the first and the last noise level of a run and place their steps between them in t = -log(sigma). A step of
order 3 counts as three steps of the run, since the number of steps of these samplers is the number of evaluations.
Source: Lu et al. 2022 (DPM-Solver), algorithms 1 and 2 and appendix C, as in k-diffusion. Shape legend: B batch, C
latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelpool.pool.inference.sampling.partial_run import OnStep, PartialRun
from modelpool.pool.inference.sampling.sampler_step import (
    DEFAULT_SETTINGS,
    Denoise,
    Noise,
    SamplerSettings,
    ancestral,
    noise_of,
)


@dataclass(slots=True, eq=False)
class _Solver:
    """One step from time `begin`, with predictions that its orders share."""

    denoise: Denoise
    x_BCHW: Tensor
    begin: float
    _found: dict[float, Tensor] = field(default_factory=dict)

    def step(self, end: float, order: int, ratio: float = 1.0 / 3.0) -> Tensor:
        """Return the latent at time `end`. `ratio`: position of the first point inside the step, for order 2."""
        h = end - self.begin
        grown, sigma = math.expm1(h), math.exp(-end)
        slope = self._noise(0.0, self.x_BCHW, h)
        ending_BCHW = self.x_BCHW - slope * (sigma * grown)
        if order == 1:
            return ending_BCHW
        inner = self._noise(ratio, self.x_BCHW - slope * (math.exp(-self._at(ratio, h)) * math.expm1(ratio * h)), h)
        if order == 2:
            return ending_BCHW - (inner - slope) * (sigma / (2.0 * ratio) * grown)
        outer, at = 2.0 / 3.0, math.exp(-self._at(2.0 / 3.0, h))
        outer_grown = math.expm1(outer * h)
        point_BCHW = self.x_BCHW - slope * (at * outer_grown)
        point_BCHW = point_BCHW - (inner - slope) * (at * (outer / ratio) * (outer_grown / (outer * h) - 1.0))
        return ending_BCHW - (self._noise(outer, point_BCHW, h) - slope) * (sigma / outer * (grown / h - 1.0))

    def _at(self, ratio: float, h: float) -> float:
        return self.begin + ratio * h

    def _noise(self, ratio: float, x_BCHW: Tensor, h: float) -> Tensor:
        """Return the predicted noise in `x_BCHW`, at `ratio` of the step."""
        if ratio not in self._found:
            sigma = math.exp(-self._at(ratio, h))
            self._found[ratio] = noise_of(x_BCHW, self.denoise(x_BCHW, sigma), sigma)
        return self._found[ratio]


def _ends(sigmas: Tensor, settings: SamplerSettings) -> tuple[float, float]:
    """Return the times at which a run begins and ends: its first level, and the lowest of the training or, if that is
    not known, the last one of the run."""
    levels = sigmas.tolist()
    last = levels[-2] if levels[-1] == 0.0 else levels[-1]
    return -math.log(levels[0]), -math.log(last if settings.table is None else min(last, settings.table.sigma_min))


def _down(begin: float, end: float, last: float, eta: float) -> tuple[float, float]:
    """Return the time that a step goes to, and the noise that is added to arrive at `end`."""
    if not eta:
        return end, 0.0
    down, _ = ancestral(math.exp(-begin), math.exp(-end), eta)
    beyond = min(last, -math.log(down)) if down > 0.0 else last
    return beyond, math.sqrt(max(0.0, math.exp(-2.0 * end) - math.exp(-2.0 * beyond)))


def fast_orders(steps: int) -> list[int]:
    """Return the orders of the steps of DPM fast: as many of order 3 as fit, and lower ones at the end."""
    if steps % 3 == 0:
        return [*[3] * (steps // 3 - 1), 2, 1]
    return [*[3] * (steps // 3), steps % 3]


def sample_dpm_fast(
    denoise: Denoise,
    x_BCHW: Tensor,
    sigmas: Tensor,
    noise: Noise,
    on_step: OnStep,
    *,
    part: PartialRun | None = None,
    settings: SamplerSettings = DEFAULT_SETTINGS,
) -> Tensor:
    """DPM-Solver with steps of equal length and order 3; as many evaluations as the run has steps.

    Ends at the lowest noise level, not at 0. Deterministic unless `eta` is set.
    """
    part = part or PartialRun()
    report_step, (first, last) = part.step_reporter(on_step, sigmas), _ends(sigmas, settings)
    orders = fast_orders(len(sigmas) - 1)
    times = [first + (last - first) * i / len(orders) for i in range(len(orders) + 1)]
    counts = [sum(orders[: i + 1]) for i in range(len(orders))]
    for place in part.spans(counts):
        begin, end = times[place], times[place + 1]
        beyond, up = _down(begin, end, last, settings.eta_or(0.0))
        x_BCHW = _Solver(denoise, x_BCHW, begin).step(beyond, orders[place], 1 / 2 if orders[place] == 2 else 1 / 3)
        if up:
            x_BCHW = x_BCHW + noise() * (settings.s_noise * up)
        report_step(counts[place], x_BCHW)
    return x_BCHW


#: tolerances, first step length in t, and the least factor of the next step length at which a step is accepted.
#: Source: k-diffusion
_RELATIVE, _ABSOLUTE, _FIRST_LENGTH, _ACCEPTED = 0.05, 0.0078, 0.05, 0.81


def sample_dpm_adaptive(
    denoise: Denoise,
    x_BCHW: Tensor,
    sigmas: Tensor,
    noise: Noise,
    on_step: OnStep,
    *,
    part: PartialRun | None = None,
    settings: SamplerSettings = DEFAULT_SETTINGS,
) -> Tensor:
    """DPM-Solver of order 3, with step lengths that follow from its estimated error, three evaluations per attempt.

    The number of steps of the run has no influence; progress is the share of the way in t. Ends at the lowest noise
    level, not at 0. The error is from all of `x_BCHW`, so images must not be batched; it is computed on the CPU in
    float64, so that all devices decide alike. Deterministic unless `eta` is set.
    """
    part = part or PartialRun()
    report_step, (first, last) = part.step_reporter(on_step, sigmas), _ends(sigmas, settings)
    memory, eta, steps = part.memory, settings.eta_or(0.0), len(sigmas) - 1
    if memory.start_BCHW is None:
        memory.start_BCHW, memory.numbers = x_BCHW, (first, _FIRST_LENGTH)
    counts = [*range(1, steps), steps]
    reported = part.done
    while memory.numbers[0] < last - 1e-5:
        settings.check_stop()
        begin, length = memory.numbers
        end = min(last, begin + length)
        beyond, up = _down(begin, end, last, eta)
        solver = _Solver(denoise, x_BCHW, begin)
        low_BCHW, high_BCHW = solver.step(beyond, 2), solver.step(beyond, 3)
        # limited, so that one estimate changes the length by at most a factor of 2.6
        factor = (1.0 / (_error(low_BCHW, high_BCHW, memory.start_BCHW) + 1e-8)) ** (1.0 / (1.5 if eta else 3.0))
        factor = 1.0 + math.atan(factor - 1.0)
        if factor < _ACCEPTED:
            memory.numbers = begin, length * factor
            continue
        x_BCHW = high_BCHW + noise() * (settings.s_noise * up) if up else high_BCHW
        memory.start_BCHW, memory.numbers = low_BCHW, (end, length * factor)
        done = counts[min(steps - 1, int(steps * (end - first) / (last - first)))] if end < last - 1e-5 else steps
        if done > reported:
            reported = done
            report_step(done, x_BCHW)
            if done < steps and part.pauses():
                break
    return x_BCHW


def _error(low_BCHW: Tensor, high_BCHW: Tensor, before_BCHW: Tensor) -> float:
    """Return the root mean square of the difference between both orders, in units of the tolerance. A dry run on the
    meta device has no numbers, and accepts its steps."""
    if low_BCHW.is_meta:
        return 0.0
    low, high, before = (each.to("cpu", torch.float64) for each in (low_BCHW, high_BCHW, before_BCHW))
    tolerance = torch.maximum(low.abs(), before.abs()).mul(_RELATIVE).clamp(min=_ABSOLUTE)
    return float(((low - high) / tolerance).square().mean().sqrt())
