"""`OpenControlNet`: a ControlNet's file, mapped and built, with its sizes, as `pool.loading.open_model` has a
checkpoint's.

What the engine runs and what the catalog describes come from here. Nothing is read until it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from modelpool.pool.controlnets.build import plan_controlnet
from modelpool.pool.controlnets.controlnet_bytes import usual_call
from modelpool.pool.controlnets.file_place import is_named, said_beside
from modelpool.pool.controlnets.fits import check_fits, mode_of
from modelpool.pool.controlnets.inpainting import INPAINT, hole_told
from modelpool.pool.controlnets.other_names import EDGES, IMAGE_KIND
from modelpool.pool.core.errors import CorruptFile, UnknownArchitecture
from modelpool.pool.core.stage_params import ControlRef, HoleTold, control_key
from modelpool.pool.devices.capabilities import DeviceCapabilities, capabilities_of
from modelpool.pool.formats.safetensors_file import Shape
from modelpool.pool.loading.open_model import OpenModel, form_of
from modelpool.pool.mapping.mapped_file import MappedFile
from modelpool.pool.patcher.weight_bytes import component_spec, component_use, own_weights
from modelpool.pool.patches.patch_set import PatchSet
from modelpool.pool.specs.spec import ComponentSpec, ComponentUse, Role

#: of layers that some files have and do not use
_UNTRAINED = "control_noise_refiner.0.before_proj.bias"


class OpenControlNet:
    """One ControlNet."""

    def __init__(self, ref: ControlRef, device: str | DeviceCapabilities) -> None:
        """Map the file and build the module. `device` is as of `OpenModel`. Raises CorruptFile or
        UnknownArchitecture."""
        self.ref = ref
        mapped = MappedFile.open(Path(ref.path), allow_pickle=True)  # whoever made the reference has allowed it
        try:
            plan = plan_controlnet(_used(mapped), dict(ref.said))
            self.module: Any = plan.build(mapped.tensors())
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{ref.path}: {error}") from None
        #: what it is, and how it is called
        self.kind = plan.kind
        self._config = plan.config
        self._reads_edges = _says_edges(ref.path, mapped) if self.kind.reads_rows(self.module) else False
        self.key = control_key(ref)
        self.weights = tuple(own_weights(self.module))
        self.form = form_of(Role.CONTROLNET, self.weights, capabilities_of(device), self.kind.dtypes)

    def spec(self) -> ComponentSpec:
        """Its sizes."""
        return component_spec(self.key, Role.CONTROLNET, self.weights, self.form)

    def use(self, passes: int = 1) -> ComponentUse:
        """What a run needs of it."""
        return component_use(self.key, self.weights, self.form, PatchSet(), passes)

    def usual_call(self) -> Callable[[nn.Module], object]:
        """One call of a usual size, with inputs on the meta device, for dry runs."""
        return usual_call(self.module, self.form.compute_dtype)

    def mode_of(self, said: str | int | None) -> int | None:
        """The number of the mode that a request means. Raises UnusableField for one that it does not have."""
        return mode_of(self.ref.name, self.kind, self.module, said)

    def said_at(self, path: Path) -> tuple[tuple[str, bool], ...]:
        """`ControlRef.said` of its copy at `path`, where nothing is said of it itself. Raises CorruptFile."""
        return said_beside(path, self._config)

    def reads_bright_at(self, path: Path) -> bool:
        """Whether its copy at `path` reads the latent of an image as `pool.core.stage_params.EncodeImageWork.bright`
        has it: its
        file says it, or its name."""
        return is_named(path, "canny") if self._reads_edges is None else self._reads_edges

    def hole_at(self, path: Path, said: str | int | None) -> HoleTold | None:
        """How its copy at `path` can be told of a hole, in the mode that a request calls `said`. Raises UnusableField
        for one that it does not have."""
        return hole_told(self.kind, self.module, self.mode_of(said), said, is_named(path, INPAINT))

    def check_fits(self, model: OpenModel) -> None:
        """Raise UnusableField unless it was made for diffusion models like that of `model`."""
        check_fits(self.ref.name, self.kind, self.module, model)


def _used(mapped: MappedFile) -> dict[str, Shape]:
    """The tensors of a file that its ControlNet is made of. Those of Z-Image of version 2.0 have layers that were never
    trained, whose first is zeros. Source: `infer_diffusers_model_type` of diffusers."""
    shapes = {key: tuple(shape) for key, shape in mapped.header.shapes.items()}
    if _UNTRAINED not in shapes or mapped.tensors()[_UNTRAINED].any():
        return shapes
    return {key: shape for key, shape in shapes.items() if not key.startswith(_UNTRAINED.split(".")[0])}


def _says_edges(path: str, mapped: MappedFile) -> bool | None:
    """Whether it reads edges, where several of one layout read different images; None where its file does not say it.
    Raises CorruptFile for one that says no number."""
    if IMAGE_KIND not in mapped.header.shapes:
        return None
    kinds = mapped.tensors()[IMAGE_KIND].flatten()
    number = float(kinds.float()) if len(kinds) == 1 and not kinds.is_complex() else math.nan
    if not math.isfinite(number):
        raise CorruptFile(f"{path}: {IMAGE_KIND}: found {kinds.tolist()[:8]}, expected one finite number")
    return round(number) == EDGES
