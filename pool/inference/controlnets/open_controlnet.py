"""`OpenControlNet`: a ControlNet file, mapped and built, with its sizes, like `pool.models.loading.open_model` for
checkpoints.

Used by the engine and the catalog. Weights are read only when they are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.files.formats.safetensors_file import Shape
from modelpool.pool.inference.controlnets.build_controlnet import plan_controlnet
from modelpool.pool.inference.controlnets.controlnet_bytes import typical_call
from modelpool.pool.inference.controlnets.controlnet_names import EDGES, IMAGE_KIND
from modelpool.pool.inference.controlnets.file_place import is_named, settings_beside
from modelpool.pool.inference.controlnets.fits import check_fits, mode_of
from modelpool.pool.inference.controlnets.inpainting_controlnets import INPAINT, mask_form
from modelpool.pool.models.components.common.extra_tensors import check_extra_tensors
from modelpool.pool.models.components.common.fitted_key_map import within
from modelpool.pool.models.loading.open_model import OpenModel, form_of
from modelpool.pool.values.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.values.core.stage_params import ControlMaskMode, ControlRef, control_key
from modelpool.pool.values.specs.spec import ComponentSpec, ComponentUse, Role
from modelpool.pool.weights.patcher.weight_bytes import component_spec, component_use, module_weights
from modelpool.pool.weights.patches.patch_set import PatchSet
from modelpool.pool.weights.quant.open_weights import OpenWeights, open_weights

#: a key of layers that some files contain but do not use
_UNTRAINED = "control_noise_refiner.0.before_proj.bias"


class OpenControlNet:
    """One open ControlNet."""

    def __init__(self, ref: ControlRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as in `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        weights = open_weights(ref.path, allow_pickle=True)  # was allowed when the reference was created
        try:
            plan = plan_controlnet(_used(weights), dict(ref.config_overrides))
            self.module: Any = plan.build(weights)
            check_extra_tensors(weights, "ControlNet", within(plan.key_map, self.module.state_dict()).unused)
        except UnknownArchitecture as error:
            weights.expect_scales_read(weights.shapes)  # tensors that say scale may be the reason
            raise UnknownArchitecture(f"{ref.path}: {error}") from None
        #: its kind, and how it is called
        self.kind = plan.kind
        self._config = plan.config
        self._reads_edges = _reads_edges_by_file(weights) if self.kind.reads_rows(self.module) else False
        self.key = control_key(ref)
        self.weights = tuple(module_weights(self.module))
        self.form = form_of(Role.CONTROLNET, self.weights, capabilities_of(device), self.kind.dtypes)

    def spec(self) -> ComponentSpec:
        """Return its sizes."""
        return component_spec(self.key, Role.CONTROLNET, self.weights, self.form)

    def use(self, passes: int = 1) -> ComponentUse:
        """Return what a run of `passes` steps needs of it."""
        passes = 1 if self.kind.reads_image_only else passes
        return component_use(self.key, self.weights, self.form, PatchSet(), passes)

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
        """Raise UnusableField unless it is for diffusion models like that of `model`."""
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
