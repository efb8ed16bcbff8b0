"""`OpenControlNet`: a ControlNet file, mapped and built, with its sizes, like `pool.models.loading.open_model` for
checkpoints.

Used by the engine and the catalog. Weights are read only when they are used: the module uses the mapped bytes of the
file. Published layouts differ in key names, configuration and key map; how a ControlNet is called is in
`pool.inference.controlnets.calls`. Equal files may have other names and other configurations next to them, so what
follows from the location belongs to the requested file and is never taken from a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities
from modelpool.pool.families.detection.other_files import CONTROL_PREFIX as PREFIX
from modelpool.pool.families.detection.recognize import mistaken
from modelpool.pool.files.formats.regular_file import read_text_file
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.files.formats.strict_json import BadJson, read_object
from modelpool.pool.inference.controlnets.config import Config
from modelpool.pool.inference.controlnets.controlnet_bytes import typical_call
from modelpool.pool.inference.controlnets.controlnet_kinds import ControlKind, kind_among
from modelpool.pool.inference.controlnets.controlnet_names import EDGES, IMAGE_KIND
from modelpool.pool.inference.controlnets.fits import check_fits, mode_of
from modelpool.pool.inference.controlnets.inpainting_controlnets import INPAINT, mask_form
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.components.common.fitted_key_map import fitted, within
from modelpool.pool.models.components.common.module_plan import ModulePlan
from modelpool.pool.models.components.diffusion.meta_module import empty_module
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.loading.open_part import OpenPart, built_from
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture, counted
from modelpool.pool.values.core.stage_params import ControlMaskMode, ControlRef, control_key
from modelpool.pool.values.specs.spec import ComponentUse, Role
from modelpool.pool.weights.keymaps.key_map import KeyMap, discover
from modelpool.pool.weights.quant.open_weights import OpenWeights

#: weights of a diffusers folder, and the configuration next to them
_FOLDER_WEIGHTS, _FOLDER_CONFIG = "diffusion_pytorch_model", "config.json"
#: folder names in the cache of a model hub
_REVISIONS, _REPOSITORY = "snapshots", "models--"
#: settings that are read from a configuration: those that shapes do not determine
CONFIG_SETTINGS = frozenset({"force_zeros_for_pooled_projection"})


def settings_beside(path: Path, config: Mapping[str, Any]) -> tuple[tuple[str, bool], ...]:
    """Return the settings, by name, in which the configuration in the diffusers folder of the file at `path` differs
    from `config`, the arguments that follow from shapes. It is read only if the class has such settings, and only those
    count. Raises CorruptFile for invalid JSON or a setting that is not a boolean."""
    names, place = sorted(CONFIG_SETTINGS & config.keys()), path.parent / _FOLDER_CONFIG
    if not names or not path.name.startswith(_FOLDER_WEIGHTS) or not place.is_file():
        return ()
    try:
        settings = read_object(read_text_file(place, "the configuration of a ControlNet"))
    except BadJson as error:
        raise CorruptFile(f"{place}: {error}") from None
    for name in names:
        if not isinstance(settings.get(name, False), bool):
            raise CorruptFile(f"{place}: {name}: found {str(settings[name])[:80]!r}, expected true or false")
    return tuple((name, settings[name]) for name in names if name in settings and settings[name] != config[name])


def is_named(path: Path, word: str) -> bool:
    """Whether the name of the file, or of its folder if the file name is generic, contains `word`."""
    return word in _own_name(path).lower()


def _own_name(path: Path) -> str:
    """Return the name of a ControlNet: its file's, or its folder's; in the cache of a hub, where folders are
    named by revision, the repository (`models--OWNER--NAME/snapshots/REVISION`)."""
    if not path.name.startswith(_FOLDER_WEIGHTS):
        return path.name
    folder = path.parent
    is_revision = folder.parent.name == _REVISIONS and folder.parent.parent.name.startswith(_REPOSITORY)
    return folder.parent.parent.name if is_revision else folder.name


@dataclass(frozen=True, slots=True)
class ControlNetPlan(ModulePlan):
    """The plan for building the ControlNet of a file: its kind, the arguments of its class, and the key map between the
    file's tensors and the module's parameters."""

    kind: ControlKind
    config: Config
    key_map: KeyMap

    def fitting(self) -> tuple[nn.Module, KeyMap]:
        """See `ModulePlan.fitting`."""
        try:
            module = empty_module(self.kind.module, self.config)
        except UnknownArchitecture as error:
            raise UnknownArchitecture(
                f"recognised as a ControlNet for {self.kind.title}, but with impossible sizes: {error}"
            ) from error
        return module, fitted(self.key_map, module, f"recognised as a ControlNet for {self.kind.title}, but")


def plan_controlnet(shapes: Mapping[str, Shape], overrides: Mapping[str, bool] | None = None) -> ControlNetPlan:
    """Return how to build the ControlNet among `shapes`; `overrides` overrides arguments that shapes do not determine
    (`pool.values.core.refs.ControlRef.config_overrides`). Raises UnknownArchitecture if there is no ControlNet."""
    has_prefix = any(key.startswith(PREFIX) for key in shapes)
    control_shapes = {key: tuple(shape) for key, shape in shapes.items() if key.startswith(PREFIX) or not has_prefix}
    bare = {key.removeprefix(PREFIX): shape for key, shape in control_shapes.items()}
    kind = kind_among(bare)
    if kind is None:
        first = ", ".join(list(shapes)[:3]) or "none"
        unknown = f"its {counted(len(shapes), 'tensor is', 'tensors are')} not a ControlNet (the first are {first})"
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


#: a key of layers that some files contain but do not use
_UNTRAINED = "control_noise_refiner.0.before_proj.bias"


class OpenControlNet(OpenPart):
    """One open ControlNet."""

    role = Role.CONTROLNET

    def __init__(self, ref: ControlRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as in `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref

        def build(weights: OpenWeights) -> tuple[OpenWeights, ControlNetPlan, Any]:
            plan = plan_controlnet(_used(weights), dict(ref.config_overrides))
            module: Any = plan.build(weights)
            check_extra_tensors(weights, "ControlNet", within(plan.key_map, module.state_dict()).unused)
            return weights, plan, module

        weights, plan, self.module = built_from(ref.path, build)
        #: its kind, and how it is called
        self.kind = plan.kind
        self._config = plan.config
        self._reads_edges = _reads_edges_by_file(weights) if self.kind.reads_rows(self.module) else False
        super().__init__(control_key(ref), self.module, device, self.kind.dtypes)

    def use(self, passes: int = 1) -> ComponentUse:
        """Return what a run of `passes` steps needs of it."""
        return super().use(1 if self.kind.reads_image_only else passes)

    def typical_call(self) -> Callable[[nn.Module], object]:
        """Return one call of typical size, with inputs on the meta device, for dry runs."""
        return typical_call(self.module, self.form.compute_dtype)

    def mode_of(self, requested: str | int | None) -> int | None:
        """Return the number of the requested mode. Raises UnusableField for a mode that it does not have."""
        return mode_of(self.ref.name, self.kind, self.module, requested)

    def settings_at(self, path: Path) -> tuple[tuple[str, bool], ...]:
        """Return `ControlRef.config_overrides` of its copy at `path`. Raises CorruptFile."""
        return settings_beside(path, self._config)

    def reads_bright_at(self, path: Path) -> bool:
        """Whether its copy at `path` reads the latent of an image with
        `pool.values.core.stage_params.EncodeImageParams.bright`, by its file, or else by its name."""
        return is_named(path, "canny") if self._reads_edges is None else self._reads_edges

    def mask_form_at(self, path: Path, requested: str | int | None) -> ControlMaskMode | None:
        """Return how its copy at `path` reads a mask in the requested mode. Raises UnusableField for a mode that it
        does not have."""
        return mask_form(self.kind, self.module, self.mode_of(requested), requested, is_named(path, INPAINT))

    def check_fits(self, model: OpenModel) -> None:
        """Raise UnusableField unless it is for diffusion models like `model`'s."""
        check_fits(self.ref.name, self.kind, self.module, model)


def _used(weights: OpenWeights) -> dict[str, Shape]:
    """Return the tensors of a file that its ControlNet uses. Z-Image's of version 2.0 contain untrained layers, the
    first of which is all zeros. Source: `infer_diffusers_model_type` of diffusers."""
    shapes = weights.shapes
    if _UNTRAINED not in shapes or weights.values_of(_UNTRAINED).any():
        return shapes
    return {key: shape for key, shape in shapes.items() if not key.startswith(_UNTRAINED.split(".")[0])}


def _reads_edges_by_file(weights: OpenWeights) -> bool | None:
    """Whether it reads edges, for layouts shared by ControlNets for several kinds of images; None if its file does not
    determine it. Raises CorruptFile for an invalid number."""
    if IMAGE_KIND not in weights.header.tensors:
        return None
    kinds = weights.values_of(IMAGE_KIND).flatten()
    number = float(kinds.float()) if len(kinds) == 1 and not kinds.is_complex() else math.nan
    if not math.isfinite(number):
        raise CorruptFile(
            f"{weights.header.path}: {IMAGE_KIND}: found {kinds.tolist()[:8]}, expected one finite number"
        )
    return round(number) == EDGES
