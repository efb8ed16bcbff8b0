"""Combines the options of a run (`pool.values.core.run_options`) to the options of its model, and to what they require
of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch import nn

from modelpool.pool.families.parts.audio_tracks import SoundTrack, guided_track
from modelpool.pool.inference.conditioning.run_parts import DenoisingRun, RunPart
from modelpool.pool.inference.extensions.block_factors import check_block_factors, with_block_factors
from modelpool.pool.inference.extensions.block_runs import check_published, unknown_blocks, with_block_runs
from modelpool.pool.inference.extensions.deep_cache import DeepLayers, check_layers
from modelpool.pool.inference.extensions.deep_shrink import ShrunkFeatures, check_block
from modelpool.pool.inference.extensions.differential_mask import mask_of_level
from modelpool.pool.inference.extensions.epsilon_scaling import epsilon_scaling
from modelpool.pool.inference.extensions.frame_windows import WindowedCalls, repeated_noise
from modelpool.pool.inference.extensions.freeu import freeu_patch
from modelpool.pool.inference.extensions.perturbed_guidance import (
    isolated_call,
    isolation_guidance,
    perturbed_guidance,
    self_attention_guidance,
)
from modelpool.pool.inference.extensions.reference_cache import ReadReferences
from modelpool.pool.inference.extensions.tiled_diffusion import tiled_model
from modelpool.pool.inference.extensions.unet_attention import AttendedTokens, check_attention, with_unet_attention
from modelpool.pool.inference.sampling.schedules import SigmaTable
from modelpool.pool.inference.sampling.step_clock import StepClock
from modelpool.pool.values.core.errors import unusable_field
from modelpool.pool.values.core.run_options import RotaryPositions, RunOptions
from modelpool.pool.values.core.stage_params import RunHooks
from modelpool.pool.weights.options.model_options import ModelOptions
from modelpool.pool.weights.options.run_context import current_run
from modelpool.pool.weights.options.transformer_options import RopeOptions
from modelpool.pool.weights.options.wrappers import WrapperPoint
from modelpool.pool.weights.patcher.blocks.overlays import Overlays

#: the key of our wrappers
_KEY = "run options"


@dataclass(frozen=True, slots=True, eq=False)
class RunExtension:
    """The options of one run, applied to its model.

    model_options  the patcher's options with these
    deep_layers    of DeepCache
    attended       the tokens that SAG reads
    shrunk         features of deep shrink
    references     keys and values of reference images
    """

    options: RunOptions
    clock: StepClock
    model_options: ModelOptions
    deep_layers: DeepLayers | None = None
    attended: AttendedTokens | None = None
    shrunk: ShrunkFeatures | None = None
    references: ReadReferences | None = None

    @property
    def texts_apart(self) -> bool:
        """Whether the model reads each text by itself: the caches decide for each."""
        return self.options.skips_by_content

    def limited(self, hooks: RunHooks) -> RunHooks:
        """Return `hooks` that offer a checkpoint, or a pause, only between steps where no cache has a state: the run
        that continues there computes the same pixels."""
        if self.deep_layers is None and not self.options.skips_by_content:
            return hooks

        def should_pause() -> bool:
            return self._is_stateless and hooks.should_pause()

        return replace(
            hooks,
            should_pause=should_pause,
            checkpoint=lambda states: hooks.checkpoint(states) if self._is_stateless else None,
        )

    @property
    def _is_stateless(self) -> bool:
        """Whether the next step reads nothing that a cache remembers."""
        return self.deep_layers is not None and self.deep_layers.computes(self.clock.now)

    @contextmanager
    def installed(self, module: nn.Module) -> Iterator[None]:
        """Install all but the options of the model on `module` inside the block; enter it inside of the run. Raises
        UnusableField."""
        run = current_run(module)
        parts = [part for part in (self.deep_layers, self.shrunk, self.references) if part is not None]
        if not parts or run is None:
            yield
            return
        overlays = Overlays(run)
        try:
            for part in parts:
                part.install(overlays, module)
            yield
        finally:
            overlays.remove()
            if self.deep_layers is not None:
                self.deep_layers.features.clear()
            if self.references is not None:
                self.references.kept = None


def check_fits(options: RunOptions, module: nn.Module, row: str) -> None:
    """Raise UnusableField for options that name layers which `module`, a model of the row `row`, lacks, or that are not
    for its size. Its family supports them."""
    if options.teacache is not None:
        check_published(module, row)
    if options.slg is not None and (unknown := unknown_blocks(options.slg, module)):
        raise unusable_field("options.slg", unknown[0], f"a block of this {type(module).__name__}")
    if options.deepcache is not None:
        check_layers(options.deepcache, module)
    if options.deep_shrink is not None:
        check_block(options.deep_shrink, module)
    if options.rope is not None:
        check_rope(options.rope, module)
    check_block_factors(options, module)
    check_attention(options, module)


def check_rope(option: RotaryPositions, module: nn.Module) -> None:
    """Raise UnusableField for a change of the first coordinate of a model that does not read it."""
    axes = getattr(getattr(module, "config", None), "axes_dims_rope", (1,))
    for name in ("scale_t", "shift_t"):
        if not axes[0] and getattr(option, name) != getattr(RotaryPositions(), name):
            expected = f"only x and y: the positions of this {type(module).__name__} have two coordinates"
            raise unusable_field(f"options.rope.{name}", getattr(option, name), expected)


def run_options_part(run: DenoisingRun) -> RunPart | None:
    """Give the model and the hooks of the run its options. Raises UnusableField."""
    work = run.work
    if work.options.is_empty:
        return None
    track = SoundTrack.of(run.facts.video, work.shape.frames, work.shape.frame_rate, work.shape.leading)
    has_fixed_weights = run.resources.patches_at is None
    extension = run_extension(
        work.options, run.options, run.model.module, run.facts.model, run.clock, track, run.table, has_fixed_weights
    )
    run.hooks, run.options = extension.limited(run.hooks), extension.model_options
    if extension.texts_apart:
        run.max_batch = 1
    if (differential := work.options.differential) is not None:
        function = mask_of_level(differential, run.table)
        run.options = run.options.with_denoise_mask_function(function)
    if (windows := work.options.windows) is not None and windows.freenoise:
        wrapper = repeated_noise(windows, [each.seed for each in run.works])
        run.options = run.options.with_wrapper(WrapperPoint.OUTER_SAMPLE, wrapper, _KEY)
    return RunPart(around=extension.installed)


def run_extension(
    options: RunOptions,
    model_options: ModelOptions,
    module: nn.Module,
    row: str,
    clock: StepClock,
    track: SoundTrack | None = None,
    table: SigmaTable | None = None,
    has_fixed_weights: bool = True,
) -> RunExtension:
    """Return `options` for a run of `module`, a model of the row `row` with `model_options`. `track` is the audio of
    its videos, `table` the noise levels of its training; its weights may change between calls. The caller has checked
    that the family supports them. Raises UnusableField as `check_fits` does."""
    attended, found = AttendedTokens(), model_options
    check_fits(options, module, row)
    if options.attention_scale is not None or options.block_scale is not None:
        found = found.with_transformer(lambda t: with_block_factors(t, options, module, clock))
    if options.pag is not None or options.sag is not None or options.hypertile is not None:
        found = found.with_transformer(lambda t: with_unet_attention(t, options, module, clock, attended))
    if options.slg is not None or options.skips_by_content:
        found = found.with_transformer(lambda t: with_block_runs(t, options, module, row, clock))
    if options.rope is not None:
        rope = RopeOptions(**dataclasses.asdict(options.rope))
        found = found.with_transformer(lambda t: t.with_rope_options(rope))
    if options.freeu is not None:
        patch = freeu_patch(options.freeu, module)
        found = found.with_transformer(lambda t: t.with_output_block_patch(patch))
    if options.pag is not None:
        found = found.with_sampler_post_cfg_function(perturbed_guidance("pag", options.pag, clock))
    if options.slg is not None:
        found = found.with_sampler_post_cfg_function(perturbed_guidance("slg", options.slg, clock))
    if options.sag is not None:
        found = found.with_sampler_post_cfg_function(self_attention_guidance(options.sag, clock, attended))
    if options.isolation is not None:
        assert track is not None, "the family has sound"
        own = guided_track(track, options.sound)
        found = found.with_sampler_post_cfg_function(isolation_guidance(options.isolation, own, clock))
        found = found.with_wrapper(WrapperPoint.DIFFUSION_MODEL, isolated_call, _KEY)
    if options.epsilon_scaling is not None:  # of the guided prediction
        found = found.with_sampler_post_cfg_function(epsilon_scaling(options.epsilon_scaling))
    if options.tiled is not None:
        found = found.with_wrapper(WrapperPoint.APPLY_MODEL, tiled_model(options.tiled), _KEY)
    shrunk = None
    if options.deep_shrink is not None:
        shrunk = ShrunkFeatures(options.deep_shrink, clock, table)
        found = found.with_wrapper(WrapperPoint.DIFFUSION_MODEL, shrunk.around_call, _KEY)
    if options.windows is not None:
        calls = WindowedCalls.of(options.windows, clock, module)
        found = found.with_wrapper(WrapperPoint.DIFFUSION_MODEL, calls.around_call, _KEY)
    references = None
    if options.kv_cache is not None:
        references = ReadReferences(options.kv_cache, has_fixed_weights)
        found = found.with_wrapper(WrapperPoint.DIFFUSION_MODEL, references.around_call, _KEY)
    if options.deepcache is None:
        return RunExtension(options, clock, found, attended=attended, shrunk=shrunk, references=references)
    deep_layers = DeepLayers(options.deepcache, clock)
    found = found.with_wrapper(WrapperPoint.DIFFUSION_MODEL, deep_layers.around_call, _KEY)
    return RunExtension(options, clock, found, deep_layers, attended)
