"""The open upscalers of one engine, as patchers."""

from __future__ import annotations

import torch

from modelpool.pool.core.stage_params import UpscalerRef, upscaler_key
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.patcher.compute_context import RunTools
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.specs.spec import ComponentKey, Role
from modelpool.pool.upscalers.open_upscaler import OpenUpscaler
from modelpool.pool.vram.vram_manager import VramManager

#: limit of open upscalers without bytes on the device
UPSCALERS_KEPT = 16


class UpscalerPatchers:
    """Opens upscalers on first use, and keeps them open."""

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
        #: keys of the open upscalers, least recently used first
        self._opened: dict[ComponentKey, None] = {}

    def of(self, upscaler: UpscalerRef) -> ModelPatcher:
        """Return a clone. Raises CorruptFile or UnknownArchitecture."""
        key = upscaler_key(upscaler)
        self._opened.pop(key, None)
        if (managed := self._vram.managed(key)) is not None:
            self._patchers[key] = managed
        else:
            opened = OpenUpscaler(upscaler, self._capabilities)
            patcher = ModelPatcher.of(
                key, Role.UPSCALER, opened.module, self._device, opened.form, self._tools, opened.typical_call()
            )
            self._vram.add(patcher)
            self._patchers[key] = patcher
        self._opened[key] = None  # most recently used
        found = self._patchers[key].clone()
        for other in list(self._opened)[:-UPSCALERS_KEPT]:
            if self._vram.is_idle(other):
                del self._opened[other], self._patchers[other]
                self._vram.remove(other)
        return found
