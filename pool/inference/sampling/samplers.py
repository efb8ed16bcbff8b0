"""The samplers by name, and those without a module of their own: Euler, Euler ancestral, DPM++ 2M, UniPC.

`sampler_step` has their signature and its rules. Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from modelpool.pool.inference.sampling.cfg_plus_plus import (
    sample_dpmpp_2m_cfg_pp,
    sample_dpmpp_2s_ancestral_cfg_pp,
    sample_euler_ancestral_cfg_pp,
    sample_euler_cfg_pp,
    sample_gradient_estimation_cfg_pp,
    sample_res_multistep_ancestral_cfg_pp,
    sample_res_multistep_cfg_pp,
)
from modelpool.pool.inference.sampling.dpm_solver import sample_dpm_adaptive, sample_dpm_fast
from modelpool.pool.inference.sampling.multistep import (
    sample_deis,
    sample_gradient_estimation,
    sample_ipndm,
    sample_ipndm_v,
    sample_lms,
    sample_res_multistep,
    sample_res_multistep_ancestral,
)
from modelpool.pool.inference.sampling.partial_run import Denoised
from modelpool.pool.inference.sampling.partial_run import OnStep as OnStep
from modelpool.pool.inference.sampling.restart import sample_restart
from modelpool.pool.inference.sampling.runge_kutta import (
    churned,
    sample_dpm_2,
    sample_dpm_2_ancestral,
    sample_dpmpp_2s_ancestral,
    sample_heun,
    sample_heunpp2,
)
from modelpool.pool.inference.sampling.sampler_step import Denoise as Denoise
from modelpool.pool.inference.sampling.sampler_step import Noise as Noise
from modelpool.pool.inference.sampling.sampler_step import Sampler, Step, StepSampler, renoise
from modelpool.pool.inference.sampling.stochastic import (
    sample_ddpm,
    sample_dpmpp_2m_sde,
    sample_dpmpp_2m_sde_heun,
    sample_dpmpp_3m_sde,
    sample_dpmpp_sde,
    sample_er_sde,
    sample_lcm,
    sample_sa_solver,
    sample_sa_solver_pece,
    sample_seeds_2,
    sample_seeds_3,
    sample_tcd,
)

#: least share of the image, so that the ratio of noise and image is finite. Source: diffusers' UniPCMultistepScheduler
_MIN_SHARE = 1e-6


def _euler(step: Step, x_BCHW: Tensor) -> Tensor:
    """Euler's method on the probability flow; first order.

    Source: Karras et al. 2022, algorithm 2 without its correction.
    """
    x_BCHW, sigma = churned(step, x_BCHW)
    return _advance(x_BCHW, (sigma, step.denoise(x_BCHW, sigma)), step.sigma_next)


def _euler_ancestral(step: Step, x_BCHW: Tensor) -> Tensor:
    """Euler's method to below each noise level, then fresh noise back up to it (eta 1).

    Draws noise once a step, except in a step that ends at 0. Where the training's levels end above 0
    (`SigmaTable.ancestral_residue`), that step is run as if it ended there, and the result is scaled to unit variance:
    DDPM over a table with that first level.
    Sources: k-diffusion, `sample_euler_ancestral`; Ho et al. 2020 (DDPM), algorithm 2, which is the same in other
    variables. For a flow, where less noise means more of the image, see `renoise`.
    """
    left = 0.0 if step.settings.table is None else step.settings.table.ancestral_residue
    if step.is_last and left:
        x_BCHW = _advance(x_BCHW, (step.sigma, step.denoise(x_BCHW, step.sigma)), left * (left / step.sigma))
        return x_BCHW * (1.0 / math.hypot(1.0, left))
    fresh = renoise(step, step.settings.eta_or(1.0))
    return fresh.apply(step, _advance(x_BCHW, (step.sigma, step.denoise(x_BCHW, step.sigma)), fresh.down))


def _ddim(step: Step, x_BCHW: Tensor) -> Tensor:
    """DDIM: with eta 0 Euler's method, else a step to below each noise level, then fresh noise up to it.

    Levels are ratios of noise and image here, so that the equations hold for flows as well. Source: Song et al. 2021
    (DDIM), equations 12 and 16.
    """
    eta, path = step.settings.eta_or(0.0), step.path
    if eta == 0.0 or step.is_last:
        return _euler(step, x_BCHW)
    x_BCHW, sigma = churned(step, x_BCHW)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    end, image = path.ratio(step.sigma_next), path.image(step.sigma_next)
    fresh = min(1.0, eta * math.sqrt(1.0 - (end / path.ratio(sigma)) ** 2))  # of the noise at the end
    kept = end * math.sqrt(1.0 - fresh**2) / sigma
    x_BCHW = x_BCHW * (image * kept) + clean_BCHW * (image * (1.0 - path.image(sigma) * kept))
    return x_BCHW + step.fresh() * (image * end * fresh)


def _dpmpp_2m(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver++(2M): second order, from the slope between the last two predictions; first order in the first step
    and in the step to 0.

    Source: Lu et al. 2022 (DPM-Solver++), algorithm 2.
    """
    older = [] if step.is_last else step.memory.predictions
    prediction = step.sigma, step.denoise(x_BCHW, step.sigma)
    nodes = _nodes(step.sigma, step.sigma_next, older)
    weights = [0.5 * (1.0 - step.sigma_next / step.sigma) / node for node in nodes]
    x_BCHW = _advance(x_BCHW, prediction, step.sigma_next, older, weights)
    step.memory.predictions = [prediction]
    return x_BCHW


@dataclass(frozen=True, slots=True)
class UniPc:
    """A variant of UniPC. Each prediction corrects the step that led to it, then predicts the next.

    order    order of steps with enough predictions; lower in the first and in the last steps, as published
    grows    B(h) = exp(h) - 1 ("bh2") instead of h ("bh1")
    is_flow  steps are computed in the ratio of noise and image, instead of in noise relative to an image of unit scale

    Source: Zhao et al. 2023 (UniPC), algorithms 5 to 8.
    """

    order: int
    grows: bool = False
    is_flow: bool = False

    def __call__(self, step: Step, x_BCHW: Tensor) -> Tensor:
        """Correct the step that led here, then predict the end of `step`."""
        memory, sigma = step.memory, step.sigma
        # memory: the predictions that the last step used, and the latent at which it started
        prediction, predictions, start_BCHW = (
            (sigma, step.denoise(x_BCHW, sigma)),
            memory.predictions,
            memory.start_BCHW,
        )
        if start_BCHW is None:
            start_BCHW = x_BCHW
        else:
            start_BCHW = self._step(start_BCHW, predictions[0], sigma, [prediction, *predictions[1:]])
        predictions = [prediction, *predictions][: min(self.order, step.done, step.steps_left + 1)]
        x_BCHW = self._step(start_BCHW, prediction, step.sigma_next, predictions[1:])
        memory.predictions, memory.start_BCHW = predictions, start_BCHW
        return x_BCHW

    def _step(self, x: Tensor, prediction: Denoised, sigma_next: float, others: Sequence[Denoised]) -> Tensor:
        """Step `x` to `sigma_next` along the polynomial through `prediction` and `others`.

        UniC if `others` starts with the prediction at `sigma_next`, else UniP.
        """
        if not others:
            return _advance(x, prediction, sigma_next)
        (sigma, _), share = prediction, 1.0 - sigma_next if self.is_flow else 1.0
        begin, end = self._level(sigma), self._level(sigma_next)
        nodes = _nodes(begin, end, [(self._level(other), each) for other, each in others])
        weights = _uni_pc_weights(begin, end, nodes, self.grows)
        return _advance(x, prediction, sigma_next, others, [weight * share for weight in weights])

    def _level(self, sigma: float) -> float:
        """Return the variable of the steps."""
        return sigma / max(1.0 - sigma, _MIN_SHARE) if self.is_flow else sigma


def _advance(
    x: Tensor, prediction: Denoised, sigma_next: float, others: Sequence[Denoised] = (), weights: Sequence[float] = ()
) -> Tensor:
    """Step `x` from the level of `prediction` to `sigma_next`; weight * (other - guess) corrects a constant prediction.

    With u = log(sigma / s) for a noise level s on the path, and h its value at the end, the flow solves to
    x(h) = exp(-h) x(0) + integral of exp(u - h) x0(u) du from 0 to h. Every sampler here is a choice of x0(u).
    """
    sigma, x0 = prediction
    x = x * (sigma_next / sigma) + x0 * (1.0 - sigma_next / sigma)
    for weight, (_, other) in zip(weights, others, strict=True):
        x = x + (other - x0) * weight
    return x


def _nodes(sigma: float, sigma_next: float, others: Sequence[Denoised]) -> list[float]:
    """Return the positions of the levels of `others` in log(sigma), where `sigma` is at 0 and `sigma_next` at 1."""
    return [math.log(sigma / other) / math.log(sigma / sigma_next) for other, _ in others]


def _uni_pc_weights(sigma: float, sigma_next: float, nodes: Sequence[float], grows: bool) -> list[float]:
    """Return the weight of each node's difference from the prediction at 0: the integral of its Lagrange polynomial.

    They solve the equations that the paper writes with B(h), which cancels out. It remains only for a single node,
    where the paper shortens the equations.
    """
    h = math.log(sigma / sigma_next)
    if len(nodes) == 1:
        return [0.5 * (-math.expm1(-h) if grows else h) / nodes[0]]
    moments = [-math.expm1(-h)]  # integrals of exp(u - h) (u / h)**power du from 0 to h
    for power in range(1, len(nodes) + 1):
        moments.append(1.0 - power / h * moments[-1])
    weights = []
    for index, node in enumerate(nodes):
        polynomial = [0.0, 1.0 / node]  # coefficients, constant first; 0 at 0 and at the other nodes, 1 at its own
        for other in (*nodes[:index], *nodes[index + 1 :]):
            shifted, scaled = [0.0, *polynomial], [*(other * c for c in polynomial), 0.0]
            polynomial = [(a - b) / (node - other) for a, b in zip(shifted, scaled, strict=True)]
        weights.append(sum(c * moment for c, moment in zip(polynomial, moments, strict=True)))
    return weights


sample_euler = StepSampler(_euler)
sample_ddim = StepSampler(_ddim)
sample_euler_ancestral = StepSampler(_euler_ancestral)
sample_dpmpp_2m = StepSampler(_dpmpp_2m)
#: order 3 with "bh1": the sampler that ComfyUI and A1111 call by this name
sample_uni_pc = StepSampler(UniPc(3))
#: order 3 with "bh2"
sample_uni_pc_bh2 = StepSampler(UniPc(3, grows=True))
#: order 2 with "bh2": diffusers' UniPCMultistepScheduler, with which Wan was published
sample_uni_pc_2 = StepSampler(UniPc(2, grows=True))
#: samplers of `FUNCTIONS` that differ for flow models. The others follow the same path for both kinds, or read
#: `SamplerSettings.path`
FLOW_FUNCTIONS: Mapping[str, Sampler] = MappingProxyType({"uni_pc_2": StepSampler(UniPc(2, grows=True, is_flow=True))})
#: sampler, a key of `sampler_names.SAMPLERS` -> function
FUNCTIONS: Mapping[str, Sampler] = MappingProxyType(
    {
        "euler": sample_euler,
        "euler_ancestral": sample_euler_ancestral,
        "euler_cfg_pp": sample_euler_cfg_pp,
        "euler_ancestral_cfg_pp": sample_euler_ancestral_cfg_pp,
        "heun": sample_heun,
        "heunpp2": sample_heunpp2,
        "dpm_2": sample_dpm_2,
        "dpm_2_ancestral": sample_dpm_2_ancestral,
        "lms": sample_lms,
        "dpm_fast": sample_dpm_fast,
        "dpm_adaptive": sample_dpm_adaptive,
        "dpmpp_2s_ancestral": sample_dpmpp_2s_ancestral,
        "dpmpp_2s_ancestral_cfg_pp": sample_dpmpp_2s_ancestral_cfg_pp,
        "dpmpp_sde": sample_dpmpp_sde,
        "dpmpp_2m": sample_dpmpp_2m,
        "dpmpp_2m_cfg_pp": sample_dpmpp_2m_cfg_pp,
        "dpmpp_2m_sde": sample_dpmpp_2m_sde,
        "dpmpp_2m_sde_heun": sample_dpmpp_2m_sde_heun,
        "dpmpp_3m_sde": sample_dpmpp_3m_sde,
        "ddpm": sample_ddpm,
        "lcm": sample_lcm,
        "tcd": sample_tcd,
        "ipndm": sample_ipndm,
        "ipndm_v": sample_ipndm_v,
        "deis": sample_deis,
        "res_multistep": sample_res_multistep,
        "res_multistep_cfg_pp": sample_res_multistep_cfg_pp,
        "res_multistep_ancestral": sample_res_multistep_ancestral,
        "res_multistep_ancestral_cfg_pp": sample_res_multistep_ancestral_cfg_pp,
        "gradient_estimation": sample_gradient_estimation,
        "gradient_estimation_cfg_pp": sample_gradient_estimation_cfg_pp,
        "er_sde": sample_er_sde,
        "seeds_2": sample_seeds_2,
        "seeds_3": sample_seeds_3,
        "sa_solver": sample_sa_solver,
        "sa_solver_pece": sample_sa_solver_pece,
        "ddim": sample_ddim,
        "uni_pc": sample_uni_pc,
        "uni_pc_bh2": sample_uni_pc_bh2,
        "uni_pc_2": sample_uni_pc_2,
        "restart": sample_restart,
    }
)
