"""Samplers that evaluate the model several times per step: Heun, Heun++, DPM2, DPM++ 2S.

Each keeps nothing between two steps. Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math

from torch import Tensor

from modelpool.pool.inference.sampling.sampler_step import (
    Denoise,
    Renoise,
    SamplerSettings,
    Step,
    StepSampler,
    noise_of,
    renoise,
    weighted,
)

#: the highest level from which DPM++ 2S has a middle level for a flow, where the ratio at 1 is infinite. Source: the
#: value used by ComfyUI
_ALMOST_NOISE = 0.9999


def churned(step: Step, x_BCHW: Tensor) -> tuple[Tensor, float]:
    """Add the noise of `s_churn` before a step. Returns the latent and its level.

    Source: Karras et al. 2022, algorithm 2.
    """
    settings, sigma = step.settings, step.sigma
    share = min(settings.s_churn / (len(step.levels) - 1), math.sqrt(2.0) - 1.0)
    if share <= 0.0 or not settings.s_tmin <= sigma <= settings.s_tmax:
        return x_BCHW, sigma
    raised = sigma * (1.0 + share)
    return x_BCHW + step.fresh() * math.sqrt(raised**2 - sigma**2), raised


def _heun(step: Step, x_BCHW: Tensor) -> Tensor:
    """Heun's method: the average of the slopes at both ends. Source: Karras et al. 2022, algorithm 2."""
    x_BCHW, sigma = churned(step, x_BCHW)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    return heun_end(step.denoise, x_BCHW, clean_BCHW, sigma, step.sigma_next, step.settings)


def heun_end(
    denoise: Denoise, x_BCHW: Tensor, clean_BCHW: Tensor, sigma: float, end: float, settings: SamplerSettings
) -> Tensor:
    """Return the end of a step of Heun's method from `sigma`, where the model predicted `clean_BCHW`, to `end`."""
    if settings.is_mostly_noise(sigma):
        end_BCHW = _toward(x_BCHW, clean_BCHW, sigma, end)
        return _toward(x_BCHW, (clean_BCHW + denoise(end_BCHW, end)) * 0.5, sigma, end)
    slope, length = noise_of(x_BCHW, clean_BCHW, sigma), end - sigma
    end_BCHW = x_BCHW + slope * length
    end_slope = noise_of(end_BCHW, denoise(end_BCHW, end), end)
    return x_BCHW + (slope + end_slope) * (0.5 * length)


def _heunpp2(step: Step, x_BCHW: Tensor) -> Tensor:
    """Heun++ with two slopes ahead: at the end of this step and of the next, weighted by their levels.

    Source: Li et al. 2023 ("Improved Techniques for Maximizing the Number of Function Evaluations"), as in the
    `sample_heunpp2` that its authors published for ComfyUI.
    """
    x_BCHW, sigma = churned(step, x_BCHW)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    slopes = [noise_of(x_BCHW, clean_BCHW, sigma)]
    ahead = [level for level in step.levels[step.done : step.done + 2] if level > 0.0]
    point_BCHW, level = x_BCHW, sigma
    for following in ahead:
        # the second point is reached from the first by the slope there, in the length of the next step
        point_BCHW = point_BCHW + slopes[-1] * (following - level)
        slopes.append(noise_of(point_BCHW, step.denoise(point_BCHW, following), following))
        level = following
    total = len(slopes) * step.levels[0]
    weights = [level / total for level in ahead]
    return x_BCHW + weighted(slopes, [1.0 - sum(weights), *weights]) * (step.sigma_next - sigma)


def _dpm_2(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver-2: the slope at the middle in log(sigma). Source: Karras et al. 2022 (k-diffusion), after Lu et al.
    2022 (DPM-Solver), algorithm 1."""
    x_BCHW, sigma = churned(step, x_BCHW)
    return _midpoint(step, x_BCHW, sigma, step.sigma_next)


def _dpm_2_ancestral(step: Step, x_BCHW: Tensor) -> Tensor:
    """`_dpm_2` to below the end of the step, then noise."""
    fresh = renoise(step, step.settings.eta_or(1.0))
    return fresh.apply(step, _midpoint(step, x_BCHW, step.sigma, fresh.down))


def _midpoint(step: Step, x_BCHW: Tensor, sigma: float, end: float) -> Tensor:
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if end == 0.0:
        return clean_BCHW
    middle = math.sqrt(sigma * end)
    if step.settings.is_mostly_noise(sigma):
        middle_BCHW = _toward(x_BCHW, clean_BCHW, sigma, middle)
        return _toward(x_BCHW, step.denoise(middle_BCHW, middle), sigma, end)
    slope = noise_of(x_BCHW, clean_BCHW, sigma)
    middle_BCHW = x_BCHW + slope * (middle - sigma)
    return x_BCHW + noise_of(middle_BCHW, step.denoise(middle_BCHW, middle), middle) * (end - sigma)


def _dpmpp_2s_ancestral(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver++(2S) to below the end of the step, then noise.

    Source: Lu et al. 2022 (DPM-Solver++), algorithm 1 with r = 1/2.
    """
    fresh = renoise(step, step.settings.eta_or(1.0))
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    if fresh.down == 0.0:
        return _toward(x_BCHW, clean_BCHW, step.sigma, 0.0)
    middle = middle_level(step, fresh)
    middle_BCHW = _toward(x_BCHW, clean_BCHW, step.sigma, middle)
    x_BCHW = _toward(x_BCHW, step.denoise(middle_BCHW, middle), step.sigma, fresh.down)
    return fresh.apply(step, x_BCHW)


def middle_level(step: Step, fresh: Renoise) -> float:
    """Return the level in the middle of a step to `fresh.down`, in log(noise / image)."""
    if not step.path.is_flow:
        return math.sqrt(step.sigma * fresh.down)
    if step.sigma == 1.0:
        return _ALMOST_NOISE
    return step.path.sigma(0.5 * (step.path.half_log_snr(step.sigma) + step.path.half_log_snr(fresh.down)))


def _toward(x_BCHW: Tensor, clean_BCHW: Tensor, sigma: float, end: float) -> Tensor:
    """Step from `sigma` to `end` along the line to `clean_BCHW`: exact if the prediction is constant."""
    return x_BCHW * (end / sigma) + clean_BCHW * (1.0 - end / sigma)


sample_heun = StepSampler(_heun)
sample_heunpp2 = StepSampler(_heunpp2)
sample_dpm_2 = StepSampler(_dpm_2)
sample_dpm_2_ancestral = StepSampler(_dpm_2_ancestral)
sample_dpmpp_2s_ancestral = StepSampler(_dpmpp_2s_ancestral)
