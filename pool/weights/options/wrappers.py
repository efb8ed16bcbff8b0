"""Wrappers: functions around fixed points of a run, each of which calls the next.

Builds the chains; `pool.inference` and `pool.weights.patcher.blocks` execute them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias


class WrapperPoint(Enum):
    """Point of a wrapper, outermost first, with the arguments and result of the function that is wrapped there.

    OUTER_SAMPLE      the complete run of one image, including preparation: (noise_source, sigmas) -> latent
    PREPARE_SAMPLING  creation of the `denoise` function: () -> denoise
    SAMPLER_SAMPLE    the sampler: (denoise, x_BCHW, sigmas, noise, on_step) -> latent
    PREDICT_NOISE     one guided prediction: (x_BCHW, sigma) -> denoised latent
    CALC_COND_BATCH   the predictions of all conditions: (conditions, x_BCHW, sigma) -> list of denoised latents
    APPLY_MODEL       one call of the model in terms of sampling: (x_BCHW, sigma_B, context_BLD) -> denoised latents
    DIFFUSION_MODEL   one call of the diffusion module with the module's arguments and result
    """

    OUTER_SAMPLE = "outer_sample"
    PREPARE_SAMPLING = "prepare_sampling"
    SAMPLER_SAMPLE = "sampler_sample"
    PREDICT_NOISE = "predict_noise"
    CALC_COND_BATCH = "calc_cond_batch"
    APPLY_MODEL = "apply_model"
    DIFFUSION_MODEL = "diffusion_model"


#: (executor, *arguments of the wrapped function) -> its result; calls `executor(*arguments)` to continue
Wrapper: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class WrapperExecutor:
    """Calls the next wrapper of a chain, or `original` after the last."""

    original: Callable[..., Any]
    wrappers: tuple[Wrapper, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the rest of the chain for these arguments."""
        if not self.wrappers:
            return self.original(*args, **kwargs)
        return self.wrappers[0](WrapperExecutor(self.original, self.wrappers[1:]), *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Wrappers:
    """The wrappers of each point in the order in which they were added; the first one is the outermost.

    entries  (key, wrapper) pairs of each point; keys need not be unique, they name who added the wrapper
    """

    entries: Mapping[WrapperPoint, tuple[tuple[str, Wrapper], ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def with_wrapper(self, point: WrapperPoint, wrapper: Wrapper, key: str = "") -> Wrappers:
        """Return these with `wrapper` added inside the others of `point`."""
        return self._with(point, (*self.entries.get(point, ()), (key, wrapper)))

    def without(self, point: WrapperPoint, key: str) -> Wrappers:
        """Return these without the ones added to `point` under `key`."""
        return self._with(point, tuple(e for e in self.entries.get(point, ()) if e[0] != key))

    def merged(self, other: Wrappers) -> Wrappers:
        """Return these wrappers around the wrappers of `other`."""
        joined = dict(self.entries)
        for point, entries in other.entries.items():
            joined[point] = (*joined.get(point, ()), *entries)
        return Wrappers(MappingProxyType(joined))

    def at(self, point: WrapperPoint) -> tuple[Wrapper, ...]:
        """Return the wrappers of `point`, outermost first."""
        return tuple(wrapper for _, wrapper in self.entries.get(point, ()))

    def around(self, point: WrapperPoint, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `original` inside the wrappers of `point`; `original` itself when there are none."""
        wrappers = self.at(point)
        return WrapperExecutor(original, wrappers) if wrappers else original

    def _with(self, point: WrapperPoint, entries: tuple[tuple[str, Wrapper], ...]) -> Wrappers:
        joined = {**self.entries, point: entries}
        return Wrappers(MappingProxyType({p: e for p, e in joined.items() if e}))
