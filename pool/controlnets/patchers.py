"""The ControlNets that one engine has opened, as patchers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from modelpool.pool.controlnets.open_controlnet import OpenControlNet
from modelpool.pool.core.stage_params import ControlRef, control_key
from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.patcher.compute_context import ComputeTools
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.specs.spec import ComponentKey, Role


class ControlPatchers:
    """Opens ControlNets when they are first used, and keeps them."""

    def __init__(
        self,
        device: torch.device,
        capabilities: DeviceCapabilities,
        tools: ComputeTools,
        patchers: dict[ComponentKey, ModelPatcher],
        add: Callable[[ModelPatcher], None],
    ) -> None:
        """`patchers` are all that the engine has; `add` makes a new one known to whoever moves weights."""
        self._device, self._capabilities, self._tools = device, capabilities, tools
        self._patchers, self._add = patchers, add

    def of(self, controls: Iterable[ControlRef]) -> tuple[ModelPatcher, ...]:
        """A clone over each ControlNet; the same one where one speaks of two images. Raises CorruptFile or
        UnknownArchitecture."""
        clones: dict[object, ModelPatcher] = {}
        return tuple(clones.setdefault(control.content, self._one(control)) for control in controls)

    def _one(self, control: ControlRef) -> ModelPatcher:
        key = control_key(control)
        if key not in self._patchers:
            opened = OpenControlNet(control, self._capabilities)
            patcher = ModelPatcher.of(
                key, Role.CONTROLNET, opened.module, self._device, opened.form, self._tools, opened.usual_call()
            )
            self._patchers[key] = patcher
            self._add(patcher)
        return self._patchers[key].clone()
