"""The open modules of one kind that an engine has besides modules of checkpoints, as patchers: ControlNets, image
prompt adapters, upscalers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.values.specs.spec import ComponentKey, Role
from modelpool.pool.weights.patcher.compute_context import RunTools
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patcher.weight_form import WeightForm
from modelpool.pool.weights.vram.vram_manager import VramManager

#: limit of open modules of a kind without bytes on the device
ATTACHED_KEPT = 32


class AttachedRef(Protocol):
    """The reference to the file of such a module."""

    @property
    def content(self) -> object:
        """Identity of the module, whatever its use."""


class OpenAttached(Protocol):
    """Such a file, mapped and built."""

    @property
    def module(self) -> nn.Module:
        """The module."""

    @property
    def form(self) -> WeightForm:
        """The dtype and form of its weights."""

    def typical_call(self) -> Callable[[nn.Module], object]:
        """Return one call of typical size, with inputs on the meta device."""


Ref = TypeVar("Ref", bound=AttachedRef)


class AttachedPatchers(Generic[Ref]):
    """Opens modules of one kind on first use, and keeps them open."""

    def __init__(
        self,
        device: torch.device,
        capabilities: DeviceCapabilities,
        tools: RunTools,
        patchers: dict[ComponentKey, ModelPatcher],
        vram: VramManager,
        role: Role,
        key_of: Callable[[Ref], ComponentKey],
        open_file: Callable[[Ref, DeviceCapabilities], OpenAttached],
    ) -> None:
        """`patchers` are all patchers of the engine; `vram` manages their weights."""
        self._device, self._capabilities, self._tools = device, capabilities, tools
        self._patchers, self._vram = patchers, vram
        self._role, self._key_of, self._open_file = role, key_of, open_file
        #: keys of the open modules, least recently used first
        self._opened: dict[ComponentKey, None] = {}

    def of(self, refs: Iterable[Ref]) -> tuple[ModelPatcher, ...]:
        """Return a clone for each of `refs`; one shared clone if a module is used several times. Raises CorruptFile or
        UnknownArchitecture."""
        clones: dict[object, ModelPatcher] = {}
        patchers = tuple(clones.setdefault(ref.content, self._one(ref)) for ref in refs)
        self._close_unused(max(ATTACHED_KEPT, len(clones)))
        return patchers

    def _one(self, ref: Ref) -> ModelPatcher:
        key = self._key_of(ref)
        self._opened.pop(key, None)
        if (managed := self._vram.components.get(key)) is not None:
            self._patchers[key] = managed
        else:
            opened = self._open_file(ref, self._capabilities)
            patcher = ModelPatcher.of(
                key, self._role, opened.module, self._device, opened.form, self._tools, opened.typical_call()
            )
            self._vram.components.add(patcher)
            self._patchers[key] = patcher
        self._opened[key] = None  # most recently used
        return self._patchers[key].clone()

    def _close_unused(self, kept: int) -> None:
        """Close the least recently used modules, except for the last `kept`, that have no bytes on the device."""
        for key in list(self._opened)[:-kept]:
            if self._vram.is_idle(key):
                del self._opened[key], self._patchers[key]
                self._vram.remove(key)
