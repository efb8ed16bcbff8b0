"""Restart sampling: Heun's method that goes back to a high noise level and down again.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from modelpool.pool.inference.sampling.noise_path import NoisePath
from modelpool.pool.inference.sampling.partial_run import OnStep, PartialRun
from modelpool.pool.inference.sampling.runge_kutta import heun_end
from modelpool.pool.inference.sampling.sampler_step import DEFAULT_SETTINGS, Denoise, Noise, SamplerSettings
from modelpool.pool.values.core.errors import counted

#: Restart: levels (noise / image) between which the run goes up again, and by how many steps. Source: Xu et al. 2023,
#: table 3 and the rule that A1111 uses for any number of steps
_RESTART_LOW, _RESTART_HIGH = 0.1, 2.0


def restart_steps(levels: Sequence[float], path: NoisePath) -> list[tuple[float, float]]:
    """Return the (begin, end) of each step of a run with restarts, as many as `levels` has: its ends, Karras' spacing
    between them, and one or two passes more over the range of the restart."""
    steps = len(levels) - 1
    repeats, extra = (2, steps // 4) if steps >= 36 else (1, 9) if steps >= 20 else (0, 0)
    if not repeats:
        return list(pairwise(levels))
    main = [*_karras(levels[0], levels[-2], steps - repeats * extra), 0.0]
    low, high = (_nearest(main, path.sigma(-math.log(ratio))) for ratio in (_RESTART_LOW, _RESTART_HIGH))
    found: list[tuple[float, float]] = []
    for place, step in enumerate(pairwise(main)):
        found.append(step)
        if place + 1 == low and high < low:
            found += list(pairwise(_karras(main[high], main[low], extra + 1))) * repeats
    return found


def _karras(high: float, low: float, count: int) -> list[float]:
    """Return `count` levels, even in sigma ** (1 / 7). Source: Karras et al. 2022, equation 5."""
    begin, end = high ** (1 / 7), low ** (1 / 7)
    return [(begin + (end - begin) * i / max(count - 1, 1)) ** 7 for i in range(count)]


def _nearest(levels: Sequence[float], level: float) -> int:
    return min(range(len(levels)), key=lambda place: abs(levels[place] - level))


def sample_restart(
    denoise: Denoise,
    x_BCHW: Tensor,
    sigmas: Tensor,
    noise: Noise,
    on_step: OnStep,
    *,
    part: PartialRun | None = None,
    settings: SamplerSettings = DEFAULT_SETTINGS,
) -> Tensor:
    """Heun's method that goes back to a high noise level and down again, from 20 steps on.

    Source: Xu et al. 2023 ("Restart Sampling for Improving Generative Processes"), algorithm 1.
    """
    part = part or PartialRun()
    report_step, path = part.step_reporter(on_step, sigmas), settings.path
    steps = restart_steps(sigmas.tolist(), path)
    assert len(steps) <= len(sigmas) - 1, f"{counted(len(steps), 'step')} of {len(sigmas) - 1}"
    counts = [*range(1, len(steps)), len(sigmas) - 1]
    for place in part.spans(counts):
        (sigma, end), before = steps[place], steps[place - 1][1] if place else None
        if before is not None and before < sigma:
            kept = path.image(sigma) / path.image(before)
            added = math.sqrt(max(0.0, sigma**2 - (before * kept) ** 2))
            x_BCHW = x_BCHW * kept + noise() * (settings.s_noise * added)
        clean_BCHW = denoise(x_BCHW, sigma)
        x_BCHW = heun_end(denoise, x_BCHW, clean_BCHW, sigma, end, settings) if end > 0.0 else clean_BCHW
        report_step(counts[place], x_BCHW)
    return x_BCHW
