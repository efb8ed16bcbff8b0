"""Samplers of the reverse stochastic differential equation, and of few-step models: the SDE variants of DPM-Solver++,
SEEDS, ER-SDE, SA-Solver, LCM, TCD, DDPM.

Lambda is log(image / noise), half the logarithm of the signal-to-noise ratio. Between two levels, with h the difference
of their lambdas and eta the share of the stochastic part, the noise in the latent is multiplied by exp(-eta h) and
fresh noise restores its variance. Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from modelpool.pool.inference.sampling.sampler_step import Step, StepSampler, ancestral, lagrange, weighted


def _fresh_share(eta: float, h: float) -> float:
    """Return the standard deviation of the noise that is new after `h`, as a share of all."""
    return math.sqrt(max(0.0, -math.expm1(-2.0 * eta * h)))


def _dpmpp_sde(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver++(SDE), second order, with a second prediction in the middle of the step.

    Source: Lu et al. 2022 (DPM-Solver++), section 5, as single step with r = 1/2 (k-diffusion).
    """
    sigma, clean_BCHW = step.path.finite(step.sigma), step.denoise(x_BCHW, step.path.finite(step.sigma))
    if step.is_last:
        return clean_BCHW
    path, eta, end = step.path, step.settings.eta_or(1.0), step.sigma_next
    middle = path.sigma(0.5 * (path.half_log_snr(sigma) + path.half_log_snr(end)))

    def toward(prediction_BCHW: Tensor, level: float) -> Tensor:
        down, up = ancestral(path.ratio(sigma), path.ratio(level), eta)
        shrunk = down / path.ratio(sigma)
        moved_BCHW = x_BCHW * (path.image(level) / path.image(sigma) * shrunk)
        moved_BCHW = moved_BCHW + prediction_BCHW * (path.image(level) * (1.0 - shrunk))
        return moved_BCHW + step.increment(sigma, level) * (path.image(level) * up) if up else moved_BCHW

    return toward(step.denoise(toward(clean_BCHW, middle), middle), end)


def _dpmpp_2m_sde(step: Step, x_BCHW: Tensor, heun: bool) -> Tensor:
    """DPM-Solver++(2M) of the SDE. `heun`: with the other second-order term of the paper.

    Source: Lu et al. 2022 (DPM-Solver++), appendix D.
    """
    sigma = step.path.finite(step.sigma)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    path, eta = step.path, step.settings.eta_or(1.0)
    begin = path.half_log_snr(sigma)
    h = path.half_log_snr(step.sigma_next) - begin
    h_eta = h * (1.0 + eta)
    grown, image = -math.expm1(-h_eta), path.image(step.sigma_next)
    x_BCHW = x_BCHW * (step.sigma_next / sigma * math.exp(-h * eta)) + clean_BCHW * (image * grown)
    for level, before_BCHW in step.memory.predictions:
        ratio = (begin - path.half_log_snr(level)) / h
        weight = (1.0 - grown / h_eta if heun else 0.5 * grown) * image / ratio
        x_BCHW = x_BCHW + (clean_BCHW - before_BCHW) * weight
    step.remember((sigma, clean_BCHW), 1)
    return x_BCHW + step.fresh() * (step.sigma_next * _fresh_share(eta, h)) if eta else x_BCHW


def _dpmpp_3m_sde(step: Step, x_BCHW: Tensor) -> Tensor:
    """DPM-Solver++(3M) of the SDE. Source: k-diffusion, `sample_dpmpp_3m_sde`."""
    sigma = step.path.finite(step.sigma)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    path, eta = step.path, step.settings.eta_or(1.0)
    begin = path.half_log_snr(sigma)
    h = path.half_log_snr(step.sigma_next) - begin
    h_eta = h * (1.0 + eta)
    grown, image = -math.expm1(-h_eta), path.image(step.sigma_next)
    phi_2 = 1.0 - grown / h_eta
    phi_3 = phi_2 / h_eta - 0.5
    x_BCHW = x_BCHW * (step.sigma_next / sigma * math.exp(-h * eta)) + clean_BCHW * (image * grown)
    if len(step.memory.predictions) == 1:
        ((level, before_BCHW),) = step.memory.predictions
        ratio = (begin - path.half_log_snr(level)) / h
        x_BCHW = x_BCHW + (clean_BCHW - before_BCHW) * (image * phi_2 / ratio)
    elif step.memory.predictions:
        (one, one_BCHW), (two, two_BCHW) = step.memory.predictions
        r_0 = (begin - path.half_log_snr(one)) / h
        r_1 = (path.half_log_snr(one) - path.half_log_snr(two)) / h
        newer_BCHW, older_BCHW = (clean_BCHW - one_BCHW) * (1.0 / r_0), (one_BCHW - two_BCHW) * (1.0 / r_1)
        first_BCHW = newer_BCHW + (newer_BCHW - older_BCHW) * (r_0 / (r_0 + r_1))
        second_BCHW = (newer_BCHW - older_BCHW) * (1.0 / (r_0 + r_1))
        x_BCHW = x_BCHW + first_BCHW * (image * phi_2) - second_BCHW * (image * phi_3)
    step.remember((sigma, clean_BCHW), 2)
    return x_BCHW + step.fresh() * (step.sigma_next * _fresh_share(eta, h)) if eta else x_BCHW


def _seeds(step: Step, x_BCHW: Tensor, nodes: Sequence[float]) -> Tensor:
    """SEEDS of order 2 or 3: predictions at `nodes` of the step, with noise along the way.

    Source: Gonzalez et al. 2023 (SEEDS), algorithms 2 and 3 for data prediction.
    """
    path, sigma = step.path, step.path.finite(step.sigma)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    eta, begin = step.settings.eta_or(1.0), path.half_log_snr(sigma)
    h = path.half_log_snr(step.sigma_next) - begin
    ending_BCHW, change_BCHW, noise_BCHW = x_BCHW, x_BCHW * 0.0, x_BCHW * 0.0
    reached = 0.0
    for node in (*nodes, 1.0):
        end = step.sigma_next if node == 1.0 else path.sigma(begin + node * h)
        h_eta, image = node * h * (1.0 + eta), path.image(end)
        grown = -math.expm1(-h_eta)
        # of order 2, the second prediction replaces the first; of order 3, the slope to the last one is integrated
        weight = grown if len(nodes) == 1 else node * (1.0 - grown / h_eta)
        ending_BCHW = x_BCHW * (end / sigma * math.exp(-node * h * eta))
        ending_BCHW = ending_BCHW + clean_BCHW * (image * grown) + change_BCHW * (image * weight)
        if eta:
            passed = (node - reached) * h
            noise_BCHW = noise_BCHW * math.exp(-eta * passed) + step.fresh() * _fresh_share(eta, passed)
            ending_BCHW = ending_BCHW + noise_BCHW * end
        if node < 1.0:
            change_BCHW = step.denoise(ending_BCHW, end) - clean_BCHW
            change_BCHW = change_BCHW if len(nodes) == 1 else change_BCHW * (1.0 / node)
        reached = node
    return ending_BCHW


#: points of ER-SDE's integrals. Source: Cui et al. 2023, the authors' implementation
_ER_POINTS = 200


def _er_noise(ratio: float) -> float:
    """Return ER-SDE's noise scale. Source: Cui et al. 2023, "ER-SDE 5"."""
    return ratio * (math.exp(ratio**0.3) + 10.0)


def _er_sde(step: Step, x_BCHW: Tensor) -> Tensor:
    """ER-SDE-Solver-3: the extended reverse-time SDE, with up to two earlier predictions.

    Source: Cui et al. 2023 ("Elucidating the Solution Space of Extended Reverse-Time SDE"), algorithm 5. Its variable
    is noise / image.
    """
    path, sigma = step.path, step.path.finite(step.sigma)
    clean_BCHW = step.denoise(x_BCHW, sigma)
    if step.is_last:
        return clean_BCHW
    begin, end = path.ratio(sigma), path.ratio(step.sigma_next)
    shrunk = _er_noise(end) / _er_noise(begin)
    image, length = path.image(step.sigma_next), end - begin
    x_BCHW = x_BCHW * (image / path.image(sigma) * shrunk) + clean_BCHW * (image * (1.0 - shrunk))
    older = step.memory.predictions[: (step.settings.order or 3) - 1]
    if older:
        width = -length / _ER_POINTS
        points = [end + i * width for i in range(_ER_POINTS)]
        scales = [_er_noise(point) for point in points]
        one, one_BCHW = path.ratio(older[0][0]), older[0][1]
        slope_BCHW = (clean_BCHW - one_BCHW) * (1.0 / (begin - one))
        integral = sum(1.0 / scale for scale in scales) * width
        x_BCHW = x_BCHW + slope_BCHW * (image * (length + integral * _er_noise(end)))
        if len(older) == 2:
            two, two_BCHW = path.ratio(older[1][0]), older[1][1]
            bend_BCHW = (slope_BCHW - (one_BCHW - two_BCHW) * (1.0 / (one - two))) * (2.0 / (begin - two))
            moment = sum((p - begin) / scale for p, scale in zip(points, scales, strict=True)) * width
            x_BCHW = x_BCHW + bend_BCHW * (image * (0.5 * length**2 + moment * _er_noise(end)))
    step.remember((sigma, clean_BCHW), 2)
    added = image * math.sqrt(max(0.0, end**2 - (begin * shrunk) ** 2))
    return x_BCHW + step.fresh() * added if added else x_BCHW


@dataclass(frozen=True, slots=True)
class SaSolver:
    """SA-Solver: stochastic Adams methods; each prediction first corrects the step that led to it.

    evaluates_corrected  the corrected latent is evaluated once more (PECE)
    predictor, corrector  orders

    Noise is drawn for steps that end in the middle part of the training's timesteps, with eta 1 there.
    Source: Xue et al. 2023 (SA-Solver), algorithms 1 and 2; the interval is from its section 6.
    """

    evaluates_corrected: bool = False
    predictor: int = 3
    corrector: int = 4

    def __call__(self, step: Step, x_BCHW: Tensor) -> Tensor:
        """Return the predicted latent at the end of `step`, after correcting the one at its begin."""
        path, memory, sigma = step.path, step.memory, step.path.finite(step.sigma)
        clean_BCHW = step.denoise(x_BCHW, sigma)
        step.remember((sigma, clean_BCHW), max(self.predictor, self.corrector))
        is_corrected = memory.start_BCHW is not None and (self.evaluates_corrected or not step.is_last)
        if is_corrected:
            assert memory.start_BCHW is not None
            order = min(self.corrector, len(memory.predictions), step.steps_left + 1)
            before = memory.predictions[1][0]
            x_BCHW = memory.start_BCHW + self._integral(step, before, sigma, order)
            if self.evaluates_corrected:
                clean_BCHW = step.denoise(x_BCHW, sigma)
                memory.predictions[0] = sigma, clean_BCHW
        if step.is_last:
            return clean_BCHW
        eta, end = self._eta(step, step.sigma_next), step.sigma_next
        h = path.half_log_snr(end) - path.half_log_snr(sigma)
        start_BCHW = x_BCHW * (end / sigma * math.exp(-(eta**2) * h))
        if eta:
            start_BCHW = start_BCHW + step.fresh() * (end * _fresh_share(eta**2, h))
        memory.start_BCHW = start_BCHW
        order = min(self.predictor, len(memory.predictions), max(1, step.steps_left))
        return start_BCHW + self._integral(step, sigma, end, order)

    def _eta(self, step: Step, sigma: float) -> float:
        """Return the share of the stochastic part of a step that ends at `sigma`."""
        table = step.settings.levels()
        inside = table.sigma_at_percent(0.8) <= sigma <= table.sigma_at_percent(0.2)
        return step.settings.eta_or(1.0) if inside else 0.0

    def _integral(self, step: Step, sigma: float, end: float, order: int) -> Tensor:
        """Return the part of a step from `sigma` to `end` that comes from the last `order` predictions: the integral of
        the polynomial through them, weighted by how much of each moment is left at the end."""
        path, predictions = step.path, step.memory.predictions[:order]
        begin, rate = path.half_log_snr(sigma), 1.0 + self._eta(step, end) ** 2
        h = path.half_log_snr(end) - begin
        moments = [-math.expm1(-rate * h)]
        for power in range(1, order):
            moments.append(h**power - power / rate * moments[-1])
        polynomials = lagrange([path.half_log_snr(level) - begin for level, _ in predictions])
        weights = [sum(c * moment for c, moment in zip(p, moments, strict=True)) for p in polynomials]
        image = path.image(end)
        return weighted([prediction for _, prediction in predictions], [weight * image for weight in weights])


def _lcm(step: Step, x_BCHW: Tensor) -> Tensor:
    """LCM: the prediction, noised to the next level. Source: Luo et al. 2023 (LCM), algorithm 3."""
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    if step.is_last:
        return clean_BCHW
    return clean_BCHW * step.path.image(step.sigma_next) + step.fresh() * step.sigma_next


def _ddpm(step: Step, x_BCHW: Tensor) -> Tensor:
    """DDPM, in terms of noise added to an image that keeps its scale, for flows too. Source: Ho et al. 2020, algorithm
    2."""
    down, up = ancestral(step.sigma, step.sigma_next, 1.0)
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    x_BCHW = x_BCHW * (down / step.sigma) + clean_BCHW * (1.0 - down / step.sigma)
    return x_BCHW + step.fresh() * up if up else x_BCHW


#: share of the timestep that TCD steps below the end of each step. Source: Zheng et al. 2024, section 5
_TCD_ETA = 0.3


def _tcd(step: Step, x_BCHW: Tensor) -> Tensor:
    """TCD: a deterministic step to an earlier timestep than the end of the step, then noise up to it.

    Source: Zheng et al. 2024 ("Trajectory Consistency Distillation"), algorithm 4, strategic stochastic sampling.
    """
    table, eta = step.settings.levels(), step.settings.eta_or(_TCD_ETA)
    if step.is_last or eta == 0.0:
        return _down_and_up(step, x_BCHW, step.sigma_next)
    down = table.sigma(table.timestep(step.sigma_next) * (1.0 - eta))
    return _down_and_up(step, x_BCHW, min(down, step.sigma_next))


def _down_and_up(step: Step, x_BCHW: Tensor, down: float) -> Tensor:
    """Step to the level `down`, then add noise up to the end of the step."""
    path, end = step.path, step.sigma_next
    clean_BCHW = step.denoise(x_BCHW, step.sigma)
    x_BCHW = x_BCHW * (down / step.sigma) + clean_BCHW * (1.0 - down / step.sigma)
    if not path.is_flow:
        added = math.sqrt(max(0.0, end**2 - down**2))
        return x_BCHW + step.fresh() * added if added else x_BCHW
    kept = path.image(end) / path.image(down)
    added = math.sqrt(max(0.0, end**2 - (down * kept) ** 2))
    return x_BCHW * kept + step.fresh() * added if added else x_BCHW


sample_dpmpp_sde = StepSampler(_dpmpp_sde)
sample_dpmpp_2m_sde = StepSampler(partial(_dpmpp_2m_sde, heun=False))
sample_dpmpp_2m_sde_heun = StepSampler(partial(_dpmpp_2m_sde, heun=True))
sample_dpmpp_3m_sde = StepSampler(_dpmpp_3m_sde)
sample_seeds_2 = StepSampler(partial(_seeds, nodes=(1 / 2,)))
sample_seeds_3 = StepSampler(partial(_seeds, nodes=(1 / 3, 2 / 3)))
sample_er_sde = StepSampler(_er_sde)
sample_sa_solver = StepSampler(SaSolver())
sample_sa_solver_pece = StepSampler(SaSolver(evaluates_corrected=True))
sample_lcm = StepSampler(_lcm)
sample_ddpm = StepSampler(_ddpm)
sample_tcd = StepSampler(_tcd)
