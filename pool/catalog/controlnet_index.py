"""`ControlNetIndex`: finds ControlNets by name and keeps them open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelpool.pool.catalog.fetch_sizes import with_fetch
from modelpool.pool.catalog.registry.hub_names import name_of_file
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.inference.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import ControlRef, ModelRef
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse

#: ControlNets that stay mapped and built, without weights
CONTROLNETS_KEPT = 32
#: remembered names, the first of each file
NAMES_REMEMBERED = 65_536


class ControlNetIndex:
    """The ControlNets of one registry."""

    def __init__(
        self, registry: Registry, device: str | DeviceCapabilities, open_model: Callable[[ModelRef], OpenModel]
    ) -> None:
        """`device` is what they will run on, or the name of its kind."""
        self._registry, self._device, self._open_model = registry, device, open_model
        self._opened: LruCache[object, OpenControlNet] = LruCache(CONTROLNETS_KEPT)
        self._names: LruCache[str, str] = LruCache(NAMES_REMEMBERED)

    def find(self, name: str, strength: float, start: float, end: float, mode: str | int | None = None) -> ControlRef:
        """Return the ControlNet named `name`. A copy of a file that was requested before gets the name of that file,
        but its file name and folder configuration are read for each path. `ControlRef.mask_mode` is how it marks
        inpainted pixels. Raises UnknownName, AmbiguousName, CorruptFile or UnknownArchitecture, and UnusableField for a
        `mode` that it does not have."""
        file = self._registry.find_controlnet(name)
        digest = self._registry.hashes(file).sha256
        known_name = self._names.setdefault(digest, name_of_file(file.path))
        path, files = self._registry.locate(file)
        found = ControlRef(known_name, path, digest, strength, start, end, files=files)
        opened = self.opened(found)
        number, overrides, bright = (
            opened.mode_of(mode),
            opened.settings_at(file.path),
            opened.reads_bright_at(file.path),
        )
        latent, hole = opened.kind.reads_latent, opened.mask_form_at(file.path, mode)
        return replace(
            found,
            mode=number,
            reads_latent=latent,
            bright=bright,
            config_overrides=overrides,
            mask_mode=hole,
            is_blockwise=opened.kind.is_blockwise,
        )

    def use_with(self, model: ModelRef, control: ControlRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        """Return the size of a ControlNet, and what a run with `model` needs of it. Raises CorruptFile,
        UnknownArchitecture, or UnusableField for one that was trained for other models."""
        opened = self.opened(control)
        opened.check_fits(self._open_model(model))
        return with_fetch(opened.spec(), control.files), opened.use(passes)

    def opened(self, control: ControlRef) -> OpenControlNet:
        """Return the ControlNet, built. Raises CorruptFile or UnknownArchitecture."""
        described = replace(control, path=self._registry.described_path(control.path))
        return self._opened.get(control.content, lambda: OpenControlNet(described, self._device))
