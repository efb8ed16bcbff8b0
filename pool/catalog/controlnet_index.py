"""The ControlNets that a catalog was asked for, by name and opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelpool.pool.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.core.stage_params import ControlRef, ModelRef
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.registry.kinds import Kind
from modelpool.pool.registry.names import without_ending
from modelpool.pool.registry.registry import Registry
from modelpool.pool.specs.spec import ComponentSpec, ComponentUse

CONTROLNETS = frozenset({Kind.CONTROLNET})


class ControlShelf:
    """Those of one registry."""

    def __init__(
        self, registry: Registry, device: str | DeviceCapabilities, open_model: Callable[[ModelRef], OpenModel]
    ) -> None:
        """`device` is what they are to run on, or the name of its kind."""
        self._registry, self._device, self._open_model = registry, device, open_model
        self._opened: dict[object, OpenControlNet] = {}
        self._names: dict[str, str] = {}

    def find(self, name: str, strength: float, start: float, end: float, mode: str | int | None = None) -> ControlRef:
        """The file called `name`. A copy of one that was asked for before goes by the name that it had first; how it is
        called and what its folder says of it are its own. `ControlRef.hole` is how it can be told of one. Raises
        UnknownName, AmbiguousName, CorruptFile or UnknownArchitecture, and UnusableField for a `mode` that it does not
        have."""
        file = self._registry.find(name, CONTROLNETS, "ControlNet")
        digest = self._registry.hashes(file).sha256
        own = self._names.setdefault(digest, without_ending(file.path.name))
        found = ControlRef(own, str(file.real_path), digest, strength, start, end)
        opened = self.opened(found)
        number, said, bright = opened.mode_of(mode), opened.said_at(file.path), opened.reads_bright_at(file.path)
        latent, hole = opened.kind.reads_latent, opened.hole_at(file.path, mode)
        return replace(found, mode=number, reads_latent=latent, bright=bright, said=said, hole=hole)

    def beside(self, model: ModelRef, control: ControlRef, passes: int = 1) -> tuple[ComponentSpec, ComponentUse]:
        """The size of a ControlNet, and what a run beside `model` needs of it. Raises CorruptFile, UnknownArchitecture,
        or UnusableField for one that was made for other models."""
        opened = self.opened(control)
        opened.check_fits(self._open_model(model))
        return opened.spec(), opened.use(passes)

    def opened(self, control: ControlRef) -> OpenControlNet:
        """It, built. Raises CorruptFile or UnknownArchitecture."""
        if control.content not in self._opened:
            self._opened[control.content] = OpenControlNet(control, self._device)
        return self._opened[control.content]
