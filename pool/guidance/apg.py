"""Guidance by the difference between two guesses, of which late steps leave out what lies along the prompt's own guess.

Knows one published form of it; no model and no sampler.

Sources: Sadat et al. 2024 (adaptive projected guidance), algorithm 1; `AdaptiveProjectedMixGuidance` of diffusers, and
Tencent-Hunyuan/HunyuanImage-2.1, whose figures these are.

Shape legend: B batch, C latent channels, H W latent height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from modelpool.pool.conditioning.micro_conditioning import Extras
from modelpool.pool.core.sampling_facts import Guidance, UsualRun

#: (guess for the prompt, guess for the negative prompt, noise level) -> guided guess, all of what the model predicts
Lead: TypeAlias = Callable[[Tensor, Tensor, float], Tensor]

#: steps of a schedule that are guided plainly: of an image, and of one with words to be read in it
PLAIN_STEPS, PLAIN_STEPS_OF_WORDS = 6, 39
#: how much of the differences before counts in each step, how long the sum is at most, and how many times it is taken
MOMENTUM, MOST_LENGTH, STRENGTH = -0.5, 10.0, 10.0
#: what is shorter has no direction
_SHORTEST = 1e-12
#: what a model is told of the words that are to be read in an image; zeros, or nothing, where there are none
_WORDS = "context_2"


def projects_late(usual: UsualRun | None) -> bool:
    """Whether a model that is usually run so is guided by `LateProjection`."""
    return usual is not None and usual.guidance is Guidance.PROJECTED_LATE


def plain_steps(told: Extras, count: int) -> tuple[int, ...]:
    """How many steps each of `count` images is guided plainly that a model is `told` of so."""
    if _WORDS not in told:
        return (PLAIN_STEPS,) * count
    return tuple(PLAIN_STEPS_OF_WORDS if own.any() else PLAIN_STEPS for own in told[_WORDS].ne(0))


def plainly_led(cond_BCHW: Tensor, uncond_BCHW: Tensor, strength: float | Tensor) -> Tensor:
    """The guess that is `strength` times the way from `uncond_BCHW` to `cond_BCHW`: classifier-free guidance."""
    return uncond_BCHW + (cond_BCHW - uncond_BCHW) * strength


def projected(cond_BCHW: Tensor, uncond_BCHW: Tensor, differences_BCHW: Tensor) -> Tensor:
    """`uncond_BCHW`, led on by what of `differences_BCHW` is at right angles to `cond_BCHW`, each member for itself."""
    sides = tuple(range(1, cond_BCHW.dim()))
    lengths = torch.linalg.vector_norm(differences_BCHW, dim=sides, keepdim=True)
    short_BCHW = differences_BCHW * (MOST_LENGTH / lengths).clamp(max=1.0)
    own = torch.linalg.vector_norm(cond_BCHW, dim=sides, keepdim=True).clamp(min=_SHORTEST)
    direction_BCHW = cond_BCHW / own
    along = (short_BCHW * direction_BCHW).sum(dim=sides, keepdim=True)
    led_BCHW: Tensor = uncond_BCHW + (short_BCHW - direction_BCHW * along) * STRENGTH
    return led_BCHW


class LateProjection:
    """The `Lead` of one run: plain for so many steps as each image says, then `projected`, by what differences add up
    to.

    Counts the noise levels that it is asked at. Asked again at the same level, it gives what it gave for other guesses
    of that level.
    """

    def __init__(self, cfg: float, plain: Sequence[int], first_step: int = 0) -> None:
        """`plain` is the `plain_steps` of each image, `first_step` how many steps of the schedule were left out."""
        self._cfg, self._plain, self._step = cfg, tuple(plain), first_step - 1
        self._sigma: float | None = None
        self._before_BCHW: Tensor | None = None
        self._differences_BCHW: Tensor | None = None

    def __call__(self, cond_BCHW: Tensor, uncond_BCHW: Tensor, sigma: float) -> Tensor:
        """The guided guess at `sigma`."""
        if sigma != self._sigma:
            self._step, self._sigma, self._before_BCHW = self._step + 1, sigma, self._differences_BCHW
        difference_BCHW = cond_BCHW - uncond_BCHW
        if self._before_BCHW is not None:
            difference_BCHW = difference_BCHW + self._before_BCHW * MOMENTUM
        self._differences_BCHW = difference_BCHW
        plain = [self._step < steps for steps in self._plain]
        if all(plain):
            return plainly_led(cond_BCHW, uncond_BCHW, self._cfg)
        led_BCHW = projected(cond_BCHW, uncond_BCHW, difference_BCHW)
        if not any(plain):
            return led_BCHW
        is_plain = torch.tensor(plain, device=cond_BCHW.device).view(-1, *[1] * (cond_BCHW.dim() - 1))
        return torch.where(is_plain, plainly_led(cond_BCHW, uncond_BCHW, self._cfg), led_BCHW)
