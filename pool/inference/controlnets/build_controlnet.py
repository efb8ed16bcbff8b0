"""Builds a ControlNet from the tensors of its file, in any of the published layouts.

Combines key names, configuration, key map and module. Nothing is copied: the module uses the mapped bytes of the file.
Knows neither file locations nor how a ControlNet is called (`pool.inference.controlnets.calls`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from modelpool.pool.families.detection.other_files import CONTROL_PREFIX as PREFIX
from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.controlnets.config import Config
from modelpool.pool.inference.controlnets.controlnet_kinds import ControlKind, kind_among
from modelpool.pool.models.components.common.fitted_key_map import fitted, within
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.values.core.errors import UnknownArchitecture
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover
from modelpool.pool.weights.ops.fill_parameters import assert_filled, fill


@dataclass(frozen=True, slots=True)
class ControlNetPlan:
    """The plan for building the ControlNet of a file: its kind, the arguments of its class, and the key map between the
    file's tensors and the module's parameters."""

    kind: ControlKind
    config: Config
    key_map: KeyMap

    def empty(self) -> nn.Module:
        """Return the module without weights. Raises UnknownArchitecture if the file lacks tensors of the class, has
        some in other shapes, or has more layers."""
        return self.fitting()[0]

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """Return `empty`, and the key map without tensors that the module has no parameter for. Raises as `empty`."""
        try:
            module = empty_module(self.kind.module, self.config)
        except UnknownArchitecture as error:
            raise UnknownArchitecture(
                f"recognised as a ControlNet for {self.kind.title}, but with impossible sizes: {error}"
            ) from error
        return module, fitted(self.key_map, module, f"recognised as a ControlNet for {self.kind.title}, but")

    def build(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the module over `tensors` (keys as in the file), in evaluation mode, without gradients. Raises as
        `empty`."""
        module, key_map = self.fitting()
        fill(module, key_map.load(tensors))
        assert_filled(module)
        return module

    def save(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the file's tensors from `module`'s parameters; those that it does not use are taken from `tensors`."""
        key_map = within(self.key_map, module.state_dict())
        return key_map.save(module.state_dict()) | {key: tensors[key] for key in key_map.unused}


def plan_controlnet(shapes: Mapping[str, Shape], overrides: Mapping[str, bool] | None = None) -> ControlNetPlan:
    """Return how to build the ControlNet among `shapes`; `overrides` overrides arguments that shapes do not determine
    (`pool.values.core.refs.ControlRef.config_overrides`). Raises UnknownArchitecture if there is no ControlNet."""
    has_prefix = any(key.startswith(PREFIX) for key in shapes)
    control_shapes = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(PREFIX) or not has_prefix}
    bare = {key.removeprefix(PREFIX): shape for key, shape in control_shapes.items()}
    kind = kind_among(bare)
    if kind is None:
        first = ", ".join(list(shapes)[:3]) or "none"
        unknown = f"its {len(shapes)} tensors are not a ControlNet (the first are {first})"
        raise UnknownArchitecture(mistaken(shapes, "a ControlNet that this version runs", unknown))
    convert = kind.convert(bare)
    try:
        key_map = discover(
            control_shapes, lambda tensors: convert({key.removeprefix(PREFIX): x for key, x in tensors.items()})
        )
        config = kind.config(key_map.shapes)
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(
            f"recognised as a ControlNet for {kind.title}, but with unexpected tensors: {error}"
        ) from error
    return ControlNetPlan(kind, {**config, **(overrides or {})}, key_map)
