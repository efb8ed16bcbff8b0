"""Noise levels: the table that a model was trained with, and the levels that a run steps through.

`sigma` is the standard deviation of the noise relative to a latent of unit scale (the variance-exploding form),
`timestep` the index of a level in its table, a float between two entries. Arithmetic is in Python floats; the only
tensor is the result.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from types import MappingProxyType

import torch
from torch import Tensor

from modelpool.pool.inference.sampling import cosine_schedule as cosine
from modelpool.pool.inference.sampling.gits_levels import gits_levels
from modelpool.pool.inference.sampling.sampler_names import MAX_STEPS, SCHEDULES
from modelpool.pool.values.core.errors import unknown_name, unusable_field
from modelpool.pool.values.core.sampling_facts import PLAIN_NOISE, NoiseFacts, NoiseKind
from modelpool.pool.values.core.stage_params import SamplingSchedule

_NO_SETTINGS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class SigmaTable:
    """The noise level of each training timestep. `sigmas` is strictly increasing, indexed by timestep, in float32.

    Between two entries, log(sigma) is linear in the timestep; both directions are clamped to the ends.

    sigma_data      standard deviation of clean latents, for the scaling of the model's input and output
    has_log_time_input  the model's time input is log(sigma) / 4 instead of the timestep
    has_angle_time_input     the model's time input is atan(sigma) as a fraction of a right angle
    """

    sigmas: tuple[float, ...]
    sigma_data: float = 1.0
    has_log_time_input: bool = False
    has_angle_time_input: bool = False

    @property
    def sigma_min(self) -> float:
        return self.sigmas[0]

    @property
    def sigma_max(self) -> float:
        return self.sigmas[-1]

    @property
    def last_timestep(self) -> float:
        """The timestep of `sigma_max`."""
        return float(len(self.sigmas) - 1)

    @property
    def first_timestep(self) -> float:
        """The timestep of `sigma_min`."""
        return 0.0

    def timestep(self, sigma: float) -> float:
        """Return the timestep, usually fractional, at which the noise level is `sigma`."""
        sigma = min(max(sigma, self.sigma_min), self.sigma_max)
        below = min(bisect_right(self.sigmas, sigma) - 1, len(self.sigmas) - 2)
        low, high = self.sigmas[below : below + 2]
        return below + math.log(sigma / low) / math.log(high / low)

    def sigma(self, timestep: float) -> float:
        """Return the noise level at `timestep`; at a whole one, exactly the table's entry."""
        timestep = min(max(timestep, 0.0), self.last_timestep)
        below = min(int(timestep), len(self.sigmas) - 2)
        low, high = self.sigmas[below : below + 2]
        weight = timestep - below
        return high if weight == 1.0 else low * (high / low) ** weight

    def strided(self, step: int, steps: int) -> float:
        """Return the level at the start of stride `step` of `steps` equal strides down the table: the entry there, or
        the one above it."""
        return self.sigmas[-1 - int(step * (len(self.sigmas) / steps))]

    @property
    def ancestral_residue(self) -> float:
        """The noise that remains after the last step of a run with an ancestral sampler."""
        return 0.0

    @property
    def deviations(self) -> tuple[float, float]:
        """The ends of the levels, as standard deviations relative to a latent of unit scale."""
        return self.sigma_min, self.sigma_max

    def level(self, deviation: float) -> float:
        """Return the level of noise with this standard deviation."""
        return deviation

    def end_adjusted(self, levels: Sequence[float]) -> list[float]:
        """Return `levels` of a run, adjusted to end as the model was published."""
        return list(levels)

    def time_input(self, sigma: float) -> float:
        """Return the model's time input at the noise level `sigma`."""
        if self.has_angle_time_input:
            return math.atan(sigma) / (math.pi / 2.0)
        return 0.25 * math.log(sigma) if self.has_log_time_input else self.timestep(sigma)

    def sigma_at_percent(self, percent: float) -> float:
        """Return the noise level after `percent` (0.0 to 1.0) of the timesteps: from infinity down to 0."""
        if percent <= 0.0:
            return math.inf
        return 0.0 if percent >= 1.0 else self.sigma((1.0 - percent) * self.last_timestep)


@dataclass(frozen=True, slots=True)
class FlowTable(SigmaTable):
    """The levels of a flow: sigma is the share of noise, from almost 0 to 1, the timestep 1000 times the position
    before the shift. Both directions are exact between two entries.

    shift       above 1, more of the steps are at high noise; 1 is even
    last_share  as in `NoiseFacts`
    """

    shift: float = 1.0
    last_share: float = 0.0

    def end_adjusted(self, levels: Sequence[float]) -> list[float]:
        """Return `levels`, stretched so that the last one is `last_share`."""
        if not self.last_share or len(levels) < 2:
            return list(levels)
        factor = (1.0 - self.last_share) / (1.0 - levels[-1])
        return [1.0 - (1.0 - level) * factor for level in levels]

    @property
    def last_timestep(self) -> float:
        return self.sigma_max * FLOW_LEVELS

    @property
    def first_timestep(self) -> float:
        # where sigma_min would be without a shift: ComfyUI's "normal" and diffusers' FlowMatchEulerDiscreteScheduler
        # interpret both ends like this, and shift the positions between them once more
        return self.sigma_min * FLOW_LEVELS

    def timestep(self, sigma: float) -> float:
        """Return 1000 times the position that is shifted to `sigma`."""
        return FLOW_LEVELS * sigma / (self.shift - (self.shift - 1.0) * sigma)

    def sigma(self, timestep: float) -> float:
        """Return the share of noise at `timestep`."""
        return shifted(timestep / FLOW_LEVELS, self.shift)

    def strided(self, step: int, steps: int) -> float:
        """Return the level after `step` of `steps` equal parts."""
        return shifted(1.0 - step / steps, self.shift)

    def time_input(self, sigma: float) -> float:
        """Return the share of noise."""
        return sigma

    def sigma_at_percent(self, percent: float) -> float:
        """Return the level after `percent` (0.0 to 1.0) of the range."""
        return shifted(1.0 - min(max(percent, 0.0), 1.0), self.shift)


@dataclass(frozen=True, slots=True)
class RatioTable(SigmaTable):
    """The levels of a flow that was trained with noise of all standard deviations between two limits: the share of
    noise in the sum of it and a latent of unit scale."""

    @property
    def deviations(self) -> tuple[float, float]:
        return self.sigma_min / (1.0 - self.sigma_min), self.sigma_max / (1.0 - self.sigma_max)

    def level(self, deviation: float) -> float:
        return deviation / (1.0 + deviation)

    def time_input(self, sigma: float) -> float:
        """Return the share of noise."""
        return sigma


@dataclass(frozen=True, slots=True)
class CosineTable(SigmaTable):
    """The levels of `pool.inference.sampling.cosine_schedule`: the timestep is 1000 times the position. Both directions
    are exact between two entries.

    shift  factor of the levels of a run; 1 is none
    """

    shift: float = 1.0

    @property
    def last_timestep(self) -> float:
        return float(COSINE_LEVELS)

    @property
    def ancestral_residue(self) -> float:
        return cosine.SIGMA_MIN

    def timestep(self, sigma: float) -> float:
        """Return 1000 times the position at which the model was trained with this noise; independent of the shift."""
        return COSINE_LEVELS * cosine.position(sigma)

    def sigma(self, timestep: float) -> float:
        """Return the noise level at `timestep`."""
        return cosine.sigma(timestep / COSINE_LEVELS, self.shift)

    def strided(self, step: int, steps: int) -> float:
        """Return the level after `step` of `steps` equal parts."""
        return cosine.sigma(1.0 - step / steps, self.shift)

    def time_input(self, sigma: float) -> float:
        """Return the position of `sigma`."""
        return cosine.position(sigma)


#: entries of a cosine table
COSINE_LEVELS = 1000
#: entries of a flow table
FLOW_LEVELS = 1000


def shifted(share: float, shift: float) -> float:
    """Return the shifted share of noise. Source: Esser et al. 2024 (SD3), equation 23."""
    return shift * share / (1.0 + (shift - 1.0) * share)


def flow_table(shift: float, last_share: float = 0.0) -> FlowTable:
    """Return the levels of a flow with this shift."""
    shares = (level / FLOW_LEVELS for level in range(1, FLOW_LEVELS + 1))
    return FlowTable(tuple(shifted(share, shift) for share in shares), shift=shift, last_share=last_share)


def cosine_table(shift: float = 1.0) -> CosineTable:
    """Return the levels of a cosine schedule with this shift."""
    positions = (level / COSINE_LEVELS for level in range(1, COSINE_LEVELS + 1))
    return CosineTable(tuple(cosine.sigma(position, shift) for position in positions), shift=shift)


def sd1_sigma_table() -> SigmaTable:
    """Return the table of Stable Diffusion 1, 2 and XL: 1000 betas with roots evenly from sqrt(0.00085) to sqrt(0.012).

    Source: `linear_start`, `linear_end` and `timesteps` of v1-inference.yaml, CompVis/stable-diffusion.
    """
    return betas_table(PLAIN_NOISE)


def betas_table(noise: NoiseFacts) -> SigmaTable:
    """Return the table of 1000 betas, evenly spaced or with evenly spaced roots, from `beta_start` to `beta_end`."""
    power = 1.0 if noise.kind is NoiseKind.LINEAR else 0.5
    betas = torch.linspace(noise.beta_start**power, noise.beta_end**power, 1000, dtype=torch.float64) ** (1.0 / power)
    signal = torch.cumprod(1.0 - betas, dim=0)
    return SigmaTable(tuple(((1.0 - signal) / signal).sqrt().to(torch.float32).tolist()))


#: signal's share of the variance at a zero-terminal last timestep, so that its noise level is finite: 4519.
#: Source: the value used by ComfyUI
LAST_SIGNAL = 4.8973451890853435e-08
#: entries of a table that represents a continuous range
CONTINUOUS_LEVELS = 1000


def sigma_table(noise: NoiseFacts = PLAIN_NOISE, tokens: int = 0, steps: int = 0) -> SigmaTable:
    """Return the noise levels of a model trained with `noise`, for a latent of `tokens` patches and `steps` steps."""
    match noise.kind:
        case NoiseKind.SCALED_LINEAR | NoiseKind.LINEAR:
            return betas_table(noise)
        case NoiseKind.FLOW if noise.sigma_max:
            between = edm_sigma_table(noise.sigma_min, noise.sigma_max, noise.sigma_data)
            return RatioTable(tuple(sigma / (1.0 + sigma) for sigma in between.sigmas))
        case NoiseKind.FLOW:
            by_size = noise.shift_by_size
            return flow_table(noise.shift if by_size is None else by_size.shift(tokens, steps), noise.last_share)
        case NoiseKind.ZERO_TERMINAL:
            table = betas_table(replace(noise, kind=NoiseKind.SCALED_LINEAR))
            factor = math.sqrt(noise.shift)
            ended = zero_terminal_table(replace(table, sigmas=tuple(sigma * factor for sigma in table.sigmas)))
            return replace(ended, sigmas=(*ended.sigmas[:-1], noise.sigma_max or ended.sigma_max))
        case NoiseKind.EDM:
            return edm_sigma_table(noise.sigma_min, noise.sigma_max, noise.sigma_data)
        case NoiseKind.COSINE:
            return cosine_table(noise.shift)
        case NoiseKind.ANGLE:
            table = edm_sigma_table(noise.sigma_min, noise.sigma_max, noise.sigma_data)
            return replace(table, has_log_time_input=False, has_angle_time_input=True)


def zero_terminal_table(table: SigmaTable) -> SigmaTable:
    """Return `table`, rescaled to pure noise at the last timestep and unchanged at the first one.

    Source: Lin et al. 2023, "Common Diffusion Noise Schedules and Sample Steps are Flawed", algorithm 1.
    """
    signals = [1.0 / math.sqrt(sigma**2 + 1.0) for sigma in table.sigmas]
    first, last = signals[0], signals[-1]
    shares = [((signal - last) * first / (first - last)) ** 2 for signal in signals[:-1]] + [LAST_SIGNAL]
    sigmas = torch.tensor([math.sqrt((1.0 - share) / share) for share in shares], dtype=torch.float32)
    return SigmaTable(tuple(sigmas.tolist()), table.sigma_data, table.has_log_time_input)


def edm_sigma_table(sigma_min: float, sigma_max: float, sigma_data: float) -> SigmaTable:
    """Return the table of a continuous range: entries even in log(sigma), between which the interpolation is exact.

    Source: Karras et al. 2022, table 1, for the model's time input.
    """
    levels = torch.linspace(math.log(sigma_min), math.log(sigma_max), CONTINUOUS_LEVELS, dtype=torch.float64).exp()
    return SigmaTable(tuple(levels.to(torch.float32).tolist()), sigma_data, has_log_time_input=True)


def levels_of(schedule: SamplingSchedule, table: SigmaTable) -> Tensor:
    """Return the noise levels of all steps of `schedule` of a model with `table`: float32 [steps + 1], the last 0.
    Raises UserError as `explicit_sigmas` and `make_sigmas` do."""
    if schedule.sigmas:
        return explicit_sigmas(schedule.sigmas, table)
    return make_sigmas(schedule.noise_schedule, schedule.steps, table, dict(schedule.settings))


def may_exceed_model(schedule: SamplingSchedule) -> bool:
    """Return whether the levels of `schedule` do not follow from the model, so that `levels_of` may refuse them."""
    return bool(schedule.sigmas) or schedule.noise_schedule in _PUBLISHED_LEVELS


def make_sigmas(name: str, steps: int, table: SigmaTable, settings: Mapping[str, float] = _NO_SETTINGS) -> Tensor:
    """Return the noise levels of a run of `steps` steps: float32 [steps + 1], strictly decreasing, the last one 0.

    `name` is a key of `LEVELS`; the names mean the same as in ComfyUI, except that `ddim_uniform` always has exactly
    the requested number of steps. `settings` are arguments of its function. Raises UnknownName for another name,
    UnusableField for fewer than 1 or more than `MAX_STEPS` steps, and for published levels that lie outside of the
    model's.
    """
    if name not in LEVELS:
        raise unknown_name("schedule", name, SCHEDULES)
    if not 1 <= steps <= MAX_STEPS:
        raise unusable_field("steps", steps, f"1 to {MAX_STEPS}")
    levels = LEVELS[name](steps, table, **settings)
    if name in _PUBLISHED_LEVELS and levels[0] > table.sigma_max * 1.001:
        expected = f"a schedule within the model's noise levels, up to {table.sigma_max:g}: karras, beta, simple, ..."
        raise unusable_field("schedule", f"{name}, which starts at noise level {levels[0]:g}", expected)
    return torch.tensor([*table.end_adjusted(levels), 0.0], dtype=torch.float32)


def explicit_sigmas(levels: Sequence[float], table: SigmaTable) -> Tensor:
    """Return listed noise levels as the levels of a run: float32 [steps + 1], the last one 0.

    Raises UnusableField for a level above the model's.
    """
    if levels[0] > table.sigma_max * 1.001:
        raise unusable_field("sigmas", f"{levels[0]:g}", f"noise levels of the model, up to {table.sigma_max:g}")
    return torch.tensor([*levels, 0.0], dtype=torch.float32)


def _evenly(start: float, stop: float, count: int) -> list[float]:
    """Return `count` evenly spaced numbers from `start` to `stop`, both included; `start` alone for one."""
    return [start + (stop - start) * i / max(count - 1, 1) for i in range(count)]


def _normal(steps: int, table: SigmaTable) -> list[float]:
    """Even in the timestep, both ends of the table included."""
    return [table.sigma(t) for t in _evenly(table.last_timestep, table.first_timestep, steps)]


def _sgm_uniform(steps: int, table: SigmaTable) -> list[float]:
    """Even in the timestep, as if one more step went to timestep 0, which the final 0 replaces."""
    return [table.sigma(t) for t in _evenly(table.last_timestep, table.first_timestep, steps + 1)[:-1]]


def _simple(steps: int, table: SigmaTable) -> list[float]:
    """Every (table length / steps)-th entry from the top; the index is rounded, not the stride. For a flow, with
    continuous levels, equal parts of the range."""
    return [table.strided(step, steps) for step in range(steps)]


def _ddim_uniform(steps: int, table: SigmaTable) -> list[float]:
    """Every (table length // steps)-th entry up from timestep 1, so only runs of many steps reach the top."""
    stride = len(table.sigmas) // steps
    return [table.sigmas[1 + i * stride] for i in reversed(range(steps))]


def _karras(steps: int, table: SigmaTable) -> list[float]:
    """Even in sigma ** (1 / 7). Source: Karras et al. 2022, equation 5, rho = 7."""
    rho, (low, high) = 7.0, table.deviations
    return [table.level(root**rho) for root in _evenly(high ** (1 / rho), low ** (1 / rho), steps)]


def _exponential(steps: int, table: SigmaTable) -> list[float]:
    """Even in log(sigma)."""
    low, high = table.deviations
    return [table.level(math.exp(log_sigma)) for log_sigma in _evenly(math.log(high), math.log(low), steps)]


def _linear_quadratic(steps: int, table: SigmaTable) -> list[float]:
    """The first half of the steps is even and removes a fortieth of the noise, the others remove more and more.

    Source: genmo's Mochi, `linear_quadratic_schedule` with its threshold of 0.025.
    """
    taken, linear = 0.025, steps // 2
    if not linear:
        return [table.sigma_max]
    bent = steps - linear
    missed = linear - taken * steps
    square, slope = missed / (linear * bent**2), taken / linear - 2 * missed / bent**2
    even = [step * taken / linear for step in range(linear)]
    rising = [square * (step**2 + linear**2) + slope * step for step in range(linear, steps)]
    return [table.sigma_max * (1.0 - share) for share in (*even, *rising)]


def _strictly_falling(places: Sequence[int], most: int) -> list[int]:
    """Return whole numbers near `places`, none twice, from at most `most` down to at least 0."""
    found: list[int] = []
    for done, place in enumerate(places, start=1):
        room_above = found[-1] - 1 if found else most
        found.append(max(min(place, room_above), len(places) - done))
    return found


def _beta(steps: int, table: SigmaTable, alpha: float = 0.6, beta: float = 0.6) -> list[float]:
    """Table entries at the quantiles of a beta distribution: by default more at both ends. A run of so many steps that
    entries would repeat takes their neighbours.

    Source: Lee et al. 2024 ("Beta Sampling is All You Need"), with alpha = beta = 0.6.
    """
    last = len(table.sigmas) - 1
    places = [round(_beta_quantile(1.0 - step / steps, alpha, beta) * last) for step in range(steps)]
    return [table.sigmas[place] for place in _strictly_falling(places, last)]


def _beta_quantile(share: float, alpha: float, beta: float) -> float:
    """Return the quantile of a beta distribution, by Newton's method within bounds that close in."""
    if share <= 0.0 or share >= 1.0:
        return min(max(share, 0.0), 1.0)
    scale = math.gamma(alpha + beta) / (math.gamma(alpha) * math.gamma(beta))
    half = 0.5 if alpha == beta else scale * _beta_integral(0.5, alpha, beta)
    if share >= half:  # the integral converges fast up to 0.5
        return 0.5 if share == half else 1.0 - _beta_quantile(1.0 - share, beta, alpha)
    low, high = 0.0, 0.5
    x = min(high, float((share * alpha / scale) ** (1.0 / alpha)))
    for _ in range(60):
        excess = scale * _beta_integral(x, alpha, beta) - share
        low, high = (low, x) if excess > 0.0 else (x, high)
        density = scale * x ** (alpha - 1.0) * (1.0 - x) ** (beta - 1.0) if x else 0.0
        nearer = x - excess / density if density else low
        nearer = nearer if low < nearer < high else 0.5 * (low + high)
        if nearer == x:
            break
        x = nearer
    return x


def _beta_integral(x: float, alpha: float, beta: float) -> float:
    """Return the integral of t**(alpha - 1) * (1 - t)**(beta - 1) up to `x`, at most 0.5: x**alpha times the sum of
    (1 - beta)_n x**n / (n! (alpha + n))."""
    factor, total, n = 1.0, 0.0, 0
    while abs(factor) > 1e-16:
        total += factor / (alpha + n)
        factor *= (n + 1.0 - beta) / (n + 1.0) * x
        n += 1
    return float(x**alpha * total)


def _kl_optimal(steps: int, table: SigmaTable) -> list[float]:
    """Even in the arc tangent of the noise level. Source: Sabour et al. 2024 (Align Your Steps), theorem 3.1."""
    low, high = table.deviations
    return [table.level(math.tan(angle)) for angle in _evenly(math.atan(high), math.atan(low), steps)]


def _trailing(steps: int, table: SigmaTable) -> list[float]:
    """Even timesteps that end before the first one, from the last one down: how Turbo, Lightning and Hyper models were
    distilled. Source: Lin et al. 2023, table 2 ("trailing"); diffusers' `timestep_spacing`."""
    count = len(table.sigmas)
    places = [round(count - step * count / steps) - 1 for step in range(steps)]
    return [table.sigmas[place] for place in places]


def _linspace(steps: int, table: SigmaTable) -> list[float]:
    """Even timesteps, rounded down to whole numbers, from the last one to the first; of a flow, to 1 of 1000. Source:
    diffusers' CogView4Pipeline; Lin et al. 2023, table 2 ("linspace")."""
    first = 1.0 if isinstance(table, FlowTable) else table.first_timestep
    return [table.sigma(float(int(timestep))) for timestep in _evenly(table.last_timestep, first, steps)]


def _half_last(steps: int, table: SigmaTable) -> list[float]:
    """Even in the timestep from the last one to 0, the last step being half as long. Source: diffusers'
    `PiflowScheduler`."""
    return [table.sigma(table.last_timestep * (1.0 - step / (steps - 0.5))) for step in range(steps)]


def _linspace_open(steps: int, table: SigmaTable) -> list[float]:
    """The same for one more step, without the last level. Source: diffusers' GlmImagePipeline."""
    return _linspace(steps + 1, table)[:-1]


#: angle of the second level of two, of a right angle
_SCM_MIDDLE = 1.3 / (math.pi / 2.0)


def _scm(steps: int, table: SigmaTable) -> list[float]:
    """Even in the arc tangent of the noise relative to the image, from the last level down; the second of two is at a
    published angle. Source: Chen et al. 2025 (Sana Sprint); diffusers' `SCMScheduler`."""
    level: Callable[[float], float] = table.level
    if isinstance(table, FlowTable):
        high, low, level = math.pi / 2.0, 0.0, _share
    else:
        low, high = (math.atan(deviation) for deviation in table.deviations)
    angles = [high * _SCM_MIDDLE] if steps == 2 else _evenly(high, low, steps + 1)[1:-1]
    return [table.sigma_max, *(level(math.tan(angle)) for angle in angles)]


def _share(ratio: float) -> float:
    """Return the share of noise with the ratio `ratio` to the image."""
    return ratio / (1.0 + ratio)


#: deviation of the logarithm of the noise relative to the image, and its bounds in a flow
_LOGIT_DEVIATION, _LEAST_LOGIT, _MOST_LOGIT = 1.5, -7.5, 9.0


def _logit_normal(steps: int, table: SigmaTable) -> list[float]:
    """The logarithm of the noise relative to the image is at even quantiles of a normal distribution with the logarithm
    of the shift as mean. Source: diffusers' Ideogram4Pipeline. Without a flow, the distribution ends with the levels of
    the table."""
    normal = NormalDist(sigma=_LOGIT_DEVIATION)
    if not isinstance(table, FlowTable):
        lowest, highest = table.deviations
        low, high = normal.cdf(math.log(lowest)), normal.cdf(math.log(highest))
        quantiles = [high + (low - high) * step / steps for step in range(1, steps)]
        return [table.sigma_max, *(table.level(math.exp(normal.inv_cdf(quantile))) for quantile in quantiles)]
    mean, levels = math.log(table.shift), [_share(math.exp(_MOST_LOGIT))]
    for step in range(1, steps):
        logit = mean + normal.inv_cdf(1.0 - step / steps)
        level = _share(math.exp(min(max(logit, _LEAST_LOGIT), _MOST_LOGIT)))
        levels.append(min(level, levels[-1] * (1.0 - 1e-6)))  # beyond the bounds, levels would be equal
    return levels


#: bounds of the logarithm of the signal relative to the noise in a flow
_LEAST_SNR, _MOST_SNR = -6.2, 2.0


def _log_snr(steps: int, table: SigmaTable) -> list[float]:
    """Even logarithms of the signal relative to the noise; the first level is replaced by the highest one. Source:
    diffusers' StableAudio3Pipeline. Without a flow, the logarithms are from the table's levels."""
    if isinstance(table, FlowTable):
        ratios = torch.sigmoid(-(_MOST_SNR - torch.linspace(1.0, 0.0, steps + 1) * (_MOST_SNR - _LEAST_SNR)))
        return [table.sigma_max, *ratios[1:-1].tolist()]
    return _exponential(steps, table)


def _aligned(levels: Sequence[float]) -> Callable[[int, SigmaTable], list[float]]:
    """Return a schedule through 11 published levels for 10 steps."""

    def schedule(steps: int, table: SigmaTable) -> list[float]:
        return _through(levels, steps)

    return schedule


def _through(levels: Sequence[float], steps: int) -> list[float]:
    """Return the levels of `steps` steps: those that are given for as many, else log(sigma) is linear between them. The
    last level is left out, as the final step goes to 0."""
    logs = [math.log(level) for level in levels]
    found = []
    for position in _evenly(0.0, len(logs) - 1.0, steps + 1)[:-1]:
        below = min(int(position), len(logs) - 2)
        weight = position - below
        found.append(math.exp(logs[below] * (1.0 - weight) + logs[below + 1] * weight))
    return found


def _gits(steps: int, table: SigmaTable) -> list[float]:
    """Published levels for 2 to 20 steps; the longest list for more."""
    listed = gits_levels(steps)
    return _through(gits_levels(20 if steps > 20 else 2) or (), steps) if listed is None else listed[:-1]


def _sd1_levels(timesteps: Sequence[int]) -> list[float]:
    table = sd1_sigma_table()
    return [table.sigmas[timestep] for timestep in timesteps]


#: Align Your Steps: timesteps for 10 steps of SD1 and SDXL, levels of SVD. Source: Sabour et al. 2024, their web page's
#: quickstart guide
_AYS_SD1 = (999, 850, 736, 645, 545, 455, 343, 233, 124, 24, 0)
_AYS_SDXL = (999, 845, 730, 587, 443, 310, 193, 116, 53, 13, 0)
_AYS_SVD = (700.0, 54.5, 15.886, 7.977, 4.248, 1.789, 0.981, 0.403, 0.173, 0.034, 0.002)


#: schedules with levels that do not follow from the model's
_PUBLISHED_LEVELS = frozenset({"gits", "ays_sd1", "ays_sdxl", "ays_svd"})
#: schedule -> levels of a run without the final 0, from its steps, the levels of the model, and its settings by name
LEVELS: Mapping[str, Callable[..., list[float]]] = MappingProxyType(
    {
        "normal": _normal,
        "karras": _karras,
        "exponential": _exponential,
        "sgm_uniform": _sgm_uniform,
        "simple": _simple,
        "ddim_uniform": _ddim_uniform,
        "linear_quadratic": _linear_quadratic,
        # with the usual power 1
        "polyexponential": _exponential,
        "beta": _beta,
        "kl_optimal": _kl_optimal,
        "trailing": _trailing,
        "linspace": _linspace,
        "linspace_open": _linspace_open,
        "scm": _scm,
        "half_last": _half_last,
        "logit_normal": _logit_normal,
        "log_snr": _log_snr,
        "gits": _gits,
        "ays_sd1": lambda steps, table: _aligned(_sd1_levels(_AYS_SD1))(steps, table),
        "ays_sdxl": lambda steps, table: _aligned(_sd1_levels(_AYS_SDXL))(steps, table),
        "ays_svd": _aligned(_AYS_SVD),
    }
)
