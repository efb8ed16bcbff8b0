"""Samplers: functions that step a latent from one noise level to the next.

Each is a function `sample(denoise, x_BCHW, sigmas, noise, on_step)`. It knows neither model, text, guidance nor seed:
only `denoise`, which predicts the clean latent of a noisy one, and which it calls once a step. With `part` it runs only
some of the steps, and its multistep state is in the part's memory.

Three rules make the result equal, bit for bit, on all devices for an equal `denoise`:
1. Coefficients are Python floats; nothing is read back from the device.
2. Tensor arithmetic is `*`, `+` and `-` only: `add(alpha=)`, `lerp` and division by a number may round differently.
3. The state keeps the dtype and the device of `x_BCHW`.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeAlias

from torch import Tensor

from modelpool.pool.sampling.partial_run import Denoised, PartialRun
from modelpool.pool.sampling.partial_run import OnStep as OnStep

#: least share of the image, so that the ratio of noise and image is finite. Source: diffusers' UniPCMultistepScheduler
_MIN_SHARE = 1e-6
#: (noisy x_BCHW, its noise level) -> the predicted clean latent, in the dtype and on the device of x_BCHW
Denoise: TypeAlias = Callable[[Tensor, float], Tensor]
#: () -> fresh standard normal noise like x_BCHW
Noise: TypeAlias = Callable[[], Tensor]


class Sampler(Protocol):
    """The signature of the samplers of this module."""

    def __call__(
        self,
        denoise: Denoise,
        x_BCHW: Tensor,
        sigmas: Tensor,
        noise: Noise,
        on_step: OnStep,
        *,
        part: PartialRun | None = None,
    ) -> Tensor:
        """Return the latent after the last step."""


def sample_euler(
    denoise: Denoise, x_BCHW: Tensor, sigmas: Tensor, noise: Noise, on_step: OnStep, *, part: PartialRun | None = None
) -> Tensor:
    """Euler's method on the probability flow; first order. In this variable it is also DDIM with eta 0.

    Source: Karras et al. 2022, algorithm 1 without its correction; Song et al. 2021 (DDIM), section 4.3.
    """
    part = part or PartialRun()
    report_step = part.step_reporter(on_step, sigmas)
    for done, sigma, sigma_next in part.steps(sigmas):
        x_BCHW = _advance(x_BCHW, (sigma, denoise(x_BCHW, sigma)), sigma_next)
        report_step(done, x_BCHW)
    return x_BCHW


def sample_euler_ancestral(
    denoise: Denoise,
    x_BCHW: Tensor,
    sigmas: Tensor,
    noise: Noise,
    on_step: OnStep,
    left: float = 0.0,
    *,
    part: PartialRun | None = None,
) -> Tensor:
    """Euler's method to below each noise level, then fresh noise back up to it (eta 1).

    Draws from `noise` once a step, except in a step that ends at 0. With `left`, that step is run as if it ended at
    this noise level, and the result is scaled to unit variance: DDPM over a table whose first level is `left`.
    Sources: k-diffusion, `sample_euler_ancestral`; Ho et al. 2020 (DDPM), algorithm 2, which is the same in other
    variables.
    """
    part = part or PartialRun()
    report_step = part.step_reporter(on_step, sigmas)
    for done, sigma, sigma_next in part.steps(sigmas):
        end = sigma_next or left
        ratio = end / sigma
        below, fresh = end * ratio, end * math.sqrt(1.0 - ratio**2)  # squares add up to end**2
        x_BCHW = _advance(x_BCHW, (sigma, denoise(x_BCHW, sigma)), below)
        if sigma_next > 0.0:
            x_BCHW = x_BCHW + noise() * fresh
        elif left:
            x_BCHW = x_BCHW * (1.0 / math.hypot(1.0, left))
        report_step(done, x_BCHW)
    return x_BCHW


def sample_flow_ancestral(
    denoise: Denoise, x_BCHW: Tensor, sigmas: Tensor, noise: Noise, on_step: OnStep, *, part: PartialRun | None = None
) -> Tensor:
    """`sample_euler_ancestral` for flow models, where less noise means more of the image.

    From below each level, the image is scaled back to its share there, and fresh noise makes the squares add up. Draws
    from `noise` once a step, except in a step that ends at 0. The distance below is that of `sample_euler_ancestral`.
    """
    part = part or PartialRun()
    report_step = part.step_reporter(on_step, sigmas)
    for done, sigma, sigma_next in part.steps(sigmas):
        below = sigma_next * (sigma_next / sigma)
        x_BCHW = _advance(x_BCHW, (sigma, denoise(x_BCHW, sigma)), below)
        if sigma_next > 0.0:
            back = (1.0 - sigma_next) / (1.0 - below)
            x_BCHW = x_BCHW * back + noise() * math.sqrt(max(0.0, sigma_next**2 - (below * back) ** 2))
        report_step(done, x_BCHW)
    return x_BCHW


def sample_dpmpp_2m(
    denoise: Denoise, x_BCHW: Tensor, sigmas: Tensor, noise: Noise, on_step: OnStep, *, part: PartialRun | None = None
) -> Tensor:
    """DPM-Solver++(2M): second order, from the slope between the last two predictions; first order in the first step
    and in the step to 0.

    Source: Lu et al. 2022 (DPM-Solver++), algorithm 2.
    """
    part = part or PartialRun()
    report_step, memory = part.step_reporter(on_step, sigmas), part.memory
    for done, sigma, sigma_next in part.steps(sigmas):
        older = memory.predictions
        prediction = sigma, denoise(x_BCHW, sigma)
        if sigma_next == 0.0:
            older = []
        weights = [0.5 * (1.0 - sigma_next / sigma) / node for node in _nodes(sigma, sigma_next, older)]
        x_BCHW = _advance(x_BCHW, prediction, sigma_next, older, weights)
        memory.predictions = [prediction]
        report_step(done, x_BCHW)
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

    def __call__(
        self,
        denoise: Denoise,
        x_BCHW: Tensor,
        sigmas: Tensor,
        noise: Noise,
        on_step: OnStep,
        *,
        part: PartialRun | None = None,
    ) -> Tensor:
        """Run the sampler; see `Sampler`."""
        part = part or PartialRun()
        report_step, memory, steps = part.step_reporter(on_step, sigmas), part.memory, len(sigmas) - 1
        for done, sigma, sigma_next in part.steps(sigmas):
            # memory: the predictions that the last step used, and the latent at which it started
            prediction, predictions, start_BCHW = (sigma, denoise(x_BCHW, sigma)), memory.predictions, memory.start_BCHW
            if start_BCHW is None:
                start_BCHW = x_BCHW
            else:
                start_BCHW = self._step(start_BCHW, predictions[0], sigma, [prediction, *predictions[1:]])
            predictions = [prediction, *predictions][: min(self.order, done, steps - done + 1)]
            x_BCHW = self._step(start_BCHW, prediction, sigma_next, predictions[1:])
            memory.predictions, memory.start_BCHW = predictions, start_BCHW
            report_step(done, x_BCHW)
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


#: order 3 with "bh1": the sampler that ComfyUI and A1111 call by this name
sample_uni_pc = UniPc(3)
#: order 2 with "bh2": diffusers' UniPCMultistepScheduler, with which Wan was published
sample_uni_pc_2 = UniPc(2, grows=True)
#: samplers that draw noise in each step that does not end at 0
DRAWING = frozenset({"euler_ancestral"})
#: samplers of `FUNCTIONS` that differ for flow models. The others follow the same path for both kinds: the noisy latent
#: minus the clean one shrinks in proportion to the noise level
FLOW_FUNCTIONS: Mapping[str, Sampler] = MappingProxyType(
    {"euler_ancestral": sample_flow_ancestral, "uni_pc_2": UniPc(2, grows=True, is_flow=True)}
)
#: sampler, a key of `names.SAMPLERS` -> function
FUNCTIONS: Mapping[str, Sampler] = MappingProxyType(
    {
        "euler": sample_euler,
        "euler_ancestral": sample_euler_ancestral,
        "dpmpp_2m": sample_dpmpp_2m,
        "ddim": sample_euler,
        "uni_pc": sample_uni_pc,
        "uni_pc_2": sample_uni_pc_2,
    }
)
