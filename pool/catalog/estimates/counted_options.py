"""Options of a run as a dry run of it counts them: what they make the model hold, and what they hold between its calls.

The caches that decide by the content of latents (First Block Cache, TeaCache) read values, which a dry run has not:
`pool.catalog.estimates.stage_peak_bytes` counts them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from modelpool.pool.families.parts.audio_tracks import SoundTrack
from modelpool.pool.inference.conditioning.conditions import COND, UNCOND
from modelpool.pool.inference.extensions.run_extension import RunExtension, run_extension
from modelpool.pool.inference.sampling.partial_run import PartialRun
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.run_options import RUN_OPTIONS, RunOptions, limits_of
from modelpool.pool.values.core.stage_params import SampleParams
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.run_context import call_facts
from modelpool.pool.weights.patcher.blocks.applied import applied

#: pixels along a side of a cell of the latent of models with tiled diffusion
_CELL_PIXELS = 8
#: any factor of a block
_FACTOR = 0.5
#: settings that change what a run holds, by option; the others have their defaults
_SIZES = {
    "freeu": ("version", "levels"),
    "hypertile": ("tile", "depth"),
    "tiled": ("tile", "overlap", "weights"),
    "deepcache": ("layers",),
    "windows": ("length", "overlap", "schedule", "stride", "anchor"),
}


def counted_options(options: RunOptions) -> RunOptions:
    """Return options that hold as much as `options`, and act in every step: settings that change no size have their
    defaults, so that runs with other scales are not counted again."""
    return replace(options, **{name: _counted(name, option) for name, option in options.used()})


def _counted(name: str, option: Any) -> Any:
    kind: Any = RUN_OPTIONS[name]
    settings: dict[str, Any] = {key: getattr(option, key) for key in _SIZES.get(name, ())}
    for key, limits in limits_of(kind).items():
        if limits.kind == "blocks":  # whatever the factors
            settings[key] = tuple((block, _FACTOR) for block, _ in getattr(option, key))
    if {"start", "end"} <= limits_of(kind).keys():
        settings |= {"start": 0.0, "end": 1.0}
    if name == "slg":  # a call without some blocks holds no more than one with them
        settings |= {"layers": (), "single": ()}
    return kind(**settings)


@dataclass(slots=True, eq=False)
class CountedOptions:
    """The options of a run of `work`, for its dry run.

    feature_bytes  of DeepCache for one text, as far as calls were counted
    kept_bytes     of the keys and values of reference images, which are part of what the calls were counted with
    """

    work: SampleParams
    extension: RunExtension | None = None
    feature_bytes: int = 0
    kept_bytes: int = 0

    @classmethod
    def of(cls, work: SampleParams, module: nn.Module, row: str, track: SoundTrack | None = None) -> CountedOptions:
        """Return the counted options of a run of `module`, a model of the row `row`. Raises UnusableField."""
        # features are no larger in any step
        options = replace(counted_options(work.options), fbcache=None, teacache=None, deep_shrink=None)
        if options.is_empty:
            return cls(work)
        clock = StepClock(work.schedule, PartialRun())
        return cls(work, run_extension(options, ModelOptions(), module, row, clock, track))

    @property
    def model_options(self) -> ModelOptions:
        """The options of the model; the run's loop calls their sampler functions."""
        return ModelOptions() if self.extension is None else self.extension.model_options

    def call_shape(self, shape_CHW: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the latents in one call of the model: of a tile, if they are tiled."""
        tiled = self.work.options.tiled
        if tiled is None:
            return shape_CHW
        tile = tiled.tile // _CELL_PIXELS
        return (*shape_CHW[:-2], *(min(side, tile) for side in shape_CHW[-2:]))

    def around(self, call: Callable[[nn.Module], object], batch: int) -> Callable[[nn.Module], object]:
        """Return `call` of the model with `batch` texts, with the options installed: as the call that reads most."""
        if self.extension is None:
            return call
        extension, has_negative = self.extension, self.work.reads_negative
        wanted = UNCOND if has_negative else COND
        members = (wanted, *(place for place in range(batch + 1) if place != wanted))[:batch]

        def call_with_options(module: nn.Module) -> object:
            facts = {"members": members, "has_negative": has_negative, "cond_or_uncond": [0] * batch}
            with applied(module, extension.model_options), extension.installed(module), call_facts(**facts):
                made = call(module)
                self._note_features(batch)
                if extension.references is not None:
                    self.kept_bytes = extension.references.kept_bytes
                return made

        return call_with_options

    @property
    def held_bytes(self) -> int:
        """Bytes that stay from call to call, as far as calls were counted: the features of DeepCache for each group of
        texts, the tokens that SAG reads, and keys and values."""
        extra, regions = self.work.options.extra_predictions, len(self.work.regions)
        held_bytes = self.feature_bytes * (self.work.texts + extra * (1 + regions)) + self.kept_bytes
        if self.extension is not None and self.extension.attended is not None:
            attended = self.extension.attended.attended_BL
            held_bytes += 0 if attended is None else attended.nbytes
        return held_bytes

    def _note_features(self, batch: int) -> None:
        deep = None if self.extension is None else self.extension.deep_layers
        for found in () if deep is None else deep.features.values():
            tensors = found if isinstance(found, tuple) else (found,)
            size_bytes = sum(each.nbytes for each in tensors if isinstance(each, Tensor))
            self.feature_bytes = max(self.feature_bytes, -(-size_bytes // batch))
