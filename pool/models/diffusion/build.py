"""A diffusion model from the tensors of its file: planned from shapes alone, built over the tensors, saved back.

Knows how recognition, configuration, key map and module go together. Nothing is copied but what a layout keeps in
another form. Does not know where files are, nor how a model is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from modelpool.pool.core.errors import UnknownArchitecture
from modelpool.pool.detection.diffusion import DiffusionFacts, recognise_diffusion
from modelpool.pool.detection.layouts.signature import Naming
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.keymaps.key_map import KeyMap, discover
from modelpool.pool.models.common.diffusers_private import ConverterChangedError, differing_keys
from modelpool.pool.models.diffusion.architecture import Architecture, Arguments
from modelpool.pool.models.diffusion.folder_config import given_arguments
from modelpool.pool.models.diffusion.meta_module import empty_module, tables_of
from modelpool.pool.models.diffusion.rows import ARCHITECTURES
from modelpool.pool.ops.fill_parameters import assert_filled, fill


@dataclass(frozen=True, slots=True)
class DiffusionModelPlan:
    """How the diffusion model in a file is built.

    recognised    what it is; its prefix is what the file's keys begin with
    config        the arguments of its class
    key_map       between the file's tensors (keys as in the file) and the module's parameters
    architecture  the row that builds and calls it
    """

    recognised: DiffusionFacts
    config: Arguments
    key_map: KeyMap
    architecture: Architecture

    def empty(self) -> nn.Module:
        """The module without weights.

        Raises UnknownArchitecture when the file's tensors are not those of the class.
        """
        module = empty_module(self.architecture.module, self.config)
        difference = differing_keys(self.key_map, module)
        if difference:
            raise UnknownArchitecture(f"recognised as {self.recognised.title}, but {difference}")
        return module

    def build(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """The module over `tensors` (keys as in the file), in evaluation mode, without gradients.

        Raises UnknownArchitecture when the file's tensors are not those of the class.
        """
        module = self.empty()
        fill(module, self.key_map.load(tensors))
        assert_filled(module)
        left = [name for name, value in tables_of(module) if value.is_meta]
        assert not left, f"{type(module).__name__} has tables that nothing computes: {left}"
        return module

    def save(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The file's tensors made of `module`'s parameters; those that are no part of it are taken from `tensors`."""
        unused = {key: tensors[key] for key in self.key_map.unused}
        return self.key_map.save(module.state_dict()) | unused

    def call(self, module: nn.Module, x: Tensor, level_B: Tensor, told: Mapping[str, Tensor]) -> Tensor:
        """What `module` predicts for the latent `x` at `level_B`; see `Architecture`."""
        return self.architecture.call(module, x, level_B, told)


def plan_diffusion_model(
    shapes: Mapping[str, Shape], prefix: str = "", *, config: Mapping[str, Any] | None = None
) -> DiffusionModelPlan:
    """How the diffusion model among `shapes` is built, from shapes alone.

    Its keys are those that begin with `prefix`, or with the prefix that it is recognised with. `config` is the
    config.json beside it, where there is one: it tells what shapes do not.
    Raises UnknownArchitecture when it is none that is known, none that the installed diffusers builds, or not whole.
    """
    found = recognise_diffusion({k.removeprefix(prefix): tuple(s) for k, s in shapes.items() if k.startswith(prefix)})
    if found is None:
        first = ", ".join(list(shapes)[:3]) or "none"
        raise UnknownArchitecture(
            f"diffusion model: its {len(shapes)} tensors match no known model (the first are {first})"
        )
    found = replace(found, prefix=prefix + found.prefix)
    architecture = architecture_of(found)
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(found.prefix)}
    try:
        key_map = discover(own, lambda tensors: converted(architecture, found, tensors))
        arguments = architecture.config(found.config, key_map.shapes)
        if config is not None:
            arguments = arguments | given_arguments(architecture.module, config, len(own))
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as {found.title}, but with other tensors: {error!r}") from error
    return DiffusionModelPlan(found, arguments, key_map, architecture)


def architecture_of(recognised: DiffusionFacts) -> Architecture:
    """The row that builds and calls what was recognised.

    Raises UnknownArchitecture, naming it, where there is none.
    """
    if recognised.name not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"recognised as {recognised.title}, which is not among the models that are built: "
            f"expected one of {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[recognised.name]


def converted(
    architecture: Architecture, recognised: DiffusionFacts, tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """The module's parameters made of `tensors`, whose keys are those of the file."""
    bare = {key.removeprefix(recognised.prefix): tensor for key, tensor in tensors.items()}
    return bare if recognised.naming is Naming.DIFFUSERS else architecture.convert(bare)


def self_test(shapes: Mapping[str, Shape]) -> None:
    """Check that the module of the model with tensors of `shapes` has the keys and shapes that its converter gives.

    Raises ConverterChangedError saying which differ.
    """
    plan = plan_diffusion_model(shapes)
    difference = differing_keys(plan.key_map, empty_module(plan.architecture.module, plan.config))
    if difference:
        raise ConverterChangedError(f"{plan.recognised.title}: diffusers builds otherwise than converted: {difference}")
