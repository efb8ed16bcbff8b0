"""The open ControlNets of one engine, as patchers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from modelpool.pool.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.core.stage_params import ControlRef, control_key
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.patcher.compute_context import RunTools
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.specs.spec import ComponentKey, Role
from modelpool.pool.vram.vram_manager import VramManager

#: limit of open ControlNets without bytes on the device
CONTROLNETS_KEPT = 32


class ControlPatchers:
    """Opens ControlNets on first use, and keeps them open."""

    def __init__(
        self,
        device: torch.device,
        capabilities: DeviceCapabilities,
        tools: RunTools,
        patchers: dict[ComponentKey, ModelPatcher],
        vram: VramManager,
    ) -> None:
        """`patchers` are all patchers of the engine; `vram` manages their weights."""
        self._device, self._capabilities, self._tools = device, capabilities, tools
        self._patchers, self._vram = patchers, vram
        #: keys of the open ControlNets, least recently used first
        self._opened: dict[ComponentKey, None] = {}

    def of(self, controls: Iterable[ControlRef]) -> tuple[ModelPatcher, ...]:
        """Return a clone for each ControlNet; one shared clone if a ControlNet is used several times. Raises
        CorruptFile or UnknownArchitecture."""
        clones: dict[object, ModelPatcher] = {}
        patchers = tuple(clones.setdefault(control.content, self._one(control)) for control in controls)
        self._close_unused(max(CONTROLNETS_KEPT, len(clones)))
        return patchers

    def _one(self, control: ControlRef) -> ModelPatcher:
        key = control_key(control)
        self._opened.pop(key, None)
        if (managed := self._vram.managed(key)) is not None:
            self._patchers[key] = managed
        else:
            opened = OpenControlNet(control, self._capabilities)
            patcher = ModelPatcher.of(
                key, Role.CONTROLNET, opened.module, self._device, opened.form, self._tools, opened.typical_call()
            )
            self._vram.add(patcher)
            self._patchers[key] = patcher
        self._opened[key] = None  # most recently used
        return self._patchers[key].clone()

    def _close_unused(self, kept: int) -> None:
        """Close the least recently used ControlNets, except for the last `kept`, that have no bytes on the device."""
        for key in list(self._opened)[:-kept]:
            if self._vram.is_idle(key):
                del self._opened[key], self._patchers[key]
                self._vram.remove(key)
