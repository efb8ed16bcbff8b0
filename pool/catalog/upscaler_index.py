"""`UpscalerIndex`: finds upscalers by name, keeps them open, and estimates what a run of them needs."""

from __future__ import annotations

from dataclasses import replace

from modelpool.pool.catalog.fetch_sizes import with_fetch
from modelpool.pool.catalog.registry.hub_names import name_of_file
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.inference.upscalers.open_upscaler import OpenUpscaler, upscaler_plan_of
from modelpool.pool.inference.upscalers.upscale import TILES, Tiles
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import UpscaleParams, UpscalerRef
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, ExecutionMode
from modelpool.pool.weights.patcher.weight_bytes import module_bytes
from modelpool.pool.weights.plan.eviction_plan import ModuleBytes
from modelpool.pool.weights.tracing.activation_bytes import with_margin

#: upscalers that stay mapped and built, without weights
UPSCALERS_KEPT = 16
#: remembered names, the first of each file
NAMES_REMEMBERED = 65_536
#: first estimate of seconds for each pixel and byte of weights; the scheduler corrects it by measurements
_PRIOR_SECONDS_PER_PIXEL_BYTE = 1e-13
_PRIOR_SECONDS = 0.02


class UpscalerIndex:
    """The upscalers of one registry."""

    def __init__(self, registry: Registry, device: str | DeviceCapabilities, allow_pickle: bool) -> None:
        """`device` is what they will run on, or the name of its kind."""
        self._registry, self._device, self._allow_pickle = registry, device, allow_pickle
        self._kind = device if isinstance(device, str) else device.kind.value
        self._opened: LruCache[str, OpenUpscaler] = LruCache(UPSCALERS_KEPT)
        self._names: LruCache[str, str] = LruCache(NAMES_REMEMBERED)

    def find(self, name: str) -> UpscalerRef:
        """Return the upscaler named `name`. A copy of a file that was requested before gets the name of that file.
        Raises UnknownName, AmbiguousName, CorruptFile, UnsafeFile or UnknownArchitecture."""
        file = self._registry.find_upscaler(name)
        digest = self._registry.hashes(file).sha256
        known_name = self._names.setdefault(digest, name_of_file(file.path))
        path, files = self._registry.locate(file)
        described = self._registry.described_path(path)
        # the registry has refused a pickle that is not allowed
        plan = upscaler_plan_of(described, allow_pickle=True)
        return UpscalerRef(known_name, path, digest, plan.scale, files, plan.latent_channels)

    def needs(self, work: UpscaleParams) -> tuple[ComponentSpec, ComponentUse]:
        """Return the size of the upscaler of `work`, and what a run needs of it. Raises CorruptFile or
        UnknownArchitecture."""
        opened = self._of(work.model)
        return with_fetch(opened.spec(), work.model.files), opened.use()

    def execution_modes(self, work: UpscaleParams) -> tuple[ExecutionMode, ...]:
        """Return `work` as requested, then by smaller and smaller tiles, each with its activation bytes."""
        opened = self._of(work.model)
        if work.vae is not None:
            counted_bytes = opened.activation_bytes(work.width, work.height, max(1, work.frames))
            planned_bytes = with_margin(counted_bytes, self._kind)
            return (ExecutionMode(planned_bytes, counted_bytes=planned_bytes),)
        step = getattr(opened.module, "unshuffle", 1)

        def mode_of(tile: int) -> ExecutionMode:
            tiles = Tiles.of(work.width, work.height, tile, work.overlap, step)
            height, width = tiles.computed
            slowdown = tiles.slowdown(work.width, work.height)
            counted_bytes = opened.activation_bytes(min(width, work.width), min(height, work.height))
            planned_bytes = with_margin(counted_bytes, self._kind)
            return ExecutionMode(planned_bytes, tile=tile, slowdown=slowdown, counted_bytes=planned_bytes)

        modes = [replace(mode_of(work.tile), tile=0, slowdown=1.0)]
        for tile in TILES:
            if tile < (work.tile or max(work.width, work.height)):
                mode = mode_of(tile)
                if mode.activation_bytes < modes[-1].activation_bytes:
                    modes.append(mode)
        return tuple(modes)

    def modules(self, work: UpscaleParams) -> tuple[ModuleBytes, ...]:
        """Return the modules of the upscaler of `work`, without operation counts."""
        opened = self._of(work.model)
        return tuple(module_bytes(opened.weights, opened.form))

    def run_seconds(self, work: UpscaleParams) -> float:
        """Return a first estimate of the run time of `work`, accurate to an order of magnitude."""
        weight_bytes = self._of(work.model).spec().weight_bytes
        pixels = work.width * work.height * max(1, work.frames)
        return _PRIOR_SECONDS + pixels * weight_bytes * _PRIOR_SECONDS_PER_PIXEL_BYTE

    def _of(self, upscaler: UpscalerRef) -> OpenUpscaler:
        described = replace(upscaler, path=self._registry.described_path(upscaler.path))
        return self._opened.get(upscaler.sha256, lambda: OpenUpscaler(described, self._device))
