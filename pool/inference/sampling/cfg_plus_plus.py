"""CFG++ variants of samplers: the noise in the latent comes from the prediction without guidance, the image from the
guided one.

Source: Chung et al. 2024 ("CFG++: Manifold-constrained Classifier Free Guidance"), algorithm 2; the multistep and
ancestral variants are those that ComfyUI offers under these names. Shape legend: B batch, C latent channels, H W latent
height and width.
"""

from __future__ import annotations

import math
from functools import partial

from torch import Tensor

from modelpool.pool.inference.sampling.multistep import res_weights
from modelpool.pool.inference.sampling.sampler_step import Step, StepSampler, ancestral, noise_of


def _euler_ancestral_cfg_pp(step: Step, x_BCHW: Tensor, default_eta: float) -> Tensor:
    """The guided image, with the noise that the prediction without guidance leaves."""
    path, sigma = step.path, step.sigma
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    noise_BCHW = noise_of(x_BCHW, step.unconditional() * path.image(sigma), sigma)
    down, up = ancestral(path.ratio(sigma), path.ratio(step.sigma_next), step.settings.eta_or(default_eta))
    image = path.image(step.sigma_next)
    x_BCHW = clean_BCHW * image + noise_BCHW * (image * down)
    return x_BCHW + step.fresh() * (image * up) if up else x_BCHW


def _dpmpp_2m_cfg_pp(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver++(2M) with CFG++. Source: the formula of ComfyUI's sampler of this name."""
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    free_BCHW, before = step.unconditional(), step.memory.predictions
    shrunk = step.sigma_next / step.sigma
    x_BCHW = clean_BCHW + (x_BCHW - free_BCHW) * shrunk
    if before and not step.is_last:
        ratio = math.log(before[0][0] / step.sigma) / math.log(step.sigma / step.sigma_next)
        x_BCHW = x_BCHW + (clean_BCHW - before[0][1]) * ((1.0 - shrunk) / (2.0 * ratio))
    step.remember((step.sigma, free_BCHW), 1)
    return x_BCHW


def _dpmpp_2s_ancestral_cfg_pp(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver++(2S) ancestral with CFG++; the noise comes from the prediction in the middle of the step."""
    down, up = ancestral(step.sigma, step.sigma_next, step.settings.eta_or(1.0))
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    if down == 0.0:
        return clean_BCHW
    middle = math.sqrt(step.sigma * down)
    middle_BCHW = (x_BCHW + clean_BCHW - step.unconditional()) * (middle / step.sigma)
    middle_BCHW = middle_BCHW + clean_BCHW * (1.0 - middle / step.sigma)
    end_BCHW, shrunk = step.denoise(middle_BCHW, middle), down / step.sigma
    x_BCHW = (x_BCHW + clean_BCHW - step.unconditional()) * shrunk + end_BCHW * (1.0 - shrunk)
    return x_BCHW + step.fresh() * up if up else x_BCHW


def _gradient_estimation_cfg_pp(step: Step, x_BCHW: Tensor) -> Tensor:
    """Gradient estimation with CFG++."""
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    slope_BCHW, before = noise_of(x_BCHW, step.unconditional(), step.sigma), step.memory.predictions
    step.memory.predictions = [(step.sigma, slope_BCHW)]
    if step.is_last:
        return clean_BCHW
    x_BCHW = clean_BCHW + slope_BCHW * step.sigma_next
    return x_BCHW + (slope_BCHW - before[0][1]) * (step.sigma_next - step.sigma) if before else x_BCHW


def _res_multistep_cfg_pp(step: Step, x_BCHW: Tensor, default_eta: float) -> Tensor:
    """The refined exponential solver with CFG++."""
    eta = step.settings.eta_or(default_eta)
    down, up = ancestral(step.sigma, step.sigma_next, eta)
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    free_BCHW = step.unconditional()
    if down == 0.0 or not step.memory.predictions:
        x_BCHW = clean_BCHW + noise_of(x_BCHW, free_BCHW, step.sigma) * down
    else:
        newer, older = res_weights(step, down, eta)
        moved_BCHW = (x_BCHW + clean_BCHW - free_BCHW) * (down / step.sigma)
        x_BCHW = moved_BCHW + free_BCHW * newer + step.memory.predictions[0][1] * older
    step.remember((step.sigma, free_BCHW), 1)
    return x_BCHW + step.fresh() * up if up else x_BCHW


sample_euler_cfg_pp = StepSampler(partial(_euler_ancestral_cfg_pp, default_eta=0.0))
sample_euler_ancestral_cfg_pp = StepSampler(partial(_euler_ancestral_cfg_pp, default_eta=1.0))
sample_dpmpp_2m_cfg_pp = StepSampler(_dpmpp_2m_cfg_pp)
sample_dpmpp_2s_ancestral_cfg_pp = StepSampler(_dpmpp_2s_ancestral_cfg_pp)
sample_gradient_estimation_cfg_pp = StepSampler(_gradient_estimation_cfg_pp)
sample_res_multistep_cfg_pp = StepSampler(partial(_res_multistep_cfg_pp, default_eta=0.0))
sample_res_multistep_ancestral_cfg_pp = StepSampler(partial(_res_multistep_cfg_pp, default_eta=1.0))
