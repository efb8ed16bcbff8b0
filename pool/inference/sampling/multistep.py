"""Samplers that evaluate the model once per step and extrapolate from earlier steps: LMS, IPNDM, DEIS, gradient
estimation, the refined exponential solver.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from torch import Tensor

from modelpool.pool.inference.sampling.sampler_step import Step, StepSampler, ancestral, lagrange, noise_of, weighted

#: coefficients of the Adams-Bashforth methods of order 1 to 4 at equal step lengths, the newest slope first
_ADAMS = ((1.0,), (3 / 2, -1 / 2), (23 / 12, -16 / 12, 5 / 12), (55 / 24, -59 / 24, 37 / 24, -9 / 24))


def _slopes(step: Step, x_BCHW: Tensor, clean_BCHW: Tensor, order: int) -> tuple[list[float], list[Tensor]]:
    """Store the slope at this step. Returns the levels of the last `order` slopes, and the slopes, the newest first."""
    step.remember((step.sigma, noise_of(x_BCHW, clean_BCHW, step.sigma)), order)
    levels, slopes = zip(*step.memory.predictions, strict=True)
    return list(levels), list(slopes)


def _lms(step: Step, x_BCHW: Tensor) -> Tensor:
    """The linear multistep method of order 4: the integral of the polynomial through the last slopes.

    Source: Karras et al. 2022 (k-diffusion), after Liu et al. 2022 (PNDM). The last step goes to the prediction.
    """
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    levels, slopes = _slopes(step, x_BCHW, clean_BCHW, step.settings.order or 4)
    if step.is_last:
        return clean_BCHW
    return x_BCHW + weighted(slopes, _integrals(levels, step.sigma, step.sigma_next))


def _ipndm(step: Step, x_BCHW: Tensor) -> Tensor:
    """Improved PNDM of order 4: Adams-Bashforth with the coefficients of equal step lengths.

    Source: Zhang and Chen 2023 (DEIS), appendix H.2. The last step goes to the prediction.
    """
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    _, slopes = _slopes(step, x_BCHW, clean_BCHW, step.settings.order or 4)
    if step.is_last:
        return clean_BCHW
    length = step.sigma_next - step.sigma
    return x_BCHW + weighted(slopes, [weight * length for weight in _ADAMS[len(slopes) - 1]])


def _ipndm_v(step: Step, x_BCHW: Tensor) -> Tensor:
    """Improved PNDM of order 4 for steps of any length.

    Source: Zhou et al. 2024 ("Fast ODE-based Sampling for Diffusion Models in Around 5 Steps", AMED), `ipndm_v` of the
    authors' implementation. From order 3 on its coefficients differ from the coefficients of `_lms`, the integrals of
    the interpolating polynomial, and do not add up to 1 in order 4 unless steps are equal; images have been published
    with them. The last step goes to the prediction.
    """
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    levels, slopes = _slopes(step, x_BCHW, clean_BCHW, step.settings.order or 4)
    if step.is_last:
        return clean_BCHW
    length = step.sigma_next - step.sigma
    return x_BCHW + weighted(slopes, [weight * length for weight in _ipndm_v_weights(levels, length)])


def _ipndm_v_weights(levels: Sequence[float], h: float) -> list[float]:
    """Return the weights of the slopes at `levels`, the newest first, for a step of length `h`."""
    if len(levels) == 1:
        return [1.0]
    h_1, *others = (newer - older for newer, older in pairwise(levels))
    if not others:
        return [(2 + h / h_1) / 2, -(h / h_1) / 2]
    h_2, two, three = others[0], h + h_1, h_1 + others[0]
    bend = (1 - h / (3 * two) * (h * two) / (h_1 * three)) / 2
    if len(others) == 1:
        return [(2 + h / h_1) / 2 + bend, -(h / h_1) / 2 - (1 + h_1 / h_2) * bend, bend * h_1 / h_2]
    h_3 = others[1]
    twist = (1 - h / (3 * two)) / 2 + (1 - h / (2 * two)) * h / (6 * (two + h_2))
    twist *= (h * two * (two + h_2)) / (h_1 * three * (three + h_3))
    share = (h_1 * three) / (h_2 * (h_2 + h_3))
    return [
        (2 + h / h_1) / 2 + bend + twist,
        -(h / h_1) / 2 - (1 + h_1 / h_2) * bend - (1 + h_1 / h_2 + share) * twist,
        bend * h_1 / h_2 + (h_1 / h_2 + share * (1 + h_2 / h_3)) * twist,
        -twist * share * h_1 / h_2,
    ]


def _integrals(levels: Sequence[float], begin: float, end: float) -> list[float]:
    """Return the integral from `begin` to `end` of the Lagrange polynomial of each of `levels`."""
    # relative to the begin, for precision
    polynomials, length = lagrange([level - begin for level in levels]), end - begin
    return [sum(c * length ** (i + 1) / (i + 1) for i, c in enumerate(p)) for p in polynomials]


@dataclass(frozen=True, slots=True)
class _PreservingTime:
    """The time of a variance-preserving diffusion with the noise levels of Karras et al. 2022: 0.002 at time
    0.001, 80 at time 1.

    Source: Karras et al. 2022, table 1 ("VP"): sigma**2 = exp(slope * t**2 / 2 + start * t) - 1.
    """

    start: float
    slope: float

    @classmethod
    def usual(cls) -> _PreservingTime:
        first, low, high = 1e-3, math.log(0.002**2 + 1.0), math.log(80.0**2 + 1.0)
        slope = 2.0 * (low / first - high) / (first - 1.0)
        return cls(high - 0.5 * slope, slope)

    def time(self, sigma: float) -> float:
        """Return the time at which the noise has this standard deviation."""
        root = math.sqrt(self.start**2 + 2.0 * self.slope * math.log(1.0 + sigma**2))
        return (root - self.start) / self.slope


#: points at which DEIS' integrands are averaged. Source: the authors' implementation
_DEIS_POINTS = 10_000


def _deis(step: Step, x_BCHW: Tensor) -> Tensor:
    """DEIS (tAB) of order 3: the slopes are interpolated in the time of a variance-preserving diffusion.

    Source: Zhang and Chen 2023, equation 15; the coefficients are averages over points, as its authors compute them.
    """
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    levels, slopes = _slopes(step, x_BCHW, clean_BCHW, step.settings.order or 3)
    if step.is_last:
        return clean_BCHW
    if len(levels) == 1:
        return x_BCHW + slopes[0] * (step.sigma_next - step.sigma)
    scale = _PreservingTime.usual()
    times, end = [scale.time(level) for level in levels], scale.time(step.sigma_next)
    points = np.linspace(times[0], end, _DEIS_POINTS)
    log_signal = 0.5 * scale.slope * points**2 + scale.start * points  # -log of the signal's share of the variance
    growth = 0.5 * (scale.slope * points + scale.start) / np.sqrt(np.exp(-log_signal) * -np.expm1(-log_signal))
    weights = [
        float(np.mean(growth * np.polynomial.polynomial.polyval(points - times[0], polynomial)) * (end - times[0]))
        for polynomial in lagrange([time - times[0] for time in times])
    ]
    return x_BCHW + weighted(slopes, weights)


#: weight of the newest slope in gradient estimation. Source: Permenter and Yuan 2024, section 5
_GAMMA = 2.0


def _gradient_estimation(step: Step, x_BCHW: Tensor) -> Tensor:
    """Gradient estimation: Euler's method with the slope corrected by the change since the last step.

    Source: Permenter and Yuan 2024 ("Interpreting and Improving Diffusion Models from an Optimization Perspective"),
    algorithm 2. The last step goes to the prediction.
    """
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    _, slopes = _slopes(step, x_BCHW, clean_BCHW, 2)
    if step.is_last:
        return clean_BCHW
    weights = (1.0,) if len(slopes) == 1 else (_GAMMA, 1.0 - _GAMMA)
    return x_BCHW + weighted(slopes, [weight * (step.sigma_next - step.sigma) for weight in weights])


def res_weights(step: Step, down: float, eta: float) -> tuple[float, float]:
    """Return the weights of the prediction and of the one before, for a step of the refined exponential solver.

    Source: Zhang et al. 2023 ("Improved Order Analysis and Design of Exponential Integrator for Diffusion Models
    Sampling"), table 3, with the last step's end as the node.
    """
    before = step.memory.predictions[0][0]
    begin, end = -math.log(step.sigma), -math.log(down)
    length = end - begin
    # where the last step ended, before its noise, is the node's origin
    node = (-math.log(before) + math.log(ancestral(before, step.sigma, eta)[0])) / length
    phi_1 = -math.expm1(-length) / length
    phi_2 = (1.0 - phi_1) / length
    older = phi_2 / node if node else 0.0
    return (phi_1 - older if node else 0.0) * length, older * length


def _res_multistep(step: Step, x_BCHW: Tensor, default_eta: float) -> Tensor:
    """The refined exponential solver of order 2 with the last prediction as its other node; with eta, to below the end
    of the step, then noise."""
    eta = step.settings.eta_or(default_eta)
    down, up = ancestral(step.sigma, step.sigma_next, eta)
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    if down == 0.0 or not step.memory.predictions:
        x_BCHW = x_BCHW * (down / step.sigma) + clean_BCHW * (1.0 - down / step.sigma)
    else:
        newer, older = res_weights(step, down, eta)
        x_BCHW = x_BCHW * (down / step.sigma) + clean_BCHW * newer + step.memory.predictions[0][1] * older
    step.remember((step.sigma, clean_BCHW), 1)
    return x_BCHW + step.fresh() * up if up else x_BCHW


sample_lms = StepSampler(_lms)
sample_ipndm = StepSampler(_ipndm)
sample_ipndm_v = StepSampler(_ipndm_v)
sample_deis = StepSampler(_deis)
sample_gradient_estimation = StepSampler(_gradient_estimation)
sample_res_multistep = StepSampler(partial(_res_multistep, default_eta=0.0))
sample_res_multistep_ancestral = StepSampler(partial(_res_multistep, default_eta=1.0))
