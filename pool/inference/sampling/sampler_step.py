"""What samplers have in common: their signature, their settings, and the step functions that most of them consist of.

Three rules make the result equal, bit for bit, on all devices for an equal `denoise`:
1. Coefficients are Python floats; nothing is read back from the device.
2. Tensor arithmetic is `*`, `+` and `-` only: `add(alpha=)`, `lerp` and division by a number may round differently.
3. The state keeps the dtype and the device of `x_BCHW`.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from torch import Tensor

from modelpool.pool.inference.sampling.noise_path import EXPLODING, NoisePath
from modelpool.pool.inference.sampling.partial_run import Denoised, OnStep, PartialRun, SamplerMemory
from modelpool.pool.inference.sampling.schedules import SigmaTable, sd1_sigma_table

#: (noisy x_BCHW, its noise level) -> the predicted clean latent, in the dtype and on the device of x_BCHW
Denoise: TypeAlias = Callable[[Tensor, float], Tensor]
#: () -> fresh standard normal noise like x_BCHW
Noise: TypeAlias = Callable[[], Tensor]

#: levels from this one on count as noise alone; other models have none
_PURE_NOISE = 1000.0


def _continue() -> None:
    """Do not stop."""


@dataclass(frozen=True, slots=True)
class SamplerSettings:
    """What a run sets of its sampler, and the facts about the model that some samplers need.

    eta            share of the noise that is drawn again in each step; None is the sampler's default
    s_noise        factor of the noise that is drawn
    s_churn        noise that is added before each step of Euler, Heun and DPM2, over the whole run (Karras et al. 2022,
                   algorithm 2), between the levels `s_tmin` and `s_tmax`
    order          order of a multistep method; None is its default
    path           shares of image and noise at each level
    table          noise levels of the training; None: Stable Diffusion 1's
    unconditional  returns the clean latent that the last call of `denoise` predicted without guidance; for CFG++
    check_stop     raises Stopped if the run should stop; for samplers that try a step several times
    """

    eta: float | None = None
    s_noise: float = 1.0
    s_churn: float = 0.0
    s_tmin: float = 0.0
    s_tmax: float = math.inf
    order: int | None = None
    path: NoisePath = EXPLODING
    table: SigmaTable | None = None
    unconditional: Callable[[], Tensor] | None = None
    check_stop: Callable[[], None] = _continue

    def eta_or(self, default: float) -> float:
        """Return `eta`, or the sampler's default."""
        return default if self.eta is None else self.eta

    def is_mostly_noise(self, sigma: float) -> bool:
        """Whether a latent at `sigma` has more noise than image, in a run of a model with noise alone as last level
        (zero terminal SNR). The slope there is the noise, and slopes at two levels differ by an image over the smaller
        one: times the length of a step from noise alone, thousands of images. So methods that combine slopes
        combine predicted images there, which is the same method in 1 / level."""
        return self.table is not None and self.table.sigma_max >= _PURE_NOISE and sigma >= 1.0

    def levels(self) -> SigmaTable:
        """Return the noise levels of the training."""
        return sd1_sigma_table() if self.table is None else self.table


DEFAULT_SETTINGS = SamplerSettings()


class Sampler(Protocol):
    """The signature of samplers."""

    def __call__(
        self,
        denoise: Denoise,
        x_BCHW: Tensor,
        sigmas: Tensor,
        noise: Noise,
        on_step: OnStep,
        *,
        part: PartialRun | None = None,
        settings: SamplerSettings = DEFAULT_SETTINGS,
    ) -> Tensor:
        """Return the latent after the last step.

        It knows neither model, text, guidance nor seed: only `denoise`, which predicts the clean latent of a noisy one.
        With `part` it runs only some of the steps, and its state between two steps is in the part's memory.
        """


@dataclass(slots=True, eq=False)
class Step:
    """One step of a sampler: from level `sigma` down to `sigma_next`.

    levels  all levels of the run, the last one 0
    done    number of steps done after this one
    memory  what earlier steps stored for this one
    """

    denoise: Denoise
    noise: Noise
    settings: SamplerSettings
    memory: SamplerMemory
    levels: Sequence[float]
    done: int
    sigma: float
    sigma_next: float
    _drawn: list[tuple[float, float, Tensor]] = field(default_factory=list)

    @property
    def is_last(self) -> bool:
        """Whether it ends at the clean latent."""
        return self.sigma_next == 0.0

    @property
    def steps_left(self) -> int:
        """Number of steps after this one."""
        return len(self.levels) - 1 - self.done

    @property
    def path(self) -> NoisePath:
        """The shares of image and noise."""
        return self.settings.path

    def unconditional(self) -> Tensor:
        """Return what the last call of `denoise` predicted without guidance."""
        assert self.settings.unconditional is not None, "the run provides the prediction without guidance"
        return self.settings.unconditional()

    def fresh(self) -> Tensor:
        """Return fresh noise, times `s_noise`."""
        return self.noise() * self.settings.s_noise

    def increment(self, begin: float, end: float) -> Tensor:
        """Return the increment of a Brownian motion between two levels, scaled to unit variance, times `s_noise`.

        Its time is the level. Within a step, the intervals either follow each other, or begin at the same level and
        become longer: then the shorter one's increment is a part of the longer one's.
        """
        drawn = self.noise()
        if self._drawn and self._drawn[-1][0] == begin:
            _, middle, before = self._drawn[-1]
            share = (begin - middle) / (begin - end)
            drawn = before * math.sqrt(share) + drawn * math.sqrt(1.0 - share)
        self._drawn.append((begin, end, drawn))
        return drawn * self.settings.s_noise

    def remember(self, entry: Denoised, most: int) -> None:
        """Keep `entry` and the entries before it for the next steps: `most` in all, the newest first."""
        self.memory.predictions = [entry, *self.memory.predictions][:most]


@dataclass(frozen=True, slots=True)
class StepSampler:
    """A sampler that repeats a function for each step: (step, latent at its start) -> latent at its end."""

    step: Callable[[Step, Tensor], Tensor]

    def __call__(
        self,
        denoise: Denoise,
        x_BCHW: Tensor,
        sigmas: Tensor,
        noise: Noise,
        on_step: OnStep,
        *,
        part: PartialRun | None = None,
        settings: SamplerSettings = DEFAULT_SETTINGS,
    ) -> Tensor:
        """Run the steps; see `Sampler`."""
        part = part or PartialRun()
        report_step, levels = part.step_reporter(on_step, sigmas), sigmas.tolist()
        for done, sigma, sigma_next in part.steps(sigmas):
            step = Step(denoise, noise, settings, part.memory, levels, done, sigma, sigma_next)
            x_BCHW = self.step(step, x_BCHW)
            report_step(done, x_BCHW)
        return x_BCHW


def noise_of(x_BCHW: Tensor, clean_BCHW: Tensor, sigma: float) -> Tensor:
    """Return the noise in `x_BCHW` for a predicted clean latent: the derivative of x by the level."""
    return (x_BCHW - clean_BCHW) * (1.0 / sigma)


def ancestral(sigma: float, sigma_next: float, eta: float) -> tuple[float, float]:
    """Return (down, up): step down to the level `down`, then add noise `up`, to arrive at `sigma_next`.

    The squares of both add up to `sigma_next` squared. `eta` 0 draws no noise, 1 as much as DDPM. Source: Song et al.
    2021 (DDIM), equation 16.
    """
    if sigma_next == 0.0 or eta == 0.0:
        return sigma_next, 0.0
    if sigma == math.inf:  # a latent without an image: its noise can be drawn again
        return 0.0, sigma_next
    if eta == 1.0:
        ratio = sigma_next / sigma
        return sigma_next * ratio, sigma_next * math.sqrt(1.0 - ratio**2)
    up = min(sigma_next, eta * sigma_next * math.sqrt(max(0.0, 1.0 - (sigma_next / sigma) ** 2)))
    return math.sqrt(sigma_next**2 - up**2), up


@dataclass(frozen=True, slots=True)
class Renoise:
    """How noise is added after a step to below its end: x * `kept` + noise * `added`.

    down  the level that the step itself goes to
    """

    down: float
    kept: float
    added: float

    def apply(self, step: Step, x_BCHW: Tensor) -> Tensor:
        """Return `x_BCHW` with its noise."""
        return x_BCHW * self.kept + step.fresh() * self.added if self.added else x_BCHW


def renoise(step: Step, eta: float) -> Renoise:
    """Return how an ancestral sampler adds noise in `step`.

    For a flow, the level below is nearer to 0 by `eta` times the step's factor; from there the image is scaled back to
    its share at `sigma_next`, and noise makes the squares add up.
    """
    sigma, sigma_next = step.sigma, step.sigma_next
    if not step.path.is_flow:
        down, up = ancestral(sigma, sigma_next, eta)
        return Renoise(down, 1.0, up)
    ratio = sigma_next / sigma
    down = sigma_next * (ratio if eta == 1.0 else 1.0 + (ratio - 1.0) * eta)
    if step.is_last:
        return Renoise(0.0, 1.0, 0.0)
    kept = (1.0 - sigma_next) / (1.0 - down)
    return Renoise(down, kept, math.sqrt(max(0.0, sigma_next**2 - (down * kept) ** 2)))


def lagrange(nodes: Sequence[float]) -> list[list[float]]:
    """Return, for each of `nodes`, the polynomial that is 1 at it and 0 at the others: coefficients, constant first."""
    found = []
    for index, node in enumerate(nodes):
        polynomial = [1.0]
        for other in (*nodes[:index], *nodes[index + 1 :]):
            shifted, scaled = [0.0, *polynomial], [*(other * c for c in polynomial), 0.0]
            polynomial = [(a - b) / (node - other) for a, b in zip(shifted, scaled, strict=True)]
        found.append(polynomial)
    return found


def weighted(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the sum of `tensors` times `weights`."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total = total + tensor * weight
    return total
