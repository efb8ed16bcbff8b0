"""Build a diffusion model from the tensors of its file: plan from shapes, fill with tensors, save back.

Joins recognition, configuration, key map and module. Copies only tensors that a layout stores in another form. Does not
know where files are, nor how a model is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts, recognise_diffusion
from modelpool.pool.families.detection.layouts.signature import Naming
from modelpool.pool.families.parts.forward import Arguments
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.models.components.common.diffusers_private import ConverterChangedError, differing_keys
from modelpool.pool.models.components.common.fitted_key_map import fitted
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.diffusion.architecture import DiffusionArchitecture
from modelpool.pool.models.components.diffusion.folder_config import config_arguments
from modelpool.pool.models.components.diffusion.meta_module import empty_module, tables_of
from modelpool.pool.models.components.diffusion.rows import ARCHITECTURES
from modelpool.pool.values.core.errors import UnknownArchitecture, counted
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover


@dataclass(frozen=True, slots=True)
class DiffusionModelPlan(ModulePlan):
    """The plan for building the diffusion model in a file.

    recognised    its facts, with the key prefix in the file
    config        the arguments of its class
    key_map       between the file's tensors (keys as in the file) and the module's parameters
    architecture  the row that builds and calls it
    """

    recognised: DiffusionFacts
    config: Arguments
    key_map: KeyMap
    architecture: DiffusionArchitecture

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        module = empty_module(self.architecture.module, self.config)
        return module, fitted(self.key_map, module, f"recognised as {self.recognised.title}, but")

    def complete(self, module: nn.Module) -> None:
        """Check that the file had all tables."""
        left = [name for name, value in tables_of(module) if value.is_meta]
        assert not left, f"{type(module).__name__} has unfilled tables: {left}"

    def call(self, module: nn.Module, x: Tensor, level_B: Tensor, kwargs: Mapping[str, Tensor]) -> Tensor:
        """Return the prediction of `module` for the latent `x` at `level_B`; see `DiffusionArchitecture`."""
        return self.architecture.call(module, x, level_B, kwargs)


def plan_diffusion_model(
    shapes: Mapping[str, Shape],
    prefix: str = "",
    *,
    config: Mapping[str, Any] | None = None,
    companions: tuple[str, ...] = (),
) -> DiffusionModelPlan:
    """Plan the diffusion model among `shapes`, from shapes alone.

    Its keys begin with `prefix`, plus any prefix that recognition finds. `config` is its config.json, if one exists: it
    supplies what shapes do not tell. `companions` are key prefixes of parts of the module that are components of their
    own in diffusers folders; their keys are the module's.

    Raises UnknownArchitecture if the model is unknown, incomplete, or not supported by the installed diffusers.
    """
    found = recognise_diffusion({k.removeprefix(prefix): tuple(s) for k, s in shapes.items() if k.startswith(prefix)})
    if found is None:
        first = ", ".join(list(shapes)[:3]) or "none"
        matching = counted(len(shapes), "tensor matches", "tensors match")
        raise UnknownArchitecture(f"diffusion model: its {matching} no known model (the first are {first})")
    found = replace(found, prefix=prefix + found.prefix)
    architecture = architecture_of(found)
    own = {key: tuple(shape) for key, shape in shapes.items() if key.startswith((found.prefix, *companions))}
    try:
        key_map = discover(own, lambda tensors: converted(architecture, found, tensors))
        arguments = architecture.config(found.config, key_map.shapes)
        if config is not None:
            arguments = arguments | config_arguments(architecture.module, config, len(own), architecture.lengths)
    except UnknownArchitecture:
        raise
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UnknownArchitecture(f"recognised as {found.title}, but with other tensors: {error!r}") from error
    return DiffusionModelPlan(found, arguments, key_map, architecture)


def architecture_of(recognised: DiffusionFacts) -> DiffusionArchitecture:
    """Return the row that builds and calls a recognised model.

    Raises UnknownArchitecture, naming the model, if there is none.
    """
    if recognised.name not in ARCHITECTURES:
        raise UnknownArchitecture(
            f"recognised as {recognised.title}, which cannot be built: "
            f"expected one of {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[recognised.name]


def converted(
    architecture: DiffusionArchitecture, recognised: DiffusionFacts, tensors: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the module's parameters from `tensors` (keys as in the file)."""
    bare = {key.removeprefix(recognised.prefix): tensor for key, tensor in tensors.items()}
    return bare if recognised.naming is Naming.DIFFUSERS else architecture.convert(bare)


def self_test(shapes: Mapping[str, Shape]) -> None:
    """Check that the module for tensors of `shapes` has the keys and shapes that its converter returns.

    Raises ConverterChangedError naming a difference.
    """
    plan = plan_diffusion_model(shapes)
    difference = differing_keys(plan.key_map, empty_module(plan.architecture.module, plan.config))
    if difference:
        raise ConverterChangedError(f"{plan.recognised.title}: diffusers' module and converter disagree: {difference}")
