"""Samplers: how a run gets from one noise level to the next.

Each is a function `sample(denoise, x_BCHW, sigmas, noise, on_step)`. It knows neither model, text, guidance nor seed:
only `denoise`, which turns a noisy latent into a guess of the clean one, and which it calls once a step. With `part` it
makes some of the steps only, and what it looks back to is in the part's memory.

Three rules make the result the same, bit for bit, on every device on which `denoise` is:
1. Coefficients are Python floats; nothing is read back from the device.
2. Tensor arithmetic is `*`, `+` and `-` only: `add(alpha=)`, `lerp` and dividing by a number may round otherwise there.
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

from modelpool.pool.sampling.partial_run import Guess, Part
from modelpool.pool.sampling.partial_run import OnStep as OnStep

#: of the image in what is noise alone, so that their ratio is a number. Source: diffusers' UniPCMultistepScheduler
_LEAST_SHARE = 1e-6
#: (noisy x_BCHW, its noise level) -> the clean latent it hides, in the dtype and on the device of x_BCHW
Denoise: TypeAlias = Callable[[Tensor, float], Tensor]
#: () -> fresh standard normal noise like x_BCHW
Noise: TypeAlias = Callable[[], Tensor]


class Sampler(Protocol):
    """What the functions of this module are called as."""

    def __call__(
        self,
        denoise: Denoise,
        x_BCHW: Tensor,
        sigmas: Tensor,
        noise: Noise,
        on_step: OnStep,
        *,
        part: Part | None = None,
    ) -> Tensor:
        """The latent after the last step."""


def sample_euler(
    denoise: Denoise, x_BCHW: Tensor, sigmas: Tensor, noise: Noise, on_step: OnStep, *, part: Part | None = None
) -> Tensor:
    """Euler's method on the probability flow; first order. In this variable it is also DDIM with eta 0.

    Source: Karras et al. 2022, algorithm 1 without its correction; Song et al. 2021 (DDIM), section 4.3.
    """
    part = part or Part()
    told = part.telling(on_step, sigmas)
    for done, sigma, sigma_next in part.steps(sigmas):
        x_BCHW = _advance(x_BCHW, (sigma, denoise(x_BCHW, sigma)), sigma_next)
        told(done)
    return x_BCHW


def sample_euler_ancestral(
    denoise: Denoise,
    x_BCHW: Tensor,
    sigmas: Tensor,
    noise: Noise,
    on_step: OnStep,
    left: float = 0.0,
    *,
    part: Part | None = None,
) -> Tensor:
    """Euler's method to below each noise level, and fresh noise to come up to it again (eta 1).

    Draws from `noise` once a step, but not in one that ends at 0. With `left` that one is made as if it ended at so
    much noise, and what comes out is brought to unit variance: DDPM over a table whose first level is `left`.
    Sources: k-diffusion, `sample_euler_ancestral`; Ho et al. 2020 (DDPM), algorithm 2, which is the same in other
    variables.
    """
    part = part or Part()
    told = part.telling(on_step, sigmas)
    for done, sigma, sigma_next in part.steps(sigmas):
        end = sigma_next or left
        ratio = end / sigma
        below, fresh = end * ratio, end * math.sqrt(1.0 - ratio**2)  # squares add up to end**2
        x_BCHW = _advance(x_BCHW, (sigma, denoise(x_BCHW, sigma)), below)
        if sigma_next > 0.0:
            x_BCHW = x_BCHW + noise() * fresh
        elif left:
            x_BCHW = x_BCHW * (1.0 / math.hypot(1.0, left))
        told(done)
    return x_BCHW


def sample_flow_ancestral(
    denoise: Denoise, x_BCHW: Tensor, sigmas: Tensor, noise: Noise, on_step: OnStep, *, part: Part | None = None
) -> Tensor:
    """`sample_euler_ancestral` for models that predict the flow, where less noise is more of the image.

    From below each level the image is taken back to its share there, and fresh noise makes the squares add up.
    Draws from `noise` once a step, but not in one that ends at 0. The distance below is that of the plain one.
    """
    part = part or Part()
    told = part.telling(on_step, sigmas)
    for done, sigma, sigma_next in part.steps(sigmas):
        below = sigma_next * (sigma_next / sigma)
        x_BCHW = _advance(x_BCHW, (sigma, denoise(x_BCHW, sigma)), below)
        if sigma_next > 0.0:
            back = (1.0 - sigma_next) / (1.0 - below)
            x_BCHW = x_BCHW * back + noise() * math.sqrt(max(0.0, sigma_next**2 - (below * back) ** 2))
        told(done)
    return x_BCHW


def sample_dpmpp_2m(
    denoise: Denoise, x_BCHW: Tensor, sigmas: Tensor, noise: Noise, on_step: OnStep, *, part: Part | None = None
) -> Tensor:
    """DPM-Solver++(2M): second order, from the slope between the last two guesses; first in the first step and to 0.

    Source: Lu et al. 2022 (DPM-Solver++), algorithm 2.
    """
    part = part or Part()
    told, memory = part.telling(on_step, sigmas), part.memory
    for done, sigma, sigma_next in part.steps(sigmas):
        older = memory.guesses
        guess = sigma, denoise(x_BCHW, sigma)
        if sigma_next == 0.0:
            older = []
        weights = [0.5 * (1.0 - sigma_next / sigma) / node for node in _nodes(sigma, sigma_next, older)]
        x_BCHW = _advance(x_BCHW, guess, sigma_next, older, weights)
        memory.guesses = [guess]
        told(done)
    return x_BCHW


@dataclass(frozen=True, slots=True)
class UniPc:
    """A form of UniPC. Each guess corrects the step that led to it, then predicts the next.

    order    of steps that have enough behind and before them: lower in the first and in the last ones, as published
    grows    B(h) = exp(h) - 1 ("bh2") and not h ("bh1")
    is_flow  the way is reckoned in the ratio of noise and image, and not in noise beside an image of unit scale

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
        part: Part | None = None,
    ) -> Tensor:
        """As every sampler."""
        part = part or Part()
        told, memory, steps = part.telling(on_step, sigmas), part.memory, len(sigmas) - 1
        for done, sigma, sigma_next in part.steps(sigmas):
            # memory: as many guesses as the last prediction used, and where that began
            guess, guesses, start_BCHW = (sigma, denoise(x_BCHW, sigma)), memory.guesses, memory.start_BCHW
            if start_BCHW is None:
                start_BCHW = x_BCHW
            else:
                start_BCHW = self._step(start_BCHW, guesses[0], sigma, [guess, *guesses[1:]])
            guesses = [guess, *guesses][: min(self.order, done, steps - done + 1)]
            x_BCHW = self._step(start_BCHW, guess, sigma_next, guesses[1:])
            memory.guesses, memory.start_BCHW = guesses, start_BCHW
            told(done)
        return x_BCHW

    def _step(self, x: Tensor, guess: Guess, sigma_next: float, others: Sequence[Guess]) -> Tensor:
        """`x` taken to `sigma_next` along the polynomial through `guess` and `others`.

        UniC if `others` begins with the guess at `sigma_next`, UniP if not.
        """
        if not others:
            return _advance(x, guess, sigma_next)
        (sigma, _), share = guess, 1.0 - sigma_next if self.is_flow else 1.0
        begin, end = self._level(sigma), self._level(sigma_next)
        nodes = _nodes(begin, end, [(self._level(other), each) for other, each in others])
        weights = _uni_pc_weights(begin, end, nodes, self.grows)
        return _advance(x, guess, sigma_next, others, [weight * share for weight in weights])

    def _level(self, sigma: float) -> float:
        """What the way is reckoned in."""
        return sigma / max(1.0 - sigma, _LEAST_SHARE) if self.is_flow else sigma


def _advance(
    x: Tensor, guess: Guess, sigma_next: float, others: Sequence[Guess] = (), weights: Sequence[float] = ()
) -> Tensor:
    """`x` taken from the level of `guess` to `sigma_next`: weight * (other - guess) moves it off a constant guess.

    With u = log(sigma / s) for a noise level s on the way, and h its value at the end, the flow solves to
    x(h) = exp(-h) x(0) + integral of exp(u - h) x0(u) du from 0 to h. Every sampler here is a choice of x0(u).
    """
    sigma, x0 = guess
    x = x * (sigma_next / sigma) + x0 * (1.0 - sigma_next / sigma)
    for weight, (_, other) in zip(weights, others, strict=True):
        x = x + (other - x0) * weight
    return x


def _nodes(sigma: float, sigma_next: float, others: Sequence[Guess]) -> list[float]:
    """Where the levels of `others` lie, evenly in log(sigma), when `sigma` is at 0 and `sigma_next` at 1."""
    return [math.log(sigma / other) / math.log(sigma / sigma_next) for other, _ in others]


def _uni_pc_weights(sigma: float, sigma_next: float, nodes: Sequence[float], grows: bool) -> list[float]:
    """What each node's difference from the guess at 0 weighs: the integral of its Lagrange polynomial.

    These solve the equations that the paper writes with B(h), which drops out of them. It stays where the paper
    shortens them, with a single node.
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


#: of order 3 with "bh1": what ComfyUI and A1111 mean by the name
sample_uni_pc = UniPc(3)
#: of order 2 with "bh2": what diffusers' UniPCMultistepScheduler means by it, with which Wan was published
sample_uni_pc_2 = UniPc(2, grows=True)
#: those that draw noise in each step that does not end at 0
DRAWING = frozenset({"euler_ancestral"})
#: those of `FUNCTIONS` that are otherwise for models that predict the flow. The others follow a path that is the same
#: for both: where the noisy latent less the clean one shrinks as the noise level does
FLOW_FUNCTIONS: Mapping[str, Sampler] = MappingProxyType(
    {"euler_ancestral": sample_flow_ancestral, "uni_pc_2": UniPc(2, grows=True, is_flow=True)}
)
#: sampler, a key of `names.SAMPLERS` -> the function
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
