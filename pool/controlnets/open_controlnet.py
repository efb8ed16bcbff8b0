"""`OpenControlNet`: a ControlNet's file, mapped and built, with its sizes, as `pool.open_model` has a checkpoint's.

What the engine runs and what the catalog describes come from here. Nothing is read until it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from pool.checkpoints.files.regular_file import read_text_file
from pool.checkpoints.files.strict_json import BadJson, read_object
from pool.checkpoints.mapped_file import MappedFile
from pool.checkpoints.safetensors_file import Shape
from pool.controlnets.build import plan_controlnet
from pool.controlnets.fits import check_fits, mode_of
from pool.controlnets.needs import usual_call
from pool.controlnets.other_names import EDGES, PICTURE_KIND
from pool.devices.capabilities import DeviceCapabilities, capabilities_of
from pool.errors import CorruptFile, UnknownArchitecture
from pool.open_model import OpenModel, form_of
from pool.patches.patch_set import PatchSet
from pool.sizing import component_spec, component_use, own_weights
from pool.spec import ComponentSpec, ComponentUse, Role
from pool.work import ControlRef, control_key

#: what the weights of a folder of diffusers are called, and what lies beside them there
_FOLDER_WEIGHTS, _FOLDER_CONFIG = "diffusion_pytorch_model", "config.json"
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
            plan = plan_controlnet(_used(mapped), _config_beside(Path(ref.path)))
            self.module: Any = plan.build(mapped.tensors())
        except UnknownArchitecture as error:
            raise UnknownArchitecture(f"{ref.path}: {error}") from None
        #: what it is, and how it is called
        self.kind = plan.kind
        #: the picture whose latent it reads is as `pool.work.EncodePictureWork.bright` has it
        self.reads_bright = self.kind.reads_rows(self.module) and _is_for_edges(Path(ref.path), mapped)
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


def _is_for_edges(path: Path, mapped: MappedFile) -> bool:
    """Whether it reads edges, where several of one layout read different pictures: its file says it, or its name."""
    if PICTURE_KIND in mapped.header.shapes:
        return round(float(mapped.tensors()[PICTURE_KIND].flatten()[0])) == EDGES
    name = path.parent.name if path.name.startswith(_FOLDER_WEIGHTS) else path.name
    return "canny" in name.lower()


def _config_beside(path: Path) -> dict[str, Any] | None:
    """The configuration in a folder of diffusers that the file lies in. Raises CorruptFile for one that is no JSON."""
    place = path.parent / _FOLDER_CONFIG
    if not path.name.startswith(_FOLDER_WEIGHTS) or not place.is_file():
        return None
    try:
        return read_object(read_text_file(place, "the configuration of a ControlNet"))
    except BadJson as error:
        raise CorruptFile(f"{place}: {error}") from None
