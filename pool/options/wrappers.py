"""Wrappers: functions around the fixed points of a run, each called with the next one to call.

Knows chains of callables, not what the points do: `pool.sampling` and `pool.patcher.blocks` execute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias


class WrapperPoint(Enum):
    """Where a wrapper goes, outermost first. The arguments are those of the function that is wrapped there.

    OUTER_SAMPLE      the whole run of one image, preparation included: (noise_source, sigmas) -> latent
    PREPARE_SAMPLING  making the `denoise` function: () -> denoise
    SAMPLER_SAMPLE    the sampler: (denoise, x_BCHW, sigmas, noise, on_step) -> latent
    PREDICT_NOISE     one guided guess: (x_BCHW, sigma) -> clean latent
    CALC_COND_BATCH   the guesses of all conditions: (conditions, x_BCHW, sigma) -> list of clean latents
    APPLY_MODEL       one call of the model in sampling's terms: (x_BCHW, sigma_B, context_BLD) -> clean latents
    DIFFUSION_MODEL   one call of the diffusion module with the module's own arguments and result
    """

    OUTER_SAMPLE = "outer_sample"
    PREPARE_SAMPLING = "prepare_sampling"
    SAMPLER_SAMPLE = "sampler_sample"
    PREDICT_NOISE = "predict_noise"
    CALC_COND_BATCH = "calc_cond_batch"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"


#: (executor, *arguments of the wrapped function) -> its result; calls `executor(*arguments)` to go on
Wrapper: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class WrapperExecutor:
    """What a wrapper calls to go on: the next wrapper, or `original` after the last."""

    original: Callable[..., Any]
    wrappers: tuple[Wrapper, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the rest of the chain for these arguments."""
        if not self.wrappers:
            return self.original(*args, **kwargs)
        return self.wrappers[0](WrapperExecutor(self.original, self.wrappers[1:]), *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Wrappers:
    """The wrappers of each point in the order of their adding; the first one added is the outermost.

    entries  (key, wrapper) pairs of each point; keys need not differ, they name who added it
    """

    entries: Mapping[WrapperPoint, tuple[tuple[str, Wrapper], ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def with_wrapper(self, point: WrapperPoint, wrapper: Wrapper, key: str = "") -> Wrappers:
        """These, and `wrapper` inside those of `point` that are there."""
        return self._with(point, (*self.entries.get(point, ()), (key, wrapper)))

    def without(self, point: WrapperPoint, key: str) -> Wrappers:
        """These but for the ones that were added to `point` under `key`."""
        return self._with(point, tuple(e for e in self.entries.get(point, ()) if e[0] != key))

    def merged(self, other: Wrappers) -> Wrappers:
        """These, and inside them the ones of `other`."""
        joined = dict(self.entries)
        for point, entries in other.entries.items():
            joined[point] = (*joined.get(point, ()), *entries)
        return Wrappers(MappingProxyType(joined))

    def at(self, point: WrapperPoint) -> tuple[Wrapper, ...]:
        """The wrappers of `point`, outermost first."""
        return tuple(wrapper for _, wrapper in self.entries.get(point, ()))

    def around(self, point: WrapperPoint, original: Callable[..., Any]) -> Callable[..., Any]:
        """`original` inside the wrappers of `point`: `original` itself when there are none."""
        wrappers = self.at(point)
        return WrapperExecutor(original, wrappers) if wrappers else original

    def _with(self, point: WrapperPoint, entries: tuple[tuple[str, Wrapper], ...]) -> Wrappers:
        joined = {**self.entries, point: entries}
        return Wrappers(MappingProxyType({p: e for p, e in joined.items() if e}))
