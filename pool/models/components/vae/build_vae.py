"""Build a VAE from the tensors of its file: plan from shapes, fill with tensors, save back.

Joins recognition, configuration, key map and module. Copies only tensors that a layout stores in another form. Does not
know where files are, nor what latents mean to a model (`pool.models.components.vae.codec`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from modelpool.pool.families.detection.vaes import VaeFacts, recognise_vae
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.common.vae_compression import measured
from modelpool.pool.models.components.common.vae_configs import Config
from modelpool.pool.models.components.vae.vae_classes import VaeArchitecture, architecture_of, empty_vae
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover

#: convolutions at the latent that some models of a class lack; without one, values pass unchanged
_OPTIONAL = ("quant_conv", "post_quant_conv")
_HALVES = ("encoder", "decoder")
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class VaePlan(ModulePlan):
    """The plan for building the VAE in a file.

    facts    its facts
    config   the arguments of its class
    prefix   its key prefix in the file
    key_map  between the file's tensors (keys as in the file) and the module's parameters
    """

    facts: VaeFacts
    config: Config
    prefix: str
    key_map: KeyMap
    _architecture: VaeArchitecture

    def empty(self, more: Mapping[str, Any] = NO_ARGUMENTS) -> nn.Module:
        """Return the module without weights; a missing half is replaced by a module that raises when called.

        `more` are class arguments that no shape determines and no call depends on: the scale of its latents.

        Raises UnknownArchitecture if the file lacks tensors of the class, has some in other shapes, or has more layers.
        """
        return self.fitting(more)[0]

    def fitting(self, more: Mapping[str, Any] = NO_ARGUMENTS) -> tuple[nn.Module, KeyMap]:
        """Return `empty`, and the key map without the file's tensors that the module has no parameter for: training
        leaves such tensors, and they change nothing. Raises as `empty`."""
        module = empty_vae(self._architecture, {**self.config, **more})
        mapped = self.key_map.shapes
        for name, part in list(module.named_children()):
            if any(key.startswith(f"{name}.") for key in mapped) or not part.state_dict():
                continue
            if name in _OPTIONAL:
                setattr(module, name, nn.Identity())
            elif name in _HALVES:
                setattr(module, name, MissingHalf(self.facts.title, name))
        _fill_tables(module, mapped)
        title = f"recognised as the VAE of {self.facts.title}, but"
        return module, fitted(self.key_map, module, title, _carried(module, mapped))


class MissingHalf(nn.Module):
    """Stand-in for the encoder or decoder that a file lacks."""

    def __init__(self, title: str, half: str) -> None:
        super().__init__()
        self._title, self._half = title, half

    def forward(self, *_: object, **__: object) -> Tensor:
        """Raises UnknownArchitecture."""
        raise UnknownArchitecture(f"this file of the VAE of {self._title} has no {self._half}: use one that has it")


def plan_vae(
    shapes: Mapping[str, Shape],
    prefix: str = "",
    *,
    facts: VaeFacts | None = None,
    dtypes: Mapping[str, str] | None = None,
) -> VaePlan:
    """Plan the VAE among `shapes` with key prefix `prefix`, from shapes alone.

    `facts` overrides recognition (HunyuanImage's refiner has the layout of HunyuanVideo 1.5).

    Raises UnknownArchitecture if the VAE is unknown, or the installed diffusers cannot build it.
    """
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(prefix)}
    bare = {key.removeprefix(prefix): shape for key, shape in own.items()}
    found = facts or recognise_vae(bare, {key.removeprefix(prefix): dtype for key, dtype in (dtypes or {}).items()})
    if found is None:
        first = ", ".join(list(bare)[:3]) or "none"
        raise UnknownArchitecture(
            f"VAE: its {counted(len(bare), 'tensor matches', 'tensors match')} no known VAE (the first are {first})"
        )
    architecture = architecture_of(found)
    try:
        key_map = discover(
            own, lambda tensors: architecture.convert({key.removeprefix(prefix): x for key, x in tensors.items()})
        )
        config = architecture.config(bare)
        measures = measured(found, config)
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as the VAE of {found.title}, but with other tensors: {error}") from error
    return VaePlan(measures, config, prefix, key_map, architecture)


def spliced_vae(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> VaePlan:
    """Plan a VAE that is stored in several places of a file: `names` maps its keys in `shapes` to the keys of a
    contiguous VAE. Raises UnknownArchitecture."""
    plan = plan_vae({names[key]: shape for key, shape in shapes.items()})

    def convert(tensors: dict[str, Tensor]) -> Mapping[str, Tensor]:
        return plan._architecture.convert({names[key]: tensor for key, tensor in tensors.items()})

    return replace(plan, key_map=discover(dict(shapes), convert))


def _carried(module: nn.Module, mapped: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Return the part of a module's state that a file must hold: all but optional counters."""
    return {
        key: value
        for key, value in module.state_dict().items()
        if key in mapped or not key.endswith(".num_batches_tracked")
    }


def _fill_tables(module: nn.Module, mapped: Mapping[str, Shape]) -> None:
    """Give values to buffers that no file carries, or that this one lacks."""
    for name, part in module.named_modules():
        buffers = part._buffers
        wavelets = buffers.get("wavelets")
        if wavelets is not None and "_arange" in buffers:
            part.register_buffer("_arange", torch.arange(wavelets.shape[0]), persistent=False)
        frequencies = buffers.get("inv_freq")
        if frequencies is not None and frequencies.is_meta:  # of rotary positions: the class computes them
            kind: Any = type(part)
            part.register_buffer("inv_freq", kind(2 * len(frequencies)).inv_freq, persistent=False)
        if "num_batches_tracked" in buffers and f"{name}.num_batches_tracked" not in mapped:
            part.register_buffer("num_batches_tracked", torch.tensor(0))
