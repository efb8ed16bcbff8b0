"""`GligenIndex`: finds GLIGEN models by name and keeps them open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelpool.pool.catalog.fetch_sizes import with_fetch
from modelpool.pool.catalog.registry.hub_names import name_of_file
from modelpool.pool.catalog.registry.registry import Registry
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.inference.controlnets.open_gligen import OpenGligen
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.values.core.lru_cache import LruCache
from modelpool.pool.values.core.stage_params import GligenRef, ModelRef
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse

#: GLIGEN models that stay mapped and built, without weights
GLIGENS_KEPT = 8
#: remembered names, the first of each file
NAMES_REMEMBERED = 1024


class GligenIndex:
    """The GLIGEN models of one registry."""

    def __init__(
        self, registry: Registry, device: str | DeviceCapabilities, open_model: Callable[[ModelRef], OpenModel]
    ) -> None:
        """`device` is what they will run on, or the name of its kind."""
        self._registry, self._device, self._open_model = registry, device, open_model
        self._opened: LruCache[object, OpenGligen] = LruCache(GLIGENS_KEPT)
        self._names: LruCache[str, str] = LruCache(NAMES_REMEMBERED)

    def find(self, name: str) -> GligenRef:
        """Return the GLIGEN model named `name`, without boxes. Raises UnknownName, AmbiguousName, CorruptFile or
        UnknownArchitecture."""
        file = self._registry.find_gligen(name)
        digest = self._registry.hashes(file).sha256
        path, files = self._registry.locate(file)
        found = GligenRef(self._names.setdefault(digest, name_of_file(file.path)), path, digest, files=files)
        self.opened(found)
        return found

    def use_with(self, model: ModelRef, gligen: GligenRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        """Return the size of a GLIGEN model, and what a run with `model` needs of it. Raises CorruptFile,
        UnknownArchitecture, or UnusableField for one that was trained for other models."""
        opened = self.opened(gligen)
        opened.check_fits(self._open_model(model))
        return with_fetch(opened.spec(), gligen.files), opened.use(passes)

    def opened(self, gligen: GligenRef) -> OpenGligen:
        """Return the GLIGEN model, built. Raises CorruptFile or UnknownArchitecture."""
        described = replace(gligen, path=self._registry.described_path(gligen.path))
        return self._opened.get(gligen.content, lambda: OpenGligen(described, self._device))
